"""Checkpoints: `load` one from a directory or the hub, `save` one, `convert` one to safetensors.

Weights in safetensors, in torch's pickles (which are read, never run), in flax's msgpack and in
T5X's zarr folders come in by one door, `tensors`. They go a piece at a time to their place in the
fused parameters, in the dtype they will have, so loading needs hardly more memory than the model
itself.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from specjax import devices
from specjax.models import sharding
from specjax.models.hub import gpt, llama, spiece, t5, t5x_files, weights
from specjax.models.hub.config_json import check_fields
from specjax.models.hub.safetensors_files import read_metadata, write_file
from specjax.models.hub.tensors import (
    Held,
    Tensor,
    Turned,
    read_into,
    read_json,
    read_rounded,
    read_scales,
)
from specjax.models.hub.weights import SAFETENSORS, find_tensors, wanted
from specjax.models.language_model import LanguageModel
from specjax.models.layers import M, arrange, quantise_weights
from specjax.models.memory import check_fits, dtype_of, nbytes
from specjax.models.sharding import Placement, turned_paths
from specjax.support import files


class Family(NamedTuple):
    """What must be known of a `model_type`; see `t5_hub` for what each function does."""

    config_class: type[Any]
    build: Callable[..., nnx.Module]
    select_tensors: Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]
    config_from_hub: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]
    config_to_hub: Callable[[Any], dict[str, Any]]
    tensor_names: Callable[[Any], dict[tuple, dict[str, int]]]
    defaults: Mapping[str, Any]
    turned: tuple[str, ...]  # how the names of tensors end that the files hold as (in, out)


# A new family is a module, a file like t5.py and a line here.
FAMILIES = {
    "t5": Family(
        t5.T5Config,
        t5.build,
        t5.select_tensors,
        t5.config_from_hub,
        t5.config_to_hub,
        t5.tensor_names,
        t5.DEFAULTS,
        (),
    ),
    "gpt2": Family(
        gpt.GPTConfig,
        gpt.build,
        gpt.select_tensors,
        gpt.config_from_hub,
        gpt.config_to_hub,
        gpt.tensor_names,
        gpt.DEFAULTS,
        gpt.TURNED,
    ),
    **{
        kind: Family(
            config_class,
            llama.build,
            llama.select_tensors,
            llama.config_from_hub,
            llama.config_to_hub,
            llama.tensor_names,
            llama.DEFAULTS[kind],
            (),
        )
        for kind, config_class in llama.CONFIGS.items()
    },
}

DRAFTER = "specjax_drafter"  # the field of config.json that names a drafter's kind
DEFAULT_MAX_SOURCE_LEN = 512  # what T5 was trained on; where no file says otherwise


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with its tokenizer and all that decoding has to know about both."""

    name: str
    """The directory or hub name it came from, for messages and result rows."""
    model: LanguageModel
    config: Any
    """Of the family: a `T5Config`, a `GPTConfig` or one of `llama.py`."""
    tokenizer: Any = None
    """A transformers tokenizer; None where the checkpoint has none."""
    eos_ids: tuple[int, ...] = (1,)
    """Any of these ends a row."""
    max_source_len: int = DEFAULT_MAX_SOURCE_LEN
    """Longer inputs are truncated."""
    prefix: str = ""
    """With which every input should begin, as config.json says. It is not added to texts."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Notes stored with the weights, such as the hash of the training data."""

    @property
    def start_id(self) -> int:
        """The first token, which is never emitted by the loops as output."""
        return self.config.start_id

    @property
    def pad_id(self) -> int:
        """Fills what lies beyond a row's end."""
        return self.config.pad_token_id


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
      name: a directory in Hugging Face's layout or in T5X's, or a name on the hub, such as
        "google-t5/t5-small", of which configs, tokenizer and one format of weights are downloaded:
        safetensors if there are any, else torch's, else flax's. docs/checkpoints.md has them all.
      dtype: of the parameters. None: float32 on a CPU, which has no fast half precision; elsewhere
        that of the files, except that float16 becomes bfloat16 (T5's activations overflow float16).
      device: what holds the parameters and runs the model, or its platform: "cpu", "gpu" or "tpu".
        None: where jax puts new arrays, see `jax.default_device`. The dtype and the layout of the
        parameters follow it. Target and draft belong on the same one.
      weights: "int8": projections, embeddings and heads are rounded to 8 bits as they are read,
        each output channel by a scale of its own; `dtype` is that of all else. The model is
        another one then, and its outputs follow its own distribution. None: `dtype`.
      cache: "int8": keys and values are kept in 8 bits, those of the encoder too, with a scale for
        each position and head. None: `dtype`.
      mesh: several devices, over which the parameters are split: a `jax.sharding.Mesh` with axes
        "data" and "model", or "data=2,model=4". Each device reads its part (docs/scale.md).
      replicate: whether every device of the mesh has the whole model, as suits a draft.

    Raises:
      FileNotFoundError: there is no such directory or hub name, or a file of it is missing.
      ValueError: the model type is not supported, a file is damaged or does not fit its config, or
        the device has not the memory for the parameters, or there is no such device or mesh.
    """
    placement = _placement(mesh, replicate, device)
    checkpoint, module, tensors = _outline(name, dtype, device, weights, cache, placement)
    model = checkpoint.model
    dtype = dtype_of(model)
    narrower = ", load it in bfloat16" if dtype.itemsize > 2 else ""
    if not weights:
        narrower += f"{' or' if narrower else ', load it'} with weights='int8'"
    found, times = devices.find(device), 1
    if placement is not None:
        found, times = sharding.held_by(model)
    check_fits(
        f"The parameters of {name} in {weights or dtype.name}",
        nbytes(model),
        f"Choose a smaller model{narrower}, or free memory first.",
        device=found,
        times=times,
    )
    family = FAMILIES[checkpoint.config.model_type]
    names = family.tensor_names(checkpoint.config)
    if model.placement is None:
        placed = None if device is None else found
        full = _read_params(module, names, tensors, family.turned, placed)
    else:
        full = _read_shards(module, names, tensors, family.turned, model.placement)
    model = LanguageModel.of(
        full, model.vocab_size, platform=found.platform, placement=model.placement
    )
    return dataclasses.replace(checkpoint, model=model)


def _placement(
    mesh: Mesh | str | None, replicate: bool, device: jax.Device | str | None
) -> Placement | None:
    if mesh is None:
        if replicate:
            raise ValueError("replicate=True says how a model lies on a mesh: give one.")
        return None
    if device is not None:
        raise ValueError(f"device={device!r} and mesh={mesh!r}: give one of them.")
    return Placement(sharding.mesh_of(mesh), replicate)


def outline(
    name: str | os.PathLike,
    *,
    dtype: Any = None,
    device: jax.Device | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    mesh: Mesh | str | None = None,
    replicate: bool = False,
) -> Checkpoint:
    """What `load` would give, with shapes for parameters: only configs and headers are read.

    Enough to count and to compare, not to decode: its model's leaves are ShapeDtypeStructs, on a
    mesh with their shardings. Arguments and errors are those of `load`, but for memory.
    """
    placement = _placement(mesh, replicate, device)
    return _outline(name, dtype, device, weights, cache, placement)[0]


def shapes(
    config: Any,
    *,
    dtype: Any = jnp.float32,
    weights: str | None = None,
    cache: str | None = None,
    platform: str | None = None,
    placement: Placement | None = None,
) -> LanguageModel:
    """The outline of a model that a family's config describes. Nothing is read or allocated.

    Args:
      dtype: of the parameters.
      weights: "int8", or None, as for `load`.
      cache: the same.
      platform: "cpu", "gpu" or "tpu", for which projections are laid out; None: that of the mesh,
        or jax's own.
      placement: on a mesh, which may be abstract; the leaves then carry their shardings.
    """
    family, narrow = FAMILIES[config.model_type], (weights, cache)
    if placement is None:
        platform = platform or devices.find().platform
        module = _without_params(family, config, np.dtype(dtype), platform, *narrow)
        return LanguageModel.of(module, platform=platform)
    platform = platform or placement.first.platform
    fitted, placement = sharding.fit(config, placement)
    module = _without_params(family, fitted, np.dtype(dtype), platform, *narrow)
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
    """The outline of a checkpoint of which no more than its config.json is there.

    Whether its head is the embedding, config.json says, where `outline` asks the weights. It has no
    tokenizer.

    Args:
      description: the fields of a config.json, a directory that has one, or a name on the hub, from
        which that file alone is fetched.
      dtype, platform, placement: see `shapes`.

    Raises: as `outline`.
    """
    if isinstance(description, Mapping):
        raw, place = dict(description), Path("config.json")
        check_fields(raw)
    else:
        place = _locate_config(description)
        raw = _read_configs(place.parent)[0]
    family = _family(raw, place.parent)
    head = {"lm_head.weight": None} if raw.get("tie_word_embeddings") is False else {}
    with _naming(place):
        config = family.config_from_hub(raw, head)  # type: ignore[arg-type]  # looks at names alone
        return Checkpoint(
            name=str(place if isinstance(description, Mapping) else description),
            model=shapes(config, dtype=dtype, platform=platform, placement=placement),
            config=config,
            eos_ids=_eos_ids(raw.get("eos_token_id", family.defaults["eos_token_id"])),
            max_source_len=_max_source_len(None, raw, config),
        )


def _locate_config(name: str | os.PathLike) -> Path:
    if Path(name).exists():
        return _locate(name) / "config.json"
    import huggingface_hub  # imported here: local use must not need it

    try:
        return Path(huggingface_hub.hf_hub_download(str(name), "config.json"))
    except Exception as error:  # see `_locate`
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{str(name)!r} is no directory here, and its config.json could not be fetched from "
            f"the Hugging Face hub ({type(error).__name__}: {reason}). Give a directory that holds "
            "its config.json."
        ) from error


def fingerprint(name: str | os.PathLike) -> dict[str, str]:
    """Size and hash of each file of a checkpoint by name, to tell two copies apart. No weights are
    loaded; of large files parts are read.

    Raises:
      FileNotFoundError: there is no such directory or hub name.
    """
    return weights.fingerprint(_locate(name))


def _outline(
    name: str | os.PathLike,
    dtype: Any,
    device: jax.Device | str | None,
    weights: str | None = None,
    cache: str | None = None,
    placement: Placement | None = None,
) -> tuple[Checkpoint, nnx.Module, dict[str, Tensor]]:
    """A checkpoint without weights, its module, and the tensors to fill that with."""
    check_narrow(weights=weights, cache=cache)
    platform = (devices.find(device) if placement is None else placement.first).platform
    directory = _locate(name)
    raw, generation, found = _read_configs(directory)
    family = _family(raw, directory)
    _warn_of_unfollowed_settings(name, raw, generation)
    tensors = family.select_tensors(raw, find_tensors(directory) if found is None else found)
    # Hugging Face moved these from one file to the other; the newer place wins.
    ids = ("decoder_start_token_id", "bos_token_id", "pad_token_id", "eos_token_id")
    raw = {**raw, **{key: generation[key] for key in ids if generation.get(key) is not None}}
    with _naming(directory / "config.json"):
        config = family.config_from_hub(raw, tensors)
    tokenizer = _load_tokenizer(directory)
    vocab_size = _real_vocab_size(tokenizer, config.vocab_size, directory)
    dtype = _choose_dtype(dtype, tensors, platform)
    module = _without_params(family, config, dtype, platform, weights, cache)
    _check_tensors(tensors, _wanted(module, family.tensor_names(config)), family.turned)
    with _naming(directory):
        max_source_len = _max_source_len(tokenizer, raw, config)
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
        eos_ids=_eos_ids(raw.get("eos_token_id", family.defaults["eos_token_id"])),
        max_source_len=max_source_len,
        prefix=_prefix(raw, directory),
        metadata=_metadata(directory),
    )
    return checkpoint, module, tensors


def save(directory: str | os.PathLike, checkpoint: Checkpoint, *, dtype: Any = jnp.float32) -> None:
    """Write a directory that both `load` and transformers' `from_pretrained` read.

    Each file appears whole or not at all, and a new directory appears only when it is complete.

    Args:
      directory: made if need be; files of the same names in it are replaced.
      checkpoint: what to write. `checkpoint.metadata` goes into the safetensors header.
      dtype: float32, bfloat16 or float16, of the stored weights.

    Raises:
      ValueError: a model of one's own, of no family, one whose head is not its own, or one with
        weights in int8.
    """
    kept = isinstance(checkpoint.model, LanguageModel) and hasattr(checkpoint.config, "model_type")
    if not kept:
        raise ValueError(f"{checkpoint.name} is of no family that Hugging Face's layout holds.")
    family = FAMILIES[checkpoint.config.model_type]
    module = checkpoint.model.module()
    if any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(checkpoint.model)):
        raise ValueError(
            f"{checkpoint.name} has weights in int8, and files hold floats here. Save what "
            "specjax.load gives without weights='int8', or copy the directory that it came from: "
            "weights are rounded as they are read, in no more memory."
        )
    names = family.tensor_names(checkpoint.config)
    arrays = unfilled(module, names, family.turned, sharding.moved(checkpoint.model))
    tensors = {name: Held.of(array) for name, array in arrays.items()}
    _save(Path(directory), checkpoint, tensors, np.dtype(dtype))


def filled(
    module: M,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    *,
    device: jax.Device | None = None,
) -> M:
    """A module of shapes (`nnx.eval_shape`) with the parameters that lie in tensors.

    Args:
      names: for each parameter's path the tensors that it is made of, row after row, each with its
        share of the rows.
      device: where they stay; None: jax's own choice.

    Raises:
      ValueError: a tensor is missing, surplus, of another shape, or holds no floats.
    """
    _check_tensors(tensors, _wanted(module, names), ())
    return _read_params(module, names, tensors, (), device)


def unfilled(
    module: nnx.Module,
    names: Mapping[tuple, dict[str, int]],
    stored_turned: tuple[str, ...] = (),
    moved: Mapping[tuple, np.ndarray] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """What `filled` reads: a module's parameters under the names of their tensors.

    Args:
      names: as in `filled`.
      stored_turned: how the names of tensors end that the files hold as (in, out).
      moved: of a module on a mesh; see `sharding.moved`.
    """
    turned, found = turned_paths(module), {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        array = np.asarray(variable[...])
        stacked = sharding.restored(array.T if path in turned else array, moved.get(path))
        for name, part in _split(stacked, names[path]).items():
            found[name] = part.T if name.endswith(stored_turned) else part
    return found


def convert(
    name: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: Any = None,
    progress: Callable[[int, int], Any] = lambda written, whole: None,
) -> Checkpoint:
    """Write what `load` can read as `save` would, without holding it in memory.

    Afterwards the directory loads at the speed of safetensors, in transformers too.

    Args:
      name: a checkpoint, as in `load`.
      directory: made if need be; files of the same names in it are replaced.
      dtype: float32, bfloat16 or float16, of the stored weights. None: the widest of the source's,
        at most float32.
      progress: is told after each tensor how many bytes of how many are written.

    Returns:
      The checkpoint, with shapes for parameters.

    Raises:
      FileNotFoundError: there is no such checkpoint, or a file of it is missing.
      ValueError: as `load`.
    """
    checkpoint, _, tensors = _outline(name, None, "cpu")
    if dtype is None:
        dtype = max((t.dtype for t in tensors.values()), key=lambda d: d.itemsize)
    chosen = np.dtype(jnp.float32 if np.dtype(dtype).itemsize > 4 else dtype)
    whole = sum(math.prod(t.shape) for t in tensors.values()) * chosen.itemsize
    written = 0

    def report(count: int) -> None:
        nonlocal written
        written += count
        progress(written, whole)

    _save(Path(directory), checkpoint, tensors, chosen, report)
    return checkpoint


def _save(
    directory: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    progress: Callable[[int], Any] = lambda count: None,
) -> None:
    with files.replacing_within(directory) as part:
        _write(part, checkpoint, tensors, dtype, progress)


def start_field(config: Any) -> str:
    """Of config.json: where it names the first token."""
    return "decoder_start_token_id" if config.is_encoder_decoder else "bos_token_id"


# --- finding and reading files -----------------------------------------------------------------


def _locate(name: str | os.PathLike) -> Path:
    """The directory itself, or that of the hub's files in the local cache."""
    path = Path(name)
    if path.is_dir():
        return path if (path / "config.json").is_file() else t5x_files.latest(path)
    if path.exists():
        raise ValueError(f"{path} is a file; give the directory that holds config.json.")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(name)):
        raise FileNotFoundError(f"No such directory: {path}.")
    try:
        return _download(str(name))
    except Exception as error:  # the client raises many kinds, offline, mistyped, private, ...
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{str(name)!r} is neither a directory here nor a model that could be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {reason}). Check the spelling; without a "
            f"network, run `hf download {name}` where there is one and give the directory."
        ) from error


