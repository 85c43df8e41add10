"""The site's API reference names all that is public, and its navigation has every page."""

import importlib
import inspect
import pkgutil
import re

import specjax
from command_line import ROOT

PAGES = "docs/**/*.md", "experiments/**/*.md"


def documented() -> set[str]:
    """The names that the API reference documents."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}


def rooms() -> set[str]:
    """The public modules: those that `specjax` exports, and those that list their names."""
    exported = {name for name in specjax.__all__ if inspect.ismodule(getattr(specjax, name))}
    listing = {
        module.name
        for module in pkgutil.iter_modules(specjax.__path__)
        if hasattr(importlib.import_module(f"specjax.{module.name}"), "__all__")
    }
    return exported | listing


def test_every_public_name_is_in_the_reference():
    """A room that lists no names is there as a whole, or module by module."""
    expected = {f"specjax.{name}" for name in specjax.__all__} - {f"specjax.{r}" for r in rooms()}
    for name in rooms():
        room = importlib.import_module(f"specjax.{name}")
        names = getattr(room, "__all__", None)
        if names is None and hasattr(room, "__path__"):
            names = [module.name for module in pkgutil.iter_modules(room.__path__)]
        expected |= {f"{room.__name__}.{name}" for name in names or ()} or {room.__name__}
    assert {"specjax.generate", "specjax.rules.Block", "specjax.models.t5"} <= expected
    assert expected - documented() == set()


def test_the_reference_names_what_exists():
    for name in documented():
        pkgutil.resolve_name(name)


def test_the_navigation_has_every_page():
    """And no other; pages of the root are there as far as readers of the site need them."""
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    notebooks = {f"notebooks/{path.name}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    expected = {path.relative_to(ROOT).as_posix() for path in pages} | notebooks
    assert {"docs/design.md", "experiments/race/README.md"} <= expected
    assert expected == {name for name in listed if "/" in name}
    assert all((ROOT / name).is_file() for name in listed - notebooks)
