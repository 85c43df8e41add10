"""The site's navigation has every page."""

import re

from command_line import ROOT

PAGES = "docs/**/*.md", "experiments/**/*.md"


def test_the_navigation_has_every_page():
    """And no other; pages of the root are there as far as readers of the site need them."""
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    notebooks = {f"notebooks/{path.name}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    expected = {path.relative_to(ROOT).as_posix() for path in pages} | notebooks
    assert {"docs/design.md", "experiments/race/README.md"} <= expected
    assert expected == {name for name in listed if "/" in name}
    assert all((ROOT / name).is_file() for name in listed - notebooks)