def _download(name: str) -> Path:
    """Files of the hub that are needed and not yet here; the list of them is asked for first."""
    import huggingface_hub  # imported here: local use must not need it

    try:
        offered = huggingface_hub.list_repo_files(name)
    except Exception as error:  # without a network what was downloaded before serves
        with contextlib.suppress(Exception):
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        raise error
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted(offered)))


def _read_configs(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor] | None]:
    """config.json and, empty where there is none, generation_config.json.

    Where T5X left no config.json, it is told by the tensors, which come third.
    """
    config, generation = directory / "config.json", directory / "generation_config.json"
    if not config.is_file() and t5x_files.is_checkpoint(directory):
        tensors = t5x_files.find(directory)
        return t5x_files.config(directory, tensors), {}, tensors
    if not config.is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json: not a Hugging Face checkpoint, or an incomplete one."
        )
    found = []
    for path in (config, generation) if generation.is_file() else (config,):
        found.append(read_json(path))
        with _naming(path):
            check_fields(found[-1])
            for task, settings in (found[-1].get("task_specific_params") or {}).items():
                with _naming(f"task_specific_params, {task!r}"):
                    check_fields(settings)
    return found[0], found[1] if len(found) > 1 else {}, None


@contextlib.contextmanager
def _naming(place: str | Path) -> Iterator[None]:
    """Says in a ValueError where what is wrong stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _family(raw: Mapping[str, Any], directory: Path) -> Family:
    if DRAFTER in raw:
        raise ValueError(
            f"{directory} holds no model but a drafter of the kind {raw[DRAFTER]!r}, which belongs "
            "to one target. Give its directory as the draft, specjax.generate(target, directory, "
            "…), or load it by specjax.drafters.load(directory, target)."
        )
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{directory / 'config.json'}: model_type={kind!r} is not supported; supported are "
            f"{', '.join(map(repr, FAMILIES))}."
        )
    return FAMILIES[kind]


def _metadata(directory: Path) -> dict[str, str]:
    if not (directory / SAFETENSORS.single).is_file():
        return {}
    stored = read_metadata(directory / SAFETENSORS.single)
    return {key: value for key, value in stored.items() if key != "format"}


# --- parameters --------------------------------------------------------------------------------


def _choose_dtype(dtype: Any, tensors: Mapping[str, Tensor], platform: str) -> np.dtype:
    if dtype is not None:
        return np.dtype(dtype)
    if not devices.has_half_precision(platform):
        return np.dtype(np.float32)
    widest = max((t.dtype for t in tensors.values()), key=lambda d: d.itemsize)
    return np.dtype(jnp.bfloat16 if widest.itemsize == 2 else jnp.float32)


def check_narrow(**options: str | None) -> None:
    """ValueError if what is to be kept in 8 bits is said in other words; None: it is not."""
    for name, value in options.items():
        if value not in (None, "int8"):
            raise ValueError(
                f"{name}={value!r} must be 'int8', or be left out for the dtype of all else."
            )


def _without_params(
    family: Family,
    config: Any,
    dtype: np.dtype,
    platform: str,
    weights: str | None = None,
    cache: str | None = None,
) -> Any:
    """A module with shapes for parameters; it is never built with weights of its own."""

    def build() -> nnx.Module:
        module = arrange(
            family.build(config, rngs=nnx.Rngs(0), dtype=dtype),
            input_first=devices.input_first(platform),
        )
        return quantise_weights(module) if weights else module

    module: Any = nnx.eval_shape(build)
    if cache:
        module.int8_cache = True
    return module


def _wanted(
    module: nnx.Module, names: Mapping[tuple, dict[str, int]]
) -> list[tuple[dict[str, int], tuple[int, ...]]]:
    """For each parameter its parts, and its shape as checkpoints have it."""
    slots, turned = dict(nnx.to_flat_state(nnx.state(module))), turned_paths(module)
    return [
        (names[path], slot.shape[::-1] if path in turned else slot.shape)
        for path, slot in slots.items()
        if _weight_of(path, slots) is None
    ]


def _scale_of(path: tuple) -> tuple:
    """Where the scales are of a matrix in int8."""
    return *path[:-1], f"{path[-1]}_scale"


def _weight_of(path: tuple, slots: Mapping[tuple, Any]) -> tuple | None:
    """Where the matrix in int8 is whose scales are at a path; None: it is no path of scales."""
    *place, last = path
    weight = *place, str(last).removesuffix("_scale")
    return weight if weight != path and weight in slots else None


def _read_params(
    module: M,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    stored_turned: tuple[str, ...],
    device: jax.Device | None,
) -> M:
    """The module with the files' parameters, one read after the other.

    Args:
      device: which they then stay on; None: jax's own choice, which may be moved.
    """
    graphdef, abstract = nnx.split(module)
    slots, turned, filled = dict(nnx.to_flat_state(abstract)), turned_paths(module), {}

    def place(path: tuple, out: np.ndarray) -> None:
        # Nothing else holds `out`, so on a CPU the array may be that memory and not a copy of it.
        placed = jax.device_put(out, device, may_alias=True)
        filled[path] = slots[path].replace(jax.block_until_ready(placed))

    for path, slot in slots.items():
        if _weight_of(path, slots) is not None:
            continue
        parts = _parts(names[path], tensors, stored_turned)
        out = _aligned(slot.shape, slot.dtype)
        views = _split(out.T if path in turned else out, names[path])
        if slot.dtype == np.int8:
            scale_path = _scale_of(path)
            scale = _aligned(slots[scale_path].shape, slots[scale_path].dtype)
            for name, of_part in _split(scale, names[path]).items():
                read_scales(parts[name], of_part)
                read_rounded(parts[name], views[name], of_part)
            place(scale_path, scale)
        else:
            for name, view in views.items():
                read_into(parts[name], view)
        place(path, out)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _read_shards(
    module: M,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    stored_turned: tuple[str, ...],
    placement: Placement,
) -> M:
    """The module with the files' parameters on a mesh: of each the parts that are held here."""
    graphdef, abstract = nnx.split(module)
    slots, turned, filled = dict(nnx.to_flat_state(abstract)), turned_paths(module), {}
    specs, order = sharding.specs(module, placement), sharding.order(module, placement)

    def place(path: tuple, part: Callable[..., np.ndarray]) -> None:
        slot = slots[path]

        @functools.cache  # what several devices have alike is read once
        def read(*bounds):
            return part(*itertools.starmap(slice, bounds))

        def at(index):
            axes = zip(index, slot.shape, strict=True)
            return read(*(axis.indices(size)[:2] for axis, size in axes))

        array = jax.make_array_from_callback(slot.shape, specs[path], at, dtype=slot.dtype)
        filled[path] = slot.replace(jax.block_until_ready(array))

    for path, slot in slots.items():
        if _weight_of(path, slots) is not None:
            continue
        parts = _parts(names[path], tensors, stored_turned)
        rows = order.get(path, np.arange(sum(tensor.shape[0] for tensor in parts.values())))
        shards = _Shards(list(parts.values()), rows, slot.dtype, path in turned)
        if slot.dtype == np.int8:
            place(_scale_of(path), shards.scales)
        place(path, shards.part)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@dataclasses.dataclass(frozen=True, eq=False)
