"""Two checkouts side by side: which tokens differ, and ratios of the least times."""

import pytest

import command_line
from experiments.versions import __main__ as versions


def run_of(tokens, per_token, first):
    row = {"tokens": tokens, "per_token": per_token, "first": first}
    return {("plain", 0.0): row}


def test_compare():
    """Tokens of the first run of each; of every time the least."""
    ours = [run_of([[1, 2], [3]], 3.0, 8.0), run_of([[1, 2], [3]], 1.0, 9.0)]
    theirs = [run_of([[1, 2], [4]], 2.0, 4.0), run_of([[1, 2], [4]], 4.0, 16.0)]
    (row,) = versions.compare(ours, theirs)
    assert (row["outputs"], row["different"]) == (2, 1)
    assert (row["per_token"], row["per_token_ratio"]) == (1.0, 0.5)
    assert (row["first"], row["first_ratio"]) == (8.0, 2.0)
    with pytest.raises(ValueError, match=r"shorter|longer"):  # outputs are missing
        versions.compare(ours, [run_of([[1, 2]], 1.0, 1.0)])


def test_another_checkout_is_asked_for(monkeypatch, capsys, tmp_path):
    found = command_line.run(monkeypatch, capsys, "experiments.versions", f"--other={tmp_path}")
    assert found.status == 1
    assert "holds no specjax/: give the root of a checkout" in found.stderr
    for flag in ("--turns=0", "--turns=-1", "--inputs=0", "--new_tokens=0", "--repeats=0"):
        found = command_line.run(monkeypatch, capsys, "experiments.versions", "--other=.", flag)
        assert found.status == 1
        assert f"flag {flag}: " in found.stderr
