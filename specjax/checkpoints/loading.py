"""Loads checkpoints from directories, with parameters or with their shapes alone."""

import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from specjax import devices
from specjax.checkpoints import finding, parameters, tokenizers, unfollowed
from specjax.checkpoints.config_json import check_fields, merge_ids, naming, text_model
from specjax.checkpoints.families import FAMILIES, family_of
from specjax.checkpoints.formats.gguf_files import is_gguf
from specjax.checkpoints.precision import fastest
from specjax.checkpoints.tensors import Tensor, float_dtype
from specjax.checkpoints.weights import find_tensors
from specjax.models import int8, meshes, sharding
from specjax.models.checkpoint import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.models.memory import check_fits, dtype_of, gigabytes, nbytes
from specjax.models.sharding import Placement

LOG = logging.getLogger(__name__)
NARROWER: dict[str, dict[str, Any]] = {
    "in bfloat16": {"dtype": jnp.bfloat16},
    "with weights='int8'": {"weights": "int8"},
}
"""Ways to hold parameters in less memory, and their options."""


def load(
    name: str | os.PathLike,
    *,
    dtype: Any = None,
    device: jax.Device | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    mesh: Mesh | str | None = None,
    replicate: bool = False,
) -> Checkpoint:
    """Load a model, its config and its tokenizer.

    Args:
      name: a directory in Hugging Face's layout or in T5X's, a file such as "model.gguf", or a hub
        name such as "google-t5/t5-small". Configs, tokenizer and one format of weights are
        downloaded: safetensors if there are any, else torch's, else flax's (docs/checkpoints.md).
      dtype: of the parameters. None: on a CPU what it multiplies fastest: float32, or for large
        matrices that are stored so int8 (quantised GGUF) or bfloat16, which is logged. Elsewhere
        that of the files, except that float16 becomes bfloat16 (T5's activations overflow float16),
        as do numbers that GGUF holds in fewer bits. On a CPU bfloat16 is for matrices alone: all
        else, hidden states and caches too, is float32, and products round their inputs to bfloat16
        and sum in float32.
      device: the device that holds the parameters and runs the model, or a platform: "cpu", "gpu"
        or "tpu". None: where jax puts new arrays (`jax.default_device`). Dtype and layout of the
        parameters follow it. Target and draft belong on the same device.
      weights: "int8": projections, embeddings and heads are rounded to 8 bits as they are read,
        with a scale for each output channel; all else has `dtype`. Outputs follow the rounded
        model's distribution. None: as `dtype` says, and also where that is None.
      cache: "int8": keys and values, the encoder's too, are kept in 8 bits, with a scale for each
        position and head. None: `dtype`.
      mesh: several devices, over which the parameters are split: a `jax.sharding.Mesh` with axes
        "data" and "model", or "data=2,model=4". Each device reads its part (docs/scale.md).
      replicate: whether every device of the mesh has the whole model, as suits a draft.

    Raises:
      FileNotFoundError: there is no such directory or hub name, or a file of it is missing.
      ValueError: the model type is not supported, a file is damaged or does not fit its config, or
        the device lacks memory for the parameters, or there is no such device or mesh.
    """
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights, "cache": cache}
    checkpoint, module, tensors = opened(name, mesh=mesh, replicate=replicate, **how)
    model = checkpoint.model
    check_memory([checkpoint], device)
    if checkpoint.precision and _held_in(model) != "float32":
        LOG.warning("%s is held in %s.", name, checkpoint.precision)
    found = devices.find(device) if model.placement is None else model.placement.first
    family = FAMILIES[checkpoint.config.model_type]
    names = family.tensor_names(checkpoint.config)
    placed = None if device is None else found
    full = parameters.read_params(module, names, tensors, family.turned, placed, model.placement)
    model = LanguageModel.of(
        full, model.vocab_size, platform=found.platform, placement=model.placement
    )
    return dataclasses.replace(checkpoint, model=model)


