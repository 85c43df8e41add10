"""Several processes: one output of all, whatever becomes of one of them."""

import dataclasses
import functools
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import command_line
import pairs
from command_line import ROOT
from pairs import TEXTS
from specjax import checkpoints, decoding
from specjax.autoregressive import Autoregressive
from specjax.cli import decode, defaults
from specjax.policies import Costs, constant, parse
from specjax.sampling import Sampling
from specjax.support import files, processes
from specjax.support.processes import ALONE, Group, SharedRows
from specjax.tuning import fitting, trials

INPUTS = 200
TIMEOUT = 6  # seconds; the processes import for a few before they join


@pytest.fixture(scope="module")
def arguments(pair, tmp_path_factory):
    """On many inputs, one of which is blank; one row a batch, so that they come one by one."""
    file = tmp_path_factory.mktemp("inputs") / "in.txt"
    texts = [pairs.TEXTS[i % 8] for i in range(INPUTS)]
    texts[5] = ""
    file.write_text("".join(f"{text}\n" for text in texts))
    return [
        f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}",
        "--config.max_new_tokens=16",
        "--config.temperature=1.0",
        "--config.batch_size=1",
        f"--input={file}",
    ]


def start(index, port, *arguments, timeout=TIMEOUT):
    """`specjax decode` in a process of its own, one of two."""
    flags = {"processes": 2, "process": index, "timeout": timeout}
    command = [sys.executable, "-m", "specjax", "decode", *map(str, arguments)]
    command += [f"--coordinator=localhost:{port}", *(f"--{k}={v}" for k, v in flags.items())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def ended(process):
    """Status, standard output and standard error."""
    stdout, stderr = process.communicate(timeout=300)
    lines = [line for line in stderr.splitlines(True) if not line.startswith(command_line.PROGRESS)]
    return process.returncode, stdout, "".join(lines)


@pytest.mark.slow
def test_rows_are_neither_lost_nor_doubled_when_a_process_is_killed(
    arguments, tmp_path, monkeypatch, capsys
):
    """And all are started again: the output is that of one process, to the byte."""
    out, port = tmp_path / "out.jsonl", free_port()
    both = [start(i, port, *arguments, f"--output={out}") for i in range(2)]
    part = tmp_path / ".out.jsonl.part-1.jsonl"
    while not (part.exists() and part.stat().st_size) and both[1].poll() is None:
        time.sleep(0.002)
    both[1].send_signal(signal.SIGKILL)
    killed, *other = ended(both[1])
    at = time.monotonic()
    status, stdout, stderr = ended(both[0])
    assert (killed, status, stdout) == (-signal.SIGKILL, 1, ""), (other, stderr)
    assert time.monotonic() - at < TIMEOUT + 20
    assert f"error: Process 1 of 2 has been silent for {TIMEOUT} s" in stderr
    assert "start all processes again" in stderr
    assert not out.exists()
    kept = [files.Rows(tmp_path / f".out.jsonl.part-{i}.jsonl").done for i in range(2)]
    assert 0 < len(kept[1]) < INPUTS // 2
    with part.open("a") as file:
        file.write('{"row": 1')  # as a process leaves it that is killed while it writes

    port = free_port()
    both = [start(i, port, *arguments, f"--output={out}") for i in range(2)]
    alone = tmp_path / "alone.jsonl"
    run = functools.partial(command_line.run, monkeypatch, capsys, "specjax decode")
    assert run(*arguments, f"--output={alone}").status == 0
    (status, stdout, stderr), other = map(ended, both)
    assert status == 0, stderr
    assert f"outputs, {sum(map(len, kept))} were there already" in stdout
    assert other == (0, "", "")  # process 0 says what there is to say
    assert out.read_bytes() == alone.read_bytes()
    assert [row["input"] for row in files.Rows(out).done].count("") == 1
    assert [path.name for path in tmp_path.glob(".out*")] == [".out.jsonl.run.json"]


def test_who_cannot_join_and_who_differs_ends_in_time(arguments, tmp_path):
    """With a message, before anything is loaded or written."""
    out, port = f"--output={tmp_path / 'out.jsonl'}", free_port()
    both = [start(i, port, *arguments, out, f"--config.gamma={4 + i}") for i in range(2)]
    late = free_port()
    status, stdout, stderr = ended(start(1, late, *arguments, out, timeout=1))
    assert (status, stdout) == (1, "")
    (line,) = stderr.splitlines()
    assert line.startswith(
        f"error: Process 1 of 2 could not join the others at --coordinator=localhost:{late} "
        "within 1 s. See that processes 0 … 1 are all started"
    )
    assert line.endswith("--timeout=SECONDS waits longer.")
    for status, stdout, stderr in map(ended, both):
        assert (status, stdout) == (1, "")
        assert "Process 1 has --config.gamma = 5, and process 0 has 4. All processes" in stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["constant(gamma=3)", "lookahead"])