class _Shards:
    """What devices hold of a parameter: rows of tensors that lie below one another."""

    tensors: list[Tensor]
    rows: np.ndarray  # of all of them, in the order in which the mesh has them; −1: padding
    dtype: np.dtype
    turned: bool
    known: dict[tuple[int, int], np.ndarray] = dataclasses.field(default_factory=dict)  # scales

    def part(self, *at: slice) -> np.ndarray:
        """The numbers at a place of the parameter; rows of padding are zeros."""
        out = _aligned(tuple(axis.stop - axis.start for axis in at), self.dtype)
        first, *others = at[::-1] if self.turned else at
        stacked = out.T if self.turned else out
        stacked[self.rows[first] < 0] = 0
        scale = self.scales(first) if self.dtype == np.int8 else None
        for tensor, there, here in self._runs(first):
            if scale is None:
                read_into(tensor, stacked[here], (there, *others))
            else:
                read_rounded(tensor, stacked[here], scale[here], (there, *others))
        return out

    def scales(self, some: slice) -> np.ndarray:
        """Those of some rows in int8, from whole rows, of which a device may hold a part; read
        once.
        """
        at = some.start, some.stop
        if at not in self.known:
            out = _aligned((some.stop - some.start,), np.dtype(np.float32))
            out[...] = 1
            for tensor, there, here in self._runs(some):
                read_scales(tensor, out[here], there)
            self.known[at] = out
        return self.known[at]

    def _runs(self, some: slice) -> Iterator[tuple[Tensor, slice, slice]]:
        """Of some rows, those that follow one another in a tensor: where there, where in them."""
        rows, begin = self.rows[some], 0
        for tensor in self.tensors:
            mine = np.flatnonzero((begin <= rows) & (rows < begin + tensor.shape[0]))
            for run in np.split(mine, np.flatnonzero(np.diff(rows[mine]) != 1) + 1):
                if len(run):
                    first = int(rows[run[0]]) - begin
                    yield tensor, slice(first, first + len(run)), slice(run[0], run[-1] + 1)
            begin += tensor.shape[0]