def check_memory(outlines: Sequence[Checkpoint], device: jax.Device | str | None = None) -> None:
    """Raise ValueError if models do not fit on a device together; it says what would fit.

    Args:
      device: of models that lie on no mesh; None: where jax puts new arrays.
    """
    first = outlines[0].model
    found, times = (devices.find(device), 1)
    if first.placement is not None:
        found, times = sharding.held_by(first)
    held = " and ".join(dict.fromkeys(_held_in(one.model) for one in outlines))
    check_fits(
        f"The parameters of {' and '.join(one.name for one in outlines)} in {held}",
        sum(nbytes(one.model) for one in outlines),
        functools.partial(_narrower, outlines, found.platform, times),
        device=found,
        times=times,
    )


def _held_in(model: LanguageModel) -> str:
    in_int8 = any(leaf.dtype in int8.DTYPES for leaf in jax.tree.leaves(model))
    return "int8" if in_int8 else dtype_of(model).name


def _narrower(outlines: Sequence[Checkpoint], platform: str, times: int, free: int) -> str:
    """Say how models that need more than `free` bytes would fit, if they would."""
    for words, options in NARROWER.items():
        size = sum(
            nbytes(shapes(one.config, **options, platform=platform, placement=one.model.placement))
            for one in outlines
        ) * (times if platform == "cpu" else 1)
        if size <= free:
            return f"Load {words} ({gigabytes(size)}), or free memory first."
    return "Choose a smaller model, or free memory first."


def outline(name: str | os.PathLike, **options: Any) -> Checkpoint:
    """Load a checkpoint with shapes for parameters: only configs and headers are read.

    It is enough to count and to compare, not to decode. The model's leaves are ShapeDtypeStructs,
    on a mesh with shardings. Options and errors are those of `load`, memory aside.
    """
    return opened(name, **options)[0]


def opened(
    name: str | os.PathLike,
    *,
    dtype: Any = None,
    device: jax.Device | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    mesh: Mesh | str | None = None,
    replicate: bool = False,
) -> tuple[Checkpoint, nnx.Module, dict[str, Tensor]]:
    """Open a checkpoint without weights; return it, its module and the tensors that fill it."""
    placement = _placement(mesh, replicate, device)
    for option, value in (("weights", weights), ("cache", cache)):
        if value not in (None, "int8"):
            raise ValueError(
                f"{option}={value!r} must be 'int8', or be left out for the dtype of all else."
            )
    platform = (devices.find(device) if placement is None else placement.first).platform
    directory = finding.locate(name)
    raw, generation, found = finding.read_configs(directory)
    family = family_of(raw, directory)
    unfollowed.warn(name, raw, generation)
    tensors = family.select_tensors(raw, find_tensors(directory) if found is None else found)
    raw = merge_ids(raw, generation)
    with naming(finding.config_place(directory)):
        config = family.config_from_hub(raw, tensors)
        family.check_layers(config, tensors)
    names = family.tensor_names(config)
    tensors = parameters.needed(names, tensors)
    tokenizer = tokenizers.load(directory)
    vocab_size = tokenizers.real_vocab_size(tokenizer, config.vocab_size, directory)
    may_round = weights is None and placement is None
    if dtype is None:
        dtype, rounded, precision = fastest(tensors, platform, family.turned, may_round=may_round)
        weights = weights or rounded
    else:
        dtype, precision = float_dtype(dtype), ""
    module = parameters.without_params(family, config, dtype, platform, weights, cache)
    parameters.check_tensors(module, names, tensors, family.turned)
    eos_ids = tokenizers.eos_ids(raw.get("eos_token_id", family.defaults["eos_token_id"]))
    if unsaid := [i for i in eos_ids if i >= vocab_size]:
        warnings.warn(
            f"{name}: eos_token_id={unsaid[0]} is no id of a vocabulary of {vocab_size}, so it "
            "never ends an output. Is config.json or generation_config.json another model's?",
            stacklevel=3,
        )
    chat_ends = {i for i in tokenizers.chat_ends(tokenizer) if i < vocab_size}
    with naming(directory):
        max_source_len = tokenizers.max_source_len(tokenizer, raw, config)
    if placement is None:
        model = LanguageModel.of(module, vocab_size, platform=platform)
    else:
        how: dict[str, Any] = {"dtype": dtype, "weights": weights, "cache": cache}
        how |= {"platform": platform, "placement": placement}
        model = dataclasses.replace(shapes(config, **how), vocab_size=vocab_size)
        module = model.module()
    checkpoint = Checkpoint(
        name=str(name),
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_ids=tuple(sorted({*eos_ids, *chat_ends})),
        max_source_len=max_source_len,
        prefix=raw.get("prefix") or "",
        precision=precision,
        metadata=finding.metadata(directory),
    )
    return checkpoint, module, tensors


