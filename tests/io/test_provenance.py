"""Rows of results: what each carries, whoever writes it, and what a report says of them."""

import json
import lzma
import re
import shlex
import sys
import types

import pytest

from command_line import ROOT
from experiments.reproduce import pages
from experiments.reproduce.pages import Section
from specjax.measure import provenance

# Their rows are looked at by `check_command`.
CHECKED = {"adaptive", "budgets", "reproduce", "serve", "trace"}
# Or where the whole command is run.
ELSEWHERE = {"benchmark", "chat", "plan", "replay", "select"}
# Outputs for a user, the log of a training run, inputs: no measurements.
OTHERS = {"decode", "doctor", "inputs", "lines", "outputs", "tasks", "train", "tune"}


@pytest.mark.parametrize("lacking", provenance.NEEDED)
def test_a_row_that_does_not_say_it_is_refused(lacking, tmp_path):
    results = provenance.Results(tmp_path / "results.jsonl")
    whole = {"dtype": "float32", "batch": 3, "seed": 0}
    with pytest.raises(ValueError, match=f"A row of results lacks {lacking}: "):
        results.append(whole | {lacking: None})
    results.append(whole)
    (row,) = results.done
    assert set(row) >= {*whole, *provenance.environment(), "command", "load_per_core"}


def commands():
    """Names and files: those of experiments/, and of the command `specjax`."""
    for folder in (ROOT / "experiments", ROOT / "specjax" / "cli"):
        for path in folder.rglob("*.py"):
            is_outputs = path == ROOT / "experiments" / "chat" / "outputs.py"
            name = path.relative_to(folder).parts[0].removesuffix(".py")
            yield "outputs" if is_outputs else name, path


def test_no_experiment_writes_rows_elsewhere():
    """Those that name a .jsonl file are tested above or by tests of their own, and none of them
    opens one by itself."""
    naming = set()
    for name, path in commands():
        text = path.read_text()
        if ".jsonl" in text:
            naming.add(name)
        if name not in OTHERS | {"provenance"}:
            assert not re.search(r"\bRows\((?!.*\.done)|write_text\(.*\.jsonl", text), path
    assert naming - OTHERS - {"provenance"} == {*CHECKED, *ELSEWHERE}


# What a report says.


def row(commit, table="alpha", **changes):
    return {
        **provenance.environment(), "commit": commit, "table": table, "dtype": "float32",
        "batch": 1, "seed": 0, **changes,
    }  # fmt: skip


def test_a_busy_machine_is_said():
    """Rows carry the load, and a report of a busy machine says so; old rows lack it."""
    made = provenance.complete(row("aaaa"), {})
    assert made["load_per_core"] is None or made["load_per_core"] >= 0
    quiet, busy = row("aaaa") | {"load_per_core": 1.0}, row("aaaa") | {"load_per_core": 7.5}
    assert provenance.warning([row("aaaa"), quiet]) == ""
    assert "load average of up to 7.5" in provenance.warning([quiet, busy])
    assert provenance.loads([row("aaaa")]) == "–"
    assert provenance.loads([quiet]) == "1.00"
    assert provenance.loads([busy, row("aaaa"), quiet]) == "1.00 to 7.50"


def test_rows_of_one_run_need_no_warning():
    rows = [row("aaaa"), row("aaaa", batch=8)]
    assert provenance.warning(rows) == ""
    assert provenance.origin(rows) == (
        "2 rows: commit aaaa; dtype float32; batch 1 (1), 8 (1); seed 0."
    )
    assert "changed and not committed" in provenance.warning([row("aaaa+")])


def test_a_report_names_the_command_of_its_rows(monkeypatch):
    """As it would be typed, whether a module is run or a script is."""
    for name in provenance.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.chat.__main__"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/x/__main__.py", "--config.drafts=('lookup',)"])
    made = provenance.complete(row("aaaa"), {})
    assert made["command"].startswith("python -m experiments.chat '--config.drafts=(")
    assert shlex.split(made["command"])[3:] == sys.argv[1:]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/specjax", "select"])
    main.__spec__ = None
    other = provenance.complete(row("aaaa"), {})
    assert other["command"] == "specjax select"
    assert provenance.origin([other, other]).endswith("; seed 0. Made by `specjax select`.")
    assert " Made by " not in provenance.origin([row("aaaa")])
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2 --other")
    slower = provenance.complete(row("aaaa"), {})["command"]
    assert slower == "XLA_FLAGS='--xla_cpu_max_isa=AVX2 --other' specjax select"


def test_what_rows_do_not_say_is_not_invented():
    silent = row("aaaa")
    del silent["batch"], silent["seed"]
    assert provenance.origin([silent]).endswith("batch –; seed –.")
    assert provenance.origin([silent], "their config has 16").endswith(
        "batch –; seed –; where the rows do not say their batch, their config has 16."
    )
    assert "16" not in provenance.origin([row("aaaa")], "their config has 16")


@pytest.mark.parametrize("field", ["commit", "jax", "device", "dtype", "seed"])
def test_a_report_of_several_runs_warns_at_its_head(tmp_path, field):
    """And each table has its own rows' commits."""
    one, other = row("aaaa"), row("aaaa") | {field: "bbbb"}
    columns = [("batch", lambda line: str(line["batch"]))]
    sections = [Section("One", columns, [one]), Section("Other", measured=[other, other])]
    pages.write(tmp_path, "Title", sections, [one, other, other])
    text = (tmp_path / "report.md").read_text()
    head, first, second, where = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert head.startswith("# Title\n\n> **Warning: the 3 rows of this report are not of one run: ")
    assert f"{field} bbbb (2), {one[field]} (1)" in head
    assert first.strip().endswith(provenance.origin([one]))
    assert second.strip() == provenance.origin([other, other])
    assert f"- {field}: bbbb (2), {one[field]} (1)" in where
    assert "- load average for each processor: –" in where
    assert "–:" not in text


def test_a_dash_is_explained_below_its_table():
    columns = [("α", lambda line: line["alpha"]), ("paper", lambda line: "0.5–0.6")]
    known = Section("t", columns, [{"alpha": "0.91 (0.89 to 0.93)"}])
    assert known.dashes == ""
    for cell in ("–", "0.91 (–)"):
        assert known._replace(rows=[*known.rows, {"alpha": cell}]).dashes.startswith("–: not")


@pytest.mark.parametrize("name", ["parse", "prose"])
def test_the_committed_reports_say_it(name):
    directory = ROOT / "docs" / "results" / name
    with lzma.open(directory / "results.jsonl.xz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    text = (directory / "report.md").read_text()
    if mixed := provenance.warning(rows):
        assert text.splitlines()[2] == f"> {mixed}"
    else:
        assert "Warning" not in text
    for table in {row["table"] for row in rows}:
        own = [row for row in rows if row["table"] == table]
        rows_are = "1 row" if len(own) == 1 else f"{len(own)} rows"
        assert f"{rows_are}: commit {provenance.counted(own, 'commit')}; " in text


def test_tables_for_latex():
    """Signs that LaTeX reads otherwise, and Greek letters; a section without a table has none."""
    columns = [("γ_max", lambda row: row["name"]), ("v & c", lambda row: "–5%")]
    text = pages.latex([pages.Section("T", columns, [{"name": r"a\b^c"}]), pages.Section("none")])
    assert text.splitlines() == [
        "% T", r"\begin{tabular}{lr}", r"\toprule", r"$\gamma$\_max & v \& c \\", r"\midrule",
        r"a\textbackslash{}b\textasciicircum{}c & --5\% \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
