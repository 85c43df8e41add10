"""Writes checkpoints: `save` those in memory, `convert` files without holding the weights."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import loading, parameters
from specjax.checkpoints.families import FAMILIES
from specjax.checkpoints.safetensors_files import write_file
from specjax.checkpoints.tensors import Held, Tensor, float_dtype
from specjax.checkpoints.weights import MODEL_FILES, SAFETENSORS
from specjax.models import int8, sharding
from specjax.models.checkpoint import Checkpoint, start_field
from specjax.models.language_model import LanguageModel
from specjax.support import files


def save(directory: str | os.PathLike, checkpoint: Checkpoint, *, dtype: Any = jnp.float32) -> None:
    """Write a directory that both `load` and transformers' `from_pretrained` read.

    The directory appears when it is complete.

    Args:
      directory: made if need be; a model in it is replaced, with all its files.
      checkpoint: what to write. `checkpoint.metadata` goes into the safetensors header.
      dtype: of the stored weights: float32, bfloat16 or float16.

    Raises:
      ValueError: the checkpoint is of no family, has a head that is not its own or weights in int8;
        or the directory cannot be written, or holds other files than a model's.
    """
    _check(directory)
    kept = isinstance(checkpoint.model, LanguageModel) and hasattr(checkpoint.config, "model_type")
    if not kept:
        raise ValueError(f"{checkpoint.name} is of no family that Hugging Face's layout holds.")
    family = FAMILIES[checkpoint.config.model_type]
    module = checkpoint.model.module()
    if any(leaf.dtype in int8.DTYPES for leaf in jax.tree.leaves(checkpoint.model)):
        raise ValueError(
            f"{checkpoint.name} has weights in int8, and files hold floats here. Save what "
            "specjax.load gives with dtype='float32', or copy the directory that it came from: "
            "weights are rounded as they are read, in no more memory."
        )
    names = family.tensor_names(checkpoint.config)
    arrays = parameters.unfilled(module, names, family.turned, sharding.moved(checkpoint.model))
    tensors = {name: Held.of(array) for name, array in arrays.items()}
    _save(directory, checkpoint, tensors, float_dtype(dtype))


def convert(
    name: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: Any = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] = lambda written, whole: None,
) -> Checkpoint:
    """Write a checkpoint as `save` does, without holding its weights in memory.

    The directory then loads at the speed of safetensors, in transformers too.

    Args:
      name: a checkpoint, as in `load`.
      directory: made if need be.
      dtype: of the stored weights: float32, bfloat16 or float16. None: the widest of the source's,
        at most float32.
      overwrite: whether a model in the directory is replaced, with all its files.
      progress: called after each tensor with the bytes written, and all bytes.

    Returns:
      The checkpoint, with shapes for parameters.

    Raises:
      FileNotFoundError: there is no such checkpoint, or a file of it is missing.
      ValueError: as `load`; or the directory cannot be written, or holds files that are not to be
        replaced, which is checked first.
    """
    if dtype is not None:
        dtype = float_dtype(dtype)
    _check(directory)
    if not overwrite and (
        held := sorted(os.listdir(directory)) if Path(directory).exists() else ()
    ):
        raise ValueError(
            f"{directory} holds {held[0]} already. Name another directory, or replace the model in "
            "it by --overwrite, in Python overwrite=True."
        )
    checkpoint, _, tensors = loading.opened(name, device="cpu")
    if dtype is None:
        dtype = max((t.dtype for t in tensors.values()), key=lambda d: d.itemsize)
    chosen = np.dtype(jnp.float32 if np.dtype(dtype).itemsize > 4 else dtype)
    whole = sum(math.prod(t.shape) for t in tensors.values()) * chosen.itemsize
    written = 0

    def report(count: int) -> None:
        nonlocal written
        written += count
        progress(written, whole)

    _save(directory, checkpoint, tensors, chosen, report)
    return checkpoint


def _check(directory: str | os.PathLike) -> None:
    files.check_directory(directory)
    files.check_replaced(directory, MODEL_FILES)


def _save(
    directory: str | os.PathLike,
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    progress: Callable[[int], Any] = lambda count: None,
) -> None:
    with files.replacing_within(directory, MODEL_FILES) as part:
        _write(part, checkpoint, tensors, dtype, progress)


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
