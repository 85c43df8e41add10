"""Finds the files of weights in a directory or a hub's repository, and their tensors."""

import dataclasses
import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from specjax.checkpoints import safetensors_files
from specjax.checkpoints.formats import gguf_files, msgpack_files, t5x_files, torch_files
from specjax.checkpoints.tensors import AGAIN, POINTER, Tensor
from specjax.support.files import read_json


@dataclasses.dataclass(frozen=True)
class Format:
    """A format in which Hugging Face's directories hold weights."""

    single: str
    """Name of the file that holds all weights."""
    index: str
    """Name of the index, which gives the file of each tensor."""
    shards: str
    """Pattern of the names of the index's files."""
    find: Callable[[Path], dict[str, Tensor]]
    """Finds the tensors of one file."""
    named: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    """Renames tensors as torch's models have them."""


def _format(stem: str, suffix: str, *functions: Callable[..., dict[str, Tensor]]) -> Format:
    single = f"{stem}.{suffix}"
    return Format(single, f"{single}.index.json", f"{stem}-*-of-*.{suffix}", *functions)


SAFETENSORS = _format("model", "safetensors", safetensors_files.find)
TORCH = _format("pytorch_model", "bin", torch_files.find)
FLAX = _format("flax_model", "msgpack", msgpack_files.find, msgpack_files.as_in_torch)
FORMATS = (SAFETENSORS, TORCH, FLAX)  # the best first: the only one that is read where it lies
# Files beside the weights.
CONFIGS = ("config.json", "generation_config.json")
# Files of pieces, as the classes of transformers name them (`vocab_files_names`).
PIECES = (
    "tokenizer.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.codes",
    "tekken.json",
)
TEMPLATES = "additional_chat_templates/"  # the only folder that a tokenizer may have
TOKENIZERS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *PIECES[1:],
    f"{TEMPLATES}*.jinja",
)

MODEL_FILES = (
    *CONFIGS,
    *(name for form in FORMATS for name in (form.single, form.index, form.shards)),
    *("tokenizer.json", *TOKENIZERS[:-1], TEMPLATES),
)
"""Names of a model's files and folders in Hugging Face's layout, as patterns."""


def holds(directory: Path, file: Path) -> bool:
    """Whether a file, which need not exist, would be one that loading reads from a directory."""
    if not directory.is_dir():
        return False
    inside, at = os.path.realpath(directory), os.path.realpath(file)
    if t5x_files.is_checkpoint(directory):
        return at.startswith(f"{inside}{os.sep}")
    place, name = os.path.split(at)
    patterns = (*MODEL_FILES, "*.[gG][gG][uU][fF]")
    return place == inside and any(fnmatch.fnmatchcase(name, one) for one in patterns)


def wanted(files: Iterable[str]) -> list[str]:
    """Choose a repository's files to download, with weights in the best format that it has."""
    offered = [file for file in files if "/" not in file.removeprefix(TEMPLATES)]
    patterns = (*CONFIGS, *TOKENIZERS)
    found = [file for pattern in patterns for file in fnmatch.filter(offered, pattern)]
    kept = list(dict.fromkeys(found))
    if "tokenizer.json" in kept and "spiece.model" in kept:
        kept.remove("spiece.model")  # the same, slower to read
    for form in FORMATS:
        if form.single in offered:
            return [*kept, form.single]
        if form.index in offered:
            return [*kept, form.index, *fnmatch.filter(offered, form.shards)]
    return kept


def mark(path: Path, blocks: int = 64, block: int = 1 << 14) -> str:
    """Size and hash of a file. Above a megabyte, 64 blocks count; the first holds the header."""
    size, found = path.stat().st_size, hashlib.sha256()
    reach = max(size - block, (blocks - 1) * block)  # a small file is read from end to end
    with path.open("rb") as file:
        for i in range(blocks):
            file.seek(i * reach // (blocks - 1))
            found.update(file.read(block))
    return f"{size} bytes, {found.hexdigest()[:16]}"


def find_tensors(directory: Path) -> dict[str, Tensor]:
    """Find a directory's tensors by name, in one file, the shards of an index or T5X's folders.

    Of several formats, the best is read.

    Raises:
      FileNotFoundError: there are no weights, or a shard is missing.
      ValueError: a file is cut short or damaged.
    """
    for form in FORMATS:
        if (directory / form.single).is_file():
            return form.named(_find(form, directory / form.single))
        if (directory / form.index).is_file():
            return form.named(_sharded(directory, form))
    if t5x_files.is_checkpoint(directory):
        return t5x_files.find(directory)
    names = " nor ".join(form.single for form in FORMATS)
    one = min(directory.glob(f"*{gguf_files.SUFFIX}"), default=None)
    raise FileNotFoundError(
        f"{directory} has no weights that are read here: neither {names}, nor an index of shards "
        "of one of them, nor T5X's `checkpoint`. "
        + (f"Give the file {one} itself." if one else "Copy or download them too.")
    )


def _find(form: Format, file: Path) -> dict[str, Tensor]:
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{file} is no file of weights but git-lfs's pointer to one: run `git lfs pull`."
            )
    if not (found := form.find(file)):
        raise ValueError(f"{file} holds no tensors. {AGAIN}")
    return found


def _sharded(directory: Path, form: Format) -> dict[str, Tensor]:
    """The tensors of all shards; the index decides about one that several hold."""
    index = directory / form.index
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{index} has no 'weight_map'. {AGAIN}")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or PurePosixPath(shard).name != shard:
            raise ValueError(
                f"{index}: 'weight_map' puts {name!r} into {shard!r}, which should be "
                f"the name of a file. {AGAIN}"
            )
    shards = {}
    for shard in sorted(set(shard_of.values())):
        if not (directory / shard).is_file():
            raise FileNotFoundError(
                f"{directory / shard} is missing, but {form.index} lists it. Copy or download it "
                "too."
            )
        shards[shard] = _find(form, directory / shard)
    found: dict[str, Tensor] = {}
    for shard, tensors in shards.items():
        for name, tensor in tensors.items():
            if name not in found or shard_of.get(name) == shard:
                found[name] = tensor
    return found
