"""Several processes: one output of all, whatever becomes of one of them."""

import functools
import random
import signal
import time
import types

import pytest

import command_line
import pairs
import several
from several import ended
from specjax import checkpoints
from specjax.cli import decode, defaults, outputs
from specjax.decoding import streaming
from specjax.support import files, processes
from specjax.support.processes import Group, SharedRows

INPUTS = 200


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


def start(index, *arguments):
    """`specjax decode` in a process of its own, one of two."""
    return several.start("specjax decode", *arguments, "--processes=2", f"--process={index}")


@pytest.mark.slow
def test_rows_are_neither_lost_nor_doubled_when_a_process_is_killed(
    arguments, tmp_path, monkeypatch, capsys
):
    """The other one makes its share, and the killed one goes on when it is started again: the
    output is that of one process, to the byte."""
    out = tmp_path / "out.jsonl"
    both = [start(i, *arguments, f"--output={out}") for i in range(2)]
    part = tmp_path / ".out.jsonl.part-1.jsonl"
    while not (part.exists() and part.stat().st_size) and both[1].poll() is None:
        time.sleep(0.002)
    both[1].send_signal(signal.SIGKILL)
    killed, *other = ended(both[1])
    status, stdout, stderr = ended(both[0])
    assert (killed, status) == (-signal.SIGKILL, 0), (other, stderr)
    kept = [files.Rows(tmp_path / f".out.jsonl.part-{i}.jsonl").done for i in range(2)]
    assert len(kept[0]) == INPUTS // 2
    assert 0 < len(kept[1]) < INPUTS // 2
    assert f"{INPUTS // 2} outputs: " in stdout
    assert f" rows of {out} are still to come, from other processes." in stdout
    assert not out.exists()
    with part.open("a") as file:
        file.write('{"row": 1')  # as a process leaves it that is killed while it writes

    again = start(1, *arguments, f"--output={out}")
    alone = tmp_path / "alone.jsonl"
    run = functools.partial(command_line.run, monkeypatch, capsys, "specjax decode")
    assert run(*arguments, f"--output={alone}").status == 0
    status, stdout, stderr = ended(again)
    assert status == 0, stderr
    assert f"outputs, {len(kept[1])} were there already" in stdout
    assert out.read_bytes() == alone.read_bytes()
    assert [row["input"] for row in files.Rows(out).done].count("") == 1
    assert [path.name for path in tmp_path.glob(".out*")] == [".out.jsonl.run.json"]


@pytest.mark.sweep
def test_a_process_with_other_settings_is_refused(arguments, tmp_path, monkeypatch, capsys):
    """From the first process on, that has written no row yet; so is a second one of a number."""
    out = tmp_path / "out.jsonl"
    run = functools.partial(command_line.run, monkeypatch, capsys, "specjax decode")
    share = [*arguments, f"--output={out}", "--processes=2", "--process=0"]
    with files.only_writer(processes.part(out, 0)):
        outcome = run(*share)
    assert outcome.status == 1
    assert "part-0.jsonl is being written by another process" in outcome.stderr

    def cut_off(*args, **options):
        raise ValueError("cut off before the first row")

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "as_they_end", cut_off)
        assert "cut off before" in run(*share).stderr
    outcome = run(*arguments, f"--output={out}", "--processes=2", "--process=1", "--config.gamma=5")
    assert outcome.status == 1
    assert "gamma was 4 and is 5" in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_a_mesh_over_two_processes(arguments, tmp_path, monkeypatch, capsys, mesh):
    """Each reads its part of the target and has its part of a batch or model; process 0 writes."""
    out = tmp_path / "out.jsonl"
    run = functools.partial(command_line.run, monkeypatch, capsys, "specjax decode")
    flags = [*arguments, "--config.batch_size=8", "--config.policy=constant(gamma=3)"]
    both = several.start_joined(
        "specjax decode", *flags, f"--config.mesh={mesh}", f"--output={out}"
    )
    alone = tmp_path / "alone.jsonl"
    assert run(*flags, f"--output={alone}").status == 0
    (status, _, stderr), (other, _, silent) = map(ended, both)
    assert (status, other) == (0, 0), stderr
    assert not silent  # process 0 says what there is to say
    assert out.read_bytes() == alone.read_bytes()


def test_runs_of_other_numbers_of_processes_go_on(tmp_path):
    """Three, then two, then four, each ended after some rows; the last one merges."""
    file, total, made = tmp_path / "out.jsonl", 50, []
    files.write_rows(file, [{"value": number} for number in range(7)])  # of one process
    made += range(7)
    for count, some in ((3, 4), (2, 6), (4, 100)):
        for index in random.Random(count).sample(range(count), count):
            rows = SharedRows(Group(index, count), file, total)
            mine = rows.missing[:some]
            random.Random(index).shuffle(mine)
            for number in mine:
                rows.append(number, {"value": number})
            made += mine
            assert rows.merge() == total - len(made)
    assert sorted(made) == list(range(total))
    assert files.Rows(file).done == [{"value": number} for number in range(total)]
    assert list(tmp_path.iterdir()) == [file]
    late = SharedRows(Group(1, 4), file, total)  # starts when all is done
    assert (late.missing, late.merge()) == ([], 0)
    assert list(tmp_path.iterdir()) == [file]


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
    assert outputs.began_with(config, ["text"])["models"]["draft"]["model.safetensors"]
    config.draft = "lookup"
    assert not outputs.began_with(config, ["text"])["models"]["draft"]


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("", 0, 1, 60), "--process=1 must be one of 0 … --processes − 1"),
        (("", 2, 2, 60), "--process=2 must be"),
        (("localhost:1", 0, 0, 60), "with --processes=0: give both together"),
        (("", 2, 1, 0), "--timeout=0 must be a number of seconds > 0"),
    ],
)
def test_flags_that_do_not_go_together(flags, said):
    with pytest.raises(ValueError, match=said):
        processes.group(*flags)


def test_a_mesh_that_needs_the_others():
    config = defaults.decode()
    config.mesh = "model=64"
    with pytest.raises(ValueError, match="mesh=model=64 takes devices of several processes: give"):
        decode.spans(Group(0, 2), config)
    assert decode.spans(Group(0, 2, joined=True), config)
    assert not decode.spans(Group(0, 1), config)


def test_what_is_for_one_process():
    config = defaults.decode()
    args = types.SimpleNamespace(follow=False, overwrite=False, input="-", output="out")
    with pytest.raises(ValueError, match="--input=- is for one process"):
        decode.check_shared(args, config)
    config.compare, args.input = True, "in"
    with pytest.raises(ValueError, match="compare=True is for one process"):
        decode.check_shared(args, config)
    config.compare, args.overwrite = False, True
    with pytest.raises(ValueError, match="--overwrite would remove what other processes write"):
        decode.check_shared(args, config)
