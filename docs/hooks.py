"""The site has the checkout's layout, so that a link leads to the same file there and on GitHub.

Its files are the Markdown pages, the notebooks, and every file that one of them links. Source and
notebooks become pages of their own, and links to them follow. The API reference is made here, with
a page for each public module, from its docstring and the names that it lists, and so is the page of
all pictures. The header has the version: a site with several of them needs a host.
"""

import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import specjax

ROOT = Path(__file__).resolve().parents[1]
PAGES = "*.md", "docs/site.css", "docs/**/*.md", "experiments/**/*.md", "notebooks/*.ipynb"
EXECUTED = ROOT / "build" / "notebooks"  # what `make docs` writes: notebooks with their outputs
PICTURES = "docs/results/pictures.md"
LINK = re.compile(r"\]\(([^)\s#]+)")
SHOWN = re.compile(r"(\]\((?!http)[^)\s#]+\.(?:py|ipynb))(?=[)\s#])")  # links to what `shown` makes
IN_FULL = ("drafters",)  # packages whose modules are documented too
FORMULA = re.compile(r"(\$\$?)([^$]+)\1")
BADGE = re.compile(r"\[!\[([^\]]+)\]\(http[^)]+\)\]")  # a link's picture, from another host
ANCHOR = re.compile(r"\]\(#([^)\s]+)\)")  # in a notebook: a heading with - for each space


def on_config(config):
    """The navigation, with the API reference before the results, and the page of pictures."""
    config.site_name = f"specjax {specjax.__version__}"
    place = next(i for i, section in enumerate(config.nav) if "Results" in section)
    config.nav[place]["Results"].insert(1, {"All pictures": PICTURES})
    config.nav.insert(place, {"API": [{Path(name).stem: name} for name in reference()]})
    return config


def on_files(files, config):
    """The theme's files, and those of the checkout."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [_file(path, config) for path in sorted(linked(ROOT))]
    texts = reference() | {PICTURES: all_pictures()}
    made = [File.generated(config, name, content=text) for name, text in texts.items()]
    pictures = [_file(path, config) for path in _pictures() - linked(ROOT)]
    return Files(theme + pages + pictures + made)


def on_page_markdown(markdown, page, config, files):
    """Links to source and notebooks lead to their pages."""
    return SHOWN.sub(r"\1.md", markdown)


@functools.cache
def reference():
    """The pages of the API reference by their paths: specjax, then each public module."""
    modules = {
        name: importlib.import_module(f"specjax.{name}") for name in sorted(public_modules())
    }
    names = {"specjax": set(specjax.__all__) - modules.keys()}
    for name, module in modules.items():
        names[module.__name__] = set(getattr(module, "__all__", ()))
        if hasattr(module, "__path__") and (not names[module.__name__] or name in IN_FULL):
            names[module.__name__] |= {one.name for one in pkgutil.iter_modules(module.__path__)}
    return {
        f"docs/api/{module.rpartition('.')[2]}.md": f"# {module}\n\n"
        + "\n\n".join(_described(module, sorted(listed)))
        for module, listed in names.items()
    }


def public_modules():
    """The modules that specjax exports, and its packages that list their names."""
    exported = {name for name in specjax.__all__ if inspect.ismodule(getattr(specjax, name))}
    found = {module.name for module in pkgutil.iter_modules(specjax.__path__)}
    return exported | {
        name for name in found if hasattr(importlib.import_module(f"specjax.{name}"), "__all__")
    }


def _described(module, names):
    """A module's docstring, with its members if it lists none, and then each name."""
    members = str(not names).lower()
    yield f"::: {module}\n    options: {{show_root_heading: false, members: {members}}}"
    for name in names:
        yield f"::: {module}.{name}"


def _pictures():
    return set((ROOT / "docs" / "results").rglob("*.png"))


def all_pictures():
    """The page with every picture of the results, by the folder that it lies in."""
    parts = ["# All pictures\n\n![The pair edits a function](../race.gif)"]
    for place, group in itertools.groupby(sorted(_pictures()), lambda path: path.parent):
        name = place.relative_to(ROOT / "docs" / "results").as_posix()
        report = f"[Report]({name}/report.md)\n\n" if (place / "report.md").is_file() else ""
        shown = (f"![{name}, {path.stem}]({name}/{path.name})" for path in group)
        parts.append(f"## {name}\n\n{report}" + "\n".join(shown))
    return "\n\n".join(parts)


def linked(root):
    """The pages under `root`, and the files there that they link, directly or by other pages."""
    found, new = set(), {path for pattern in PAGES for path in root.glob(pattern)}
    while new:
        found |= new
        links = (
            (path.parent / link).resolve()
            for path in new
            if path.suffix in (".md", ".ipynb")
            for link in LINK.findall(path.read_text(encoding="utf-8"))
        )
        new = {path for path in links if path.is_file() and path.is_relative_to(root)} - found
    return found


def shown(path):
    """Markdown of a Python file or a notebook, with outputs if it was executed."""
    if path.suffix == ".py":
        return f"# {path.name}\n\n````python\n{path.read_text(encoding='utf-8')}````\n"
    parts, executed = [], EXECUTED / path.name
    book = json.loads((executed if executed.is_file() else path).read_text(encoding="utf-8"))
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = BADGE.sub(r"[\1]", source)
            parts.append(FORMULA.sub(_formula, ANCHOR.sub(_anchor, source)))
        else:
            parts.append(f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            data = {} if output.get("name") == "stderr" else output.get("data", {})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="output" src="data:image/png;base64,{image}">')
            elif text := "".join(output.get("text", data.get("text/plain", ()))):
                parts.append(f"````text\n{text.rstrip()}\n````")
    return "\n\n".join(parts)


def _anchor(link):
    """A notebook's link to a heading, with the anchor that the site gives it."""
    return "](#" + re.sub(r"[^-\w]", "", link[1]).lower() + ")"


def _formula(found):
    """A formula of LaTeX as MathML, which browsers show without a script."""
    return convert(found[2], display="block" if found[1] == "$$" else "inline")


def _file(path, config):
    """A file of the site; its path is that within the checkout."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in (".py", ".ipynb"):
        return File.generated(config, f"{name}.md", content=shown(path))
    return File.generated(config, name, abs_src_path=str(path))
