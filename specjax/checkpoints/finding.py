"""Where a checkpoint lies, here or on the hub, and what its configs say."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checkpoints import t5x_files, weights
from specjax.checkpoints.config_json import check_fields
from specjax.checkpoints.safetensors_files import read_metadata
from specjax.checkpoints.tensors import Tensor, read_json
from specjax.checkpoints.weights import SAFETENSORS, wanted
from specjax.support.ranges import shown


def locate(name: str | os.PathLike) -> Path:
    """The directory itself, or that of the hub's files in the local cache."""
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"{shown(name)} must be a directory or a hub name, as text or a path.")
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


def locate_config(name: str | os.PathLike) -> Path:
    """config.json of a directory, or that of the hub, which alone is fetched."""
    if Path(name).exists():
        return locate(name) / "config.json"
    import huggingface_hub  # imported here: local use must not need it

    try:
        return Path(huggingface_hub.hf_hub_download(str(name), "config.json"))
    except Exception as error:  # see `locate`
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
    return weights.fingerprint(locate(name))


def read_configs(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor] | None]:
    """config.json and, empty where there is none, generation_config.json.

    Where T5X left no config.json, the tensors, which come third, show it.
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
        with naming(path):
            check_fields(found[-1])
            for task, settings in (found[-1].get("task_specific_params") or {}).items():
                with naming(f"task_specific_params, {task!r}"):
                    check_fields(settings)
    return found[0], found[1] if len(found) > 1 else {}, None


@contextlib.contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """Says in a ValueError where what is wrong stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def metadata(directory: Path) -> dict[str, str]:
    """Notes that are stored with the weights in a directory."""
    if not (directory / SAFETENSORS.single).is_file():
        return {}
    stored = read_metadata(directory / SAFETENSORS.single)
    return {key: value for key, value in stored.items() if key != "format"}
