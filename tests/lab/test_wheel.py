"""The wheel: `specjax` alone, with its command and what it needs; what `specjax` exports.

`make release-check` runs these tests with the wheel and the clean environment of a release.
"""

import ast
import configparser
import email
import functools
import importlib.metadata
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import specjax
from command_line import ROOT
from specjax import rules
from specjax.cli import main
from test_snippets import PYTHON

BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"
NEEDS = 77  # of setuptools, as pyproject.toml says
# A folder with a wheel, and with venv/, where it is installed.
RELEASE = os.environ.get("SPECJAX_RELEASE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The release's wheel, or one built as `pip install .` does it, without a network.

    It is built from a copy: building leaves files.
    """
    if RELEASE:
        (path,) = pathlib.Path(RELEASE).absolute().glob("*.whl")
        return path
    found = importlib.metadata.distributions(name="setuptools")
    if max((int(one.version.split(".")[0]) for one in found), default=0) < NEEDS:
        pytest.skip(f"needs setuptools>={NEEDS}, which make test installs")
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("specjax", "experiments", "configs", "tests"):
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=hidden)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = source.glob("*.whl")
    return path


def read(wheel, name):
    """A file of the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (x for x in archive.namelist() if x.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_it_holds_specjax_alone(wheel):
    """All of it: a room without __init__.py would be missing."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "specjax").rglob("*.py*")}
    assert set(names) == {name for name in package if not name.endswith(".pyc")} | {
        "specjax/py.typed"
    }


def test_its_command(wheel):
    points = configparser.ConfigParser()
    points.read_string(read(wheel, "entry_points.txt"))
    assert {name: dict(points[name]) for name in points.sections()} == {
        "console_scripts": {"specjax": "specjax.cli.main:main"}
    }
    (point,) = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, value, "console_scripts")
        for name, value in points["console_scripts"].items()
    )
    assert point.load() is main.main


def test_it_asks_for_what_it_imports(wheel):
    """All that is imported with a module; what an extra brings is imported where it is used."""
    metadata = email.message_from_string(read(wheel, "METADATA"))
    needed = {
        re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        for line in metadata.get_all("Requires-Dist")
        if "extra ==" not in line
    }
    of_module = importlib.metadata.packages_distributions()
    for path in (ROOT / "specjax").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            elif not isinstance(node, ast.Import):
                continue
            for module in {name.split(".")[0] for name in names}:
                if module in sys.stdlib_module_names or module == "specjax":
                    continue
                found = {name.lower().replace("_", "-") for name in of_module.get(module, [])}
                assert found & needed, f"{path} imports {module}"


def test_the_names_at_the_top():
    """24 that a user types, each in the docstring; those that left it name their place."""
    names = [name for name in specjax.__all__ if not inspect.ismodule(getattr(specjax, name))]
    assert len(names) == 24
    assert all(re.search(rf"`{name}\W", specjax.__doc__) for name in names)
    for name, place in specjax.WERE_AT_THE_TOP.items():
        assert hasattr(importlib.import_module(f"specjax.{place}"), name)
        with pytest.raises(ImportError, match=rf"specjax\.{name} is specjax\.{place}\.{name} now"):
            getattr(specjax, name)
    with pytest.raises(ImportError, match=r"specjax\.decoding\.build is .*\.building\.build now"):
        specjax.decoding.build  # noqa: B018
    assert not hasattr(specjax, "nothing")
    assert {path.rpartition(":")[2] for path in rules.NAMES.values()} <= set(rules.__all__)


def test_one_version(wheel):
    """setup.cfg has it; whoever cites specjax, or reads what changed, finds the same one."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    version = setup["metadata"]["version"]
    assert email.message_from_string(read(wheel, "METADATA"))["Version"] == version
    assert specjax.__version__ == importlib.metadata.version("specjax")
    for name, pattern in {
        "CITATION.cff": r"^version: (\S+)$",
        "README.md": r"^  version = \{(.+)\},$",
        "CHANGELOG.md": r"^## \[?(\d[^] ]*)",
    }.items():
        found = re.search(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)
        assert found, name
        assert found[1] == version, name


@pytest.mark.slow
def test_the_readme_works_with_it(wheel, tmp_path):
    """Its example in a directory that has the families and nothing else of the checkout prints
    what its comments say."""
    (tmp_path / "families").symlink_to(ROOT / "families")
    if RELEASE:
        python, path = str(pathlib.Path(RELEASE, "venv/bin/python").absolute()), ""
    else:
        python, path = sys.executable, str(tmp_path / "site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(path)
    (example,) = (
        block.text
        for block in PYTHON
        if block.page.name == "README.md" and "families/parse" in block.text
    )
    run = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    done = run([python, "-c", f"{example}\nprint(specjax.__file__)"])
    assert done.returncode == 0, done.stderr
    *printed, file = done.stdout.splitlines()
    where = pathlib.Path(RELEASE, "venv").absolute() if RELEASE else pathlib.Path(path)
    assert pathlib.Path(file).is_relative_to(where)
    expected = re.findall(r"^print\(.*\)  # (.+)$", example, re.MULTILINE)
    assert len(printed) == len(expected) == 3
    for line, beginning in zip(printed, expected, strict=True):
        assert line.startswith(beginning)
    done = run([python, "-m", "specjax", "--help"])
    assert done.stdout.startswith("usage: specjax COMMAND"), done.stderr
