"""The examples of parts of your own run, and each ends with its check."""

import runpy

import pytest

import specjax.testing
from command_line import ROOT


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["rule", "drafter", "policy"])
def test_own(name, monkeypatch, capsys):
    path = ROOT / "examples" / f"own_{name}.py"
    check, checked = getattr(specjax.testing, f"check_{name}"), []

    def spied(part):
        check(part)
        checked.append(part)

    monkeypatch.setattr(specjax.testing, f"check_{name}", spied)
    runpy.run_path(str(path), run_name="__main__")
    assert len(checked) == 1
    assert type(checked[0]).__name__ in capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
