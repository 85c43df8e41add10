"""Pages that fit one sitting, and figures that are not bound to a commit in prose."""

import re

import pytest

from command_line import ROOT

GUIDES = sorted((ROOT / "docs").glob("*.md"))
READMES = [ROOT / "README.md", *sorted((ROOT / "experiments").glob("*/README.md"))]


@pytest.mark.parametrize("page", [*GUIDES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_fits_one_sitting(page):
    assert len(page.read_text("utf-8").splitlines()) <= 150


def test_all_guides_together():
    assert len(GUIDES) > 10
    assert sum(len(page.read_text("utf-8").splitlines()) for page in GUIDES) <= 2000


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_no_commit_is_named(page):
    """Rows of results carry their commits."""
    text = page.read_text("utf-8")
    assert not re.findall(r"\bcommits? [`]?[0-9a-f]{7,40}\b", text)