@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_a_mesh_over_two_processes(arguments, tmp_path, monkeypatch, capsys, mesh, policy):
    """Each reads its part of the target and has its part of a batch or model; process 0 writes.
    Costs are measured by both."""
    out, port = tmp_path / "out.jsonl", free_port()
    greedy = [flag.replace("temperature=1.0", "temperature=0.0") for flag in arguments]
    run = functools.partial(command_line.run, monkeypatch, capsys, "specjax decode")
    flags = [*(greedy if policy == "lookahead" else arguments), "--config.batch_size=8"]
    flags.append(f"--config.policy={policy}")
    both = [start(i, port, *flags, f"--config.mesh={mesh}", f"--output={out}") for i in range(2)]
    alone = tmp_path / "alone.jsonl"
    assert run(*flags, f"--output={alone}").status == 0
    for status, _, stderr in map(ended, both):
        assert status == 0, stderr
    tokens = [[row["tokens"] for row in files.Rows(file).done] for file in (out, alone)]
    assert tokens[0] == tokens[1]
    if policy != "lookahead":  # whose costs are of the clock
        assert out.read_bytes() == alone.read_bytes()


# --- within one process --------------------------------------------------------------------------


class Store:
    """The part of jax's key-value store that groups use."""

    def __init__(self):
        self.found, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.found
            self.found[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.found, timeout=60)
            return self.found[key]


def together(count, run):
    """run(group) for each of so many processes, at the same time."""
    store = Store()
    groups = [Group(i, count, store) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, groups))


def test_runs_of_other_numbers_of_processes_go_on(tmp_path):
    """Three, then two, then four, each ended after some rows; the last one merges."""
    file, total, made = tmp_path / "out.jsonl", 50, []
    files.write_rows(file, [{"value": number} for number in range(7)])  # of one process

    def work(some, group):
        rows = SharedRows(group, file, total)
        mine = rows.missing[:some]
        random.Random(group.index).shuffle(mine)
        for number in mine:
            rows.append(number, {"value": number})
        return mine, rows

    made += range(7)
    for count, some in ((3, 4), (2, 6), (4, 100)):
        for mine, rows in together(count, functools.partial(work, some)):
            made += mine
            last = rows
        if some < 100:
            with pytest.raises(ValueError, match=rf"{total - len(made)} rows of .* are missing"):
                last.merge()
    assert sorted(made) == list(range(total))
    last.merge()
    assert files.Rows(file).done == [{"value": number} for number in range(total)]
    assert list(tmp_path.iterdir()) == [file]


def test_what_differs_is_named(pair, tmp_path):
    def alike(found, group):
        processes.check_alike(group, found[group.index])

    same = {"--config.gamma": 4, "--config.tree": "chain"}
    together(3, functools.partial(alike, [same] * 3))
    processes.check_alike(ALONE, same)
    for other, said in (
        ({"--config.gamma": 4, "--config.tree": "x"}, 'has --config.tree = "x", and .* "chain"'),
        ({"--config.gamma": 4}, 'has --config.tree = null, and process 0 has "chain"'),
        ({**same, "more": 1}, "has more = 1, and process 0 has null"),
    ):
        with pytest.raises(ValueError, match=f"Process 2 {said}"):
            together(3, functools.partial(alike, [same, same, other]))


def test_copies_of_a_checkpoint_are_told_apart(pair, tmp_path):
    """By any file that is read: sizes, headers, and single numbers of weights."""
    target = checkpoints.fingerprint(pair.target.name)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(target)
    again = pairs.write(tmp_path / "target", padding=20)
    assert checkpoints.fingerprint(again) == target
    weights = bytearray((again / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (again / "model.safetensors").write_bytes(weights)
    found = checkpoints.fingerprint(again)
    assert {name for name in target if found[name] != target[name]} == {"model.safetensors"}
    with pytest.raises(FileNotFoundError, match="No such directory"):
        checkpoints.fingerprint(tmp_path / "none")
    config = defaults.decode()
    config.target, config.draft = pair.target.name, pair.draft.name
    args = types.SimpleNamespace(follow=False, input="in", output="out", overwrite=False)
    named = decode.settings(args, config, ["text"])
    assert named[f"model.safetensors of --config.draft={pair.draft.name}"]
    config.draft = "lookup"
    assert not any("--config.draft=" in name for name in decode.settings(args, config, ["text"]))


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 34)  # a hole: it takes no place, and minutes to read
    at = time.monotonic()
    (first,) = checkpoints.fingerprint(tmp_path).values()
    assert time.monotonic() - at < 5
    assert first.startswith(f"{1 << 34} bytes, ")
    with file.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"1")
    (second,) = checkpoints.fingerprint(tmp_path).values()
    assert second != first