def _placement(
    mesh: Mesh | str | None, replicate: bool, device: jax.Device | str | None
) -> Placement | None:
    if mesh is None:
        if replicate:
            raise ValueError("replicate=True says how a model lies on a mesh: give one.")
        return None
    if device is not None:
        raise ValueError(f"device={device!r} and mesh={mesh!r}: give one of them.")
    return Placement(meshes.mesh_of(mesh), replicate)


def shapes(
    config: Any,
    *,
    dtype: Any = jnp.float32,
    weights: str | None = None,
    cache: str | None = None,
    platform: str | None = None,
    placement: Placement | None = None,
) -> LanguageModel:
    """Outline the model that a family's config describes; nothing is read or allocated.

    Args:
      dtype: of the parameters.
      weights, cache: "int8" or None, as for `load`.
      platform: "cpu", "gpu" or "tpu", whose layout projections get; None: the mesh's, or jax's own.
      placement: on a mesh, which may be abstract; the leaves then carry their shardings.
    """
    family, narrow = FAMILIES[config.model_type], (weights, cache)
    if placement is None:
        platform = platform or devices.find().platform
        module = parameters.without_params(family, config, np.dtype(dtype), platform, *narrow)
        return LanguageModel.of(module, platform=platform)
    platform = platform or placement.first.platform
    fitted, placement = sharding.fit(config, placement)
    module = parameters.without_params(family, fitted, np.dtype(dtype), platform, *narrow)
    module = sharding.split(module, placement)
    options: dict[str, Any] = {"platform": platform, "placement": placement}
    return sharding.abstract(LanguageModel.of(module, config.vocab_size, **options))


def described(
    description: Mapping[str, Any] | str | os.PathLike,
    *,
    dtype: Any = jnp.float32,
    platform: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Outline a checkpoint from its config.json alone.

    config.json decides whether the head is the embedding; `outline` looks at the weights. There is
    no tokenizer.

    Args:
      description: the fields of a config.json, a directory that has one, a GGUF file, or a hub
        name, from which only config.json is fetched.
      dtype, platform, placement: see `shapes`.

    Raises: as `outline`.
    """
    if isinstance(description, Mapping):
        check_fields(description)
        raw, place = text_model(description), Path("config.json")
    else:
        place = finding.locate_config(description)
        raw = finding.read_configs(place if is_gguf(place) else place.parent)[0]
    family, raw = family_of(raw, place.parent), merge_ids(raw, {})
    head = {"lm_head.weight": None} if raw.get("tie_word_embeddings") is False else {}
    with naming(place):
        config = family.config_from_hub(raw, head)  # type: ignore[arg-type]  # it reads names alone
        return Checkpoint(
            name=str(place if isinstance(description, Mapping) else description),
            model=shapes(config, dtype=dtype, platform=platform, placement=placement),
            config=config,
            eos_ids=tokenizers.eos_ids(raw.get("eos_token_id", family.defaults["eos_token_id"])),
            max_source_len=tokenizers.max_source_len(None, raw, config),
        )
