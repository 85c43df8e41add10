"""The paper's tables on a mesh: the rows of one device, whoever holds the devices."""

import functools
import json
import signal
import time

import pytest

import command_line
import pairs
import several

MADE = {"results.jsonl", "report.md", "report.tex", "run.json"}
TIMED = {"speedups.png", "positions.png", "trace.png", "timeline.png"}
# Fields that differ between runs, and times; `tau_expected` and others follow from α.
OWN = {"command", "load_per_core", "run", "devices", "events"}


@pytest.fixture(scope="module")
def job(pair, tmp_path_factory):
    """configs/paper.py on the tiny pair and some inputs; returns the arguments in a workdir."""
    data = tmp_path_factory.mktemp("data")
    rows = [json.dumps({"input": text, "target": text}) for text in pairs.TEXTS]
    (data / "test.jsonl").write_text("\n".join(rows))
    fields = {
        "task": "jsonl", "data_dir": data, "target": pair.target.name,
        "drafts": f"({pair.draft.name!r},)", "ngrams": "()", "gammas": "(2,)", "metric": "exact",
        "max_new_tokens": 12, "alpha_inputs": 6, "lenience_inputs": 4, "quality_inputs": 4,
        "timed_inputs": 2, "repeats": 1,
    }  # fmt: skip

    def arguments(workdir, *tables, **more):
        given = fields | {"tables": tables} | more
        config = f"--config={command_line.ROOT}/configs/paper.py:t5-3b_en-de"
        named = [f"--config.{name}={value}" for name, value in given.items()]
        return [config, f"--workdir={workdir}", *named]

    return arguments


@pytest.fixture
def here(monkeypatch, capsys):
    """The command in this process."""
    return functools.partial(command_line.run, monkeypatch, capsys, "experiments.reproduce")


def results(workdir):
    return [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]


def check_same(alone, found):
    """Tokens, counts and α of two runs; times differ."""
    assert len(alone) == len(found)
    for one, other in zip(alone, found, strict=True):
        assert one.keys() == other.keys()
        if one["table"] == "speedup":
            names = "gamma", "tokens", "target_calls", "verified", "accepted", "identical", "draft"
            assert [one[name] for name in names] == [other[name] for name in names]
            assert one["alpha"] == pytest.approx(other["alpha"], abs=1e-5)
            continue
        for name in one.keys() - OWN:
            if isinstance(one[name], float):
                assert one[name] == pytest.approx(other[name], abs=1e-5), name
            else:
                assert one[name] == other[name], name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The task jsonl")
def test_two_processes_make_the_rows_of_one(job, here, tmp_path):
    """α at both temperatures, and a workdir that the first process alone has."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    both = several.start_joined("experiments.reproduce", *job(together, "alpha", mesh="model=2"))
    assert here(*job(alone, "alpha")).status == 0
    (status, stdout, stderr), (other, nothing, silent) = map(several.ended, both)
    assert (status, other) == (0, 0), stderr + silent
    assert f"Report: {together / 'report.md'}" in stdout
    assert "decoding 6 texts" not in silent
    assert "Report" not in nothing
    assert {path.name for path in together.iterdir()} == MADE
    check_same(results(alone), results(together))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:The task jsonl")
@pytest.mark.parametrize(
    ("processes", "devices", "mesh"),
    [(1, 4, "data=2,model=2"), (2, 1, "data=2"), (2, 2, "data=2,model=2")],
)
def test_all_tables_on_a_mesh(job, here, tmp_path, processes, devices, mesh):
    """Those of one device, also when the same command goes on after its first rows."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    every = ("alpha", "speedup", "lenience", "quality")
    run = several.start_joined if processes == 2 else lambda *a, **k: [several.start(*a, **k)]
    begin = functools.partial(run, "experiments.reproduce", devices=devices)
    arguments = job(split, *every, mesh=mesh, timeline=True)
    assert [end.status for end in map(several.ended, begin(*arguments))] == [0] * processes
    assert here(*job(alone, *every, timeline=True)).status == 0
    assert {path.name for path in split.iterdir()} - {"ngram.npz"} == MADE | TIMED
    made = results(split)
    check_same(results(alone), made)
    lines = (split / "results.jsonl").read_text().splitlines(keepends=True)
    (split / "results.jsonl").write_text("".join(lines[:-2]))  # of the timeline
    first, *others = map(several.ended, begin(*arguments))
    assert [first.status, *(end.status for end in others)] == [0] * processes, first.stderr
    assert "1 of 2: timeline, 3" in first.stderr
    check_same(made, results(split))


@pytest.mark.slow
def test_a_process_that_ends_does_not_leave_the_other_waiting(job, tmp_path):
    """Whether it is killed, or has another config, or its workdir belongs to another run."""
    begin = functools.partial(several.start_joined, "experiments.reproduce")
    workdir = tmp_path / "run"
    both = begin(*job(workdir, "alpha", "speedup", mesh="model=2"))
    while not (workdir / "results.jsonl").is_file() and both[1].poll() is None:
        time.sleep(0.02)
    both[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    assert [several.ended(one).status for one in both] == [1, -signal.SIGKILL]
    assert time.monotonic() - begun < 120
    kept = results(workdir)
    first, other = map(several.ended, begin(*job(workdir, "alpha", mesh="model=2", seed=1)))
    assert first.status
    assert other.status
    assert "holds rows of another config: seed was 0 and is 1" in first.stderr
    assert results(workdir) == kept


@pytest.mark.parametrize(
    ("flags", "fields", "words"),
    [
        (["--processes=2"], {"mesh": "model=2"}, "--processes=2 without --coordinator: they run"),
        ([], {"mesh": "model=64"}, "mesh='model=64' needs 64 devices, but platform 'cpu' has"),
        ([], {"mesh": "rows=2"}, "'rows' is no axis that is known"),
        (["--process=1"], {}, "--process=1 must be one of 0 … --processes − 1"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(job, here, tmp_path, flags, fields, words):
    given = {"target": "nowhere", "tables": ("alpha",)} | fields
    outcome = here(*job(tmp_path, **given), *flags)
    assert outcome.status == 1
    assert words in outcome.stderr
    assert "nowhere" not in outcome.stderr


def test_flags_of_several_processes_are_shown(here):
    outcome = here("--help")
    for name in ("coordinator", "processes", "process", "timeout"):
        assert f"--{name}: " in outcome.stdout
