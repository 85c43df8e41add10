"""Finds a checkpoint, here or on the hub, and reads its configs."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checkpoints.config_json import check_fields, naming, text_model
from specjax.checkpoints.formats import gguf_files, gguf_models, t5x_files
from specjax.checkpoints.formats.gguf_files import is_gguf
from specjax.checkpoints.safetensors_files import read_metadata
from specjax.checkpoints.tensors import Tensor
from specjax.checkpoints.weights import SAFETENSORS, mark, wanted
from specjax.support.files import read_json
from specjax.support.ranges import cause, shown

HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"


def locate(name: str | os.PathLike) -> Path:
    """Find a checkpoint's directory or GGUF file; a hub name is downloaded to the local cache."""
    if _is_here(name):
        path = Path(name)
        if path.is_dir() and not (path / "config.json").is_file():
            return gguf_files.only(path) or t5x_files.latest(path)
        if path.is_dir() or is_gguf(path):
            return path
        raise ValueError(
            f"{path} is a file; give the directory that holds config.json, or a GGUF file."
        )
    with _on_hub(
        f"{str(name)!r} is neither a directory here nor a model that could be fetched from",
        f"Check the spelling; without a network, run `hf download {name}` where there is one and "
        "give the directory.",
    ):
        return _download(str(name))


@contextlib.contextmanager
def _on_hub(failed: str, way_out: str) -> Iterator[None]:
    """Turn an error of the hub's client into a FileNotFoundError that says what to do."""
    try:
        yield
    except Exception as error:  # the client raises many kinds, offline, mistyped, private, ...
        raise FileNotFoundError(
            f"{failed} the Hugging Face hub ({cause(error)}). {way_out}"
        ) from error


def _is_here(name: str | os.PathLike) -> bool:
    """Whether there is such a path; False for what may be a hub name.

    Raises:
      FileNotFoundError: there is none, and it is no hub name either.
      ValueError: it is no text or path.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"{shown(name)} must be a directory or a hub name, as text or a path.")
    try:
        there = Path(name).exists()
    except OSError as error:  # too long a name, or no permission
        raise FileNotFoundError(f"{shown(str(name))} cannot be read: {error.strerror}.") from None
    is_file = str(name).lower().endswith(gguf_files.SUFFIX)  # no hub name is looked up for GGUF
    if not there and (is_file or not re.fullmatch(HUB_NAME, str(name))):
        raise FileNotFoundError(f"No such {'file' if is_file else 'directory'}: {name}.")
    return there


def _download(name: str) -> Path:
    """Download the files of a hub name that are needed and not yet here."""
    import huggingface_hub  # imported here: local use must not need it

    try:
        offered = huggingface_hub.list_repo_files(name)
    except Exception as error:  # without a network, the local cache serves
        with contextlib.suppress(Exception):
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        raise error
    stored = [file for file in offered if file.endswith(gguf_files.SUFFIX)]
    if stored and "config.json" not in offered:
        raise ValueError(
            f"it holds GGUF files: `hf download {name} {stored[0]}`, and give the path of that file"
        )
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted(offered)))


def locate_config(name: str | os.PathLike) -> Path:
    """Find config.json in a directory, or fetch that file alone from the hub; or a GGUF file."""
    if _is_here(name):
        return config_place(locate(name))
    import huggingface_hub  # imported here: local use must not need it

    with _on_hub(
        f"{str(name)!r} is no directory here, and its config.json could not be fetched from",
        "Give a directory that holds its config.json.",
    ):
        return Path(huggingface_hub.hf_hub_download(str(name), "config.json"))


def fingerprint(name: str | os.PathLike) -> dict[str, str]:
    """Size and hash of each file by name, to distinguish copies of a checkpoint.

    They are those that loading reads. No weights are loaded; large files are read in part.

    Raises:
      FileNotFoundError: there is no such directory or hub name.
    """
    directory = locate(name)
    if is_gguf(directory):
        files = {path.name: path for path in gguf_files.shards(directory)}
    else:
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*"))}
        if not t5x_files.is_checkpoint(directory):
            files = {file: files[file] for file in wanted(files)}
    return {file: mark(path) for file, path in files.items() if path.is_file()}


def config_place(directory: Path) -> Path:
    """The file that holds the config of a checkpoint: config.json, or GGUF's one file."""
    return directory if is_gguf(directory) else directory / "config.json"


def read_configs(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor] | None]:
    """Read config.json and generation_config.json, which is empty if absent.

    T5X without config.json and GGUF have the config beside the tensors, which are the third result.
    """
    if is_gguf(directory):
        raw, tensors = gguf_models.read(directory)
        return raw, {}, tensors
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
        with naming(path):
            check_fields(found[-1])
            for task, settings in (found[-1].get("task_specific_params") or {}).items():
                with naming(f"task_specific_params, {task!r}"):
                    check_fields(settings)
    with naming(config):
        raw = text_model(found[0])
    return raw, found[1] if len(found) > 1 else {}, None


def metadata(directory: Path) -> dict[str, str]:
    """The notes that are stored with a directory's weights."""
    if not (directory / SAFETENSORS.single).is_file():
        return {}
    stored = read_metadata(directory / SAFETENSORS.single)
    return {key: value for key, value in stored.items() if key != "format"}