def _parts(
    names: Iterable[str], tensors: Mapping[str, Tensor], stored_turned: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of a parameter, each as (out, in)."""
    found = {name: tensors[name] for name in names}
    return {n: Turned.of(t) if n.endswith(stored_turned) else t for n, t in found.items()}


def _check_tensors(
    tensors: Mapping[str, Tensor],
    wanted: list[tuple[dict[str, int], tuple[int, ...]]],
    turned: tuple[str, ...],
) -> None:
    """Every tensor is there, in the shape that config.json asks for, and no other."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parts, shape in wanted:
        for name, share in parts.items():
            part = (shape[0] * share // sum(parts.values()), *shape[1:])
            shapes[name] = part[::-1] if name.endswith(turned) else part
    place = next(iter(tensors.values())).file.parent if tensors else "the checkpoint"
    if missing := [name for name in shapes if name not in tensors]:
        raise ValueError(
            f"{place}: {_some(missing)} missing from the weights, or config.json is "
            "of another model. Copy or download both again."
        )
    if surplus := [name for name in tensors if name not in shapes]:
        raise ValueError(
            f"{place}: {_some(surplus)} in the weights belong to no layer that "
            "config.json describes. Copy or download both again."
        )
    for name, shape in shapes.items():
        if tensors[name].dtype.kind in "biu":
            raise ValueError(
                f"{tensors[name].file}: {name!r} is stored as {tensors[name].dtype}; weights "
                "should be floats."
            )
        if tensors[name].shape != shape:
            raise ValueError(
                f"{tensors[name].file}: {name!r} has shape {tensors[name].shape}, but config.json "
                f"asks for {shape}. Copy or download both again."
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _split(stacked: np.ndarray, shares: dict[str, int]) -> dict[str, np.ndarray]:
    """Views of the rows of each part, which lie below one another in proportion to their shares."""
    ends = np.cumsum(list(shares.values())) * len(stacked) // sum(shares.values())
    return dict(zip(shares, np.split(stacked, ends[:-1]), strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a multiple of 64 bytes, as XLA on a CPU needs to use it in place."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(dtype).reshape(shape)


# --- tokenizer and ids -------------------------------------------------------------------------


def _load_tokenizer(directory: Path) -> Any:
    """The tokenizer, or None where the directory has none."""
    # What is imported here takes a second, and advises to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    names = ("tokenizer.json", "tokenizer_config.json")
    pieces = spiece.find(directory)
    if pieces is None and t5x_files.is_checkpoint(directory):
        pieces = spiece.find(directory.absolute().parent)  # beside all steps of a run
    if pieces is not None and not (directory / names[0]).is_file():
        return spiece.load(pieces)
    if not any((directory / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        fix = (
            "Copy or download it again."
            if (directory / "tokenizer.json").is_file()
            else "It has no tokenizer.json: `pip install sentencepiece protobuf` to convert the "
            "older format, or copy tokenizer.json from the model's page."
        )
        raise ValueError(
            f"The tokenizer in {directory} cannot be read ({type(error).__name__}: {reason}). {fix}"
        ) from error


def _real_vocab_size(tokenizer: Any, rows: int, directory: Path) -> int:
    """How many ids stand for something: those of the tokenizer, without the embedding's padding."""
    if tokenizer is None:
        return rows
    real = max(tokenizer.get_vocab().values()) + 1
    if real > rows:
        raise ValueError(
            f"{directory}: the tokenizer has {real} ids and the model only {rows} (vocab_size in "
            "config.json). They belong to different models: copy or download both again."
        )
    return real


def _eos_ids(value: Any) -> tuple[int, ...]:
    """From an id, a list of them or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(ids)))


def _max_source_len(tokenizer: Any, raw: Mapping[str, Any], config: Any) -> int:
    # A tokenizer that knows no limit says 10³⁰.
    limit = 10**30 if tokenizer is None else tokenizer.model_max_length
    if type(limit) not in (int, float) or not limit >= 1:
        raise ValueError(
            f"tokenizer_config.json: model_max_length={limit!r} should be a number ≥ 1."
        )
    if limit < 10**6:
        limit = int(limit)
        return min(limit, config.max_positions or limit)
    return config.max_positions or int(raw.get("n_positions") or DEFAULT_MAX_SOURCE_LEN)


def _prefix(raw: Mapping[str, Any], directory: Path) -> str:
    """transformers' field for what its pipelines put before every text."""
    prefix = raw.get("prefix") or ""
    if not isinstance(prefix, str):
        raise ValueError(f"{directory / 'config.json'}: prefix={prefix!r} should be a text.")
    return prefix


# --- settings that specjax does not follow -----------------------------------------------------

# Each with the values that change nothing.
UNFOLLOWED: dict[str, tuple] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "typical_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "stop_strings": ([],),
}


def _unfollowed(settings: Mapping[str, Any]) -> list[str]:
    names = [
        f"{key}={settings[key]!r}"
        for key, neutral in UNFOLLOWED.items()
        if settings.get(key) is not None and settings[key] not in neutral
    ]
    if (settings.get("num_beams") or 1) > 1:  # means nothing without beams
        names += [
            f"{key}={settings[key]!r}"
            for key in ("length_penalty", "early_stopping")
            if settings.get(key)
        ]
    return names


def _warn_of_unfollowed_settings(
    name: str | os.PathLike, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> None:
    """One warning that names all of them."""
    found = _unfollowed({**raw, **generation})
    for task, settings in (raw.get("task_specific_params") or {}).items():
        if inner := _unfollowed(settings):
            found.append(f"for the task {task!r} {', '.join(inner)}")
    if found:
        warnings.warn(
            f"{name}: its configuration asks transformers' `generate` for {'; '.join(found)}. "
            "specjax does not follow these: it decodes greedily or samples as its arguments say.",
            stacklevel=4,
        )


# --- writing -----------------------------------------------------------------------------------


def _write(
    directory: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    progress: Callable[[int], Any],
) -> None:
    config = checkpoint.config
    family = FAMILIES[config.model_type]
    ids = {
        start_field(config): checkpoint.start_id,
        "eos_token_id": _plain(checkpoint.eos_ids),
        "pad_token_id": checkpoint.pad_id,
    }
    limit = {} if config.max_positions else {"n_positions": checkpoint.max_source_len}
    kind = {"model_type": config.model_type, "dtype": dtype.name}
    if checkpoint.prefix:
        kind["prefix"] = checkpoint.prefix
    raw = limit | family.config_to_hub(config) | ids | kind
    _write_json(directory / "config.json", raw)
    _write_json(directory / "generation_config.json", ids)
    write_file(directory / SAFETENSORS.single, tensors, dtype, checkpoint.metadata, progress)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save_pretrained(str(directory))


def _plain(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