def test_costs_are_those_of_process_0(pair, monkeypatch):
    """Measured once: all processes decide alike."""
    measured = []

    def told(*args, **options):
        measured.append(args)
        return Costs(0.1, [1.0, 1.5, 2.0], token=float("nan"))

    monkeypatch.setattr(fitting, "costs_for", told)
    monkeypatch.setattr(fitting, "with_costs", lambda _, name, told: parse(name, costs=told))
    config = defaults.decode()
    config.policy = "goodput"
    made = together(3, lambda group: decode.with_costs(group, False, None, None, ["text"], config))
    assert len(measured) == 1
    for policy in made:
        np.testing.assert_array_equal(policy.costs.verify, np.float32([1.0, 1.5, 2.0]))
        assert np.isnan(policy.costs.token)


NO_DRAFT = "no draft is worth its time, so none is made"
TWO = "in its place every round drafts 2 tokens"


@pytest.mark.parametrize(
    ("wins", "one_loop", "said"),
    [(2, False, TWO), (0, False, ""), (2, True, TWO), (-1, False, NO_DRAFT), (-1, True, NO_DRAFT)],
)  # fmt: skip
def test_what_decodes_is_what_process_0_found(pair, monkeypatch, capsys, wins, one_loop, said):
    """By a trial of its own. Where all run one loop there is none: what the costs say is the same
    for all."""
    tried = []

    def fastest(method, target, texts, **options):
        tried.append((len(texts), options["batch_size"]))
        if wins < 0:
            return decoding.plain_of(method)
        return trials.of_length(method, wins) if wins else method

    monkeypatch.setattr(trials, "fastest", fastest)
    config = defaults.decode()
    config.policy, config.batch_size = "lookahead", 2
    built = decoding.build(pair.target, pair.draft, gamma=3, sampling=Sampling(0.0))
    table = Costs(0.1, [1.0] * 4, token=1.0)
    method = dataclasses.replace(built, policy=parse("lookahead", costs=table))
    made = together(
        3, lambda group: decode.chosen(group, one_loop, method, pair.target, TEXTS, config)
    )
    assert tried == ([(0, 2)] * 3 if one_loop else [(len(TEXTS), 2)])
    for found in made:
        if wins < 0:
            assert isinstance(found, Autoregressive)
        elif wins:
            assert (type(found.policy), found.gamma_max) == (type(constant(2)), 2)
        else:
            assert found is method
    assert capsys.readouterr().err == (f"lookahead: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("", 2, 0, 60), "--processes=2 --process=0 need --coordinator=HOST:PORT"),
        (("", 0, 1, 60), "need --coordinator"),
        (("localhost", 2, 0, 60), "--coordinator=localhost must be HOST:PORT, or auto"),
        (("localhost:1", 0, 0, 60), "--process=0 must be one of 0 … --processes − 1"),
        (("localhost:1", 2, 2, 60), "--process=2 must be"),
        (("localhost:1", 2, 1, 0), "--timeout=0 must be a number of seconds > 0"),
    ],
)
def test_flags_that_do_not_go_together(flags, said):
    with pytest.raises(ValueError, match=said), processes.joined(*flags):
        pass


class Interrupted:
    """The key-value store of a group, in which process 1 was interrupted."""

    def __init__(self):
        self.values = {"failed/1": "KeyboardInterrupt"}

    def key_value_set(self, name, value, allow_overwrite=False):
        self.values[name] = value

    def key_value_dir_get(self, place):
        return [(name, value) for name, value in self.values.items() if name.startswith(place)]


def test_ctrl_c_in_another_process_ends_this_one(monkeypatch, capsys):
    monkeypatch.setattr(processes, "INTERVAL", 0.01)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        processes._watch(Group(0, 2, Interrupted()), 60, threading.Event())
    assert left.value.code == 130
    assert capsys.readouterr().err == f"interrupted in process 1. {processes.AGAIN}\n"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (ValueError, 1)])
def test_the_status_of_a_process_among_others(monkeypatch, error, status):
    """Ctrl-C and errors are published, and the process leaves without waiting for the others."""
    store, registered = Interrupted(), []
    monkeypatch.setattr(processes, "_join", lambda *_: store)
    monkeypatch.setattr(processes, "_watch", lambda *_: None)
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(error), processes.joined("localhost:1", 2, 0):
        raise error
    assert store.values["failed/0"] == error.__name__
    monkeypatch.setattr(processes, "INTERVAL", 0)
    ((leave, *given),) = registered
    with pytest.raises(SystemExit) as left:
        leave(*given)
    assert left.value.code == status


def test_what_is_for_one_process():
    config = defaults.decode()
    args = types.SimpleNamespace(follow=False, input="-", output="out")
    with pytest.raises(ValueError, match="--input=- is for one process"):
        decode.check_shared(args, config)
    config.compare, args.input = True, "in"
    with pytest.raises(ValueError, match="compare=True is for one process"):
        decode.check_shared(args, config)
