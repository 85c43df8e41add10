"""Readers and writers of files: whatever is wrong with a file or a place, the error names it."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

from experiments import tasks
from experiments.adaptive.policies import acceptance_head as head
from specjax.checkpoints import convert
from specjax.cli import inputs
from specjax.drafters import ngram
from specjax.replay import rollouts
from specjax.settings import Settings
from specjax.support import files

MARK = b"\xef\xbb\xbf"  # of UTF-8, at the beginning of a file


def counts(path):
    ngram.save(path, ngram.count([[3, 4, 3, 1], [4, 1]], vocab_size=5, start_id=0))


def parameters(path):
    head.save(path, head.init(jax.random.key(0), width=3, layers=2))


def trace(path):
    """Two outputs of 2 and 1 tokens, with drafts of up to 4."""
    ranks = dict.fromkeys(rollouts.Rollouts._fields, (2, 3, 4))
    ranks |= dict.fromkeys(rollouts._BY_OUTPUT, (2,)) | {"hidden": (2, 3, 4, 0)}
    ranks |= dict.fromkeys(rollouts._BY_TOKEN, (2, 3))
    whole = ("input_index", "emitted", "budget", "tokens", "length", "drafts")
    arrays = {n: np.ones(s, np.int32 if n in whole else np.float32) for n, s in ranks.items()}
    rollouts.save(path, rollouts.Rollouts(**arrays | {"emitted": np.array([2, 1], np.int32)}))


READERS = {
    "ngram": (counts, ngram.load),
    "head": (parameters, head.load),
    "trace": (trace, rollouts.load),
}


@contextlib.contextmanager
def naming(name: str):
    """A ValueError within says the name; it is raised again."""
    try:
        yield
    except ValueError as error:
        if name not in str(error):
            raise AssertionError(f"{name} is not in {error}") from error
        raise


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize("kind", READERS)
def test_damaged_npz_files_are_named(kind, tmp_path):
    """Empty, cut anywhere, a byte changed anywhere, another file altogether."""
    write, load = READERS[kind]
    path = tmp_path / f"{kind}.npz"
    write(path)
    load(path)
    whole = path.read_bytes()
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    wrong = [b"", b"PK", b"text", array.getvalue(), npz(), npz(x=np.zeros(3))]
    wrong += [whole[:at] for at in range(0, len(whole), len(whole) // 40)]
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{kind}\.npz is not a file of .*\. (Write|Make) it"):
            load(path)
    rng = np.random.default_rng(0)
    for at in rng.integers(len(whole), size=60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        # Some bytes, such as dates, mean nothing.
        with contextlib.suppress(ValueError), naming(f"{kind}.npz"):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.npz")
    with pytest.raises(OSError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("kind", READERS)
def test_npz_files_with_other_arrays_are_named(kind, tmp_path):
    """One array left out, of texts, of another rank, or of another length."""
    write, load = READERS[kind]
    path = tmp_path / f"{kind}.npz"
    write(path)
    arrays = dict(np.load(path))
    for name, array in arrays.items():
        others = [np.full(array.shape, "x"), array[None], np.full(array.shape, None)]
        others += [np.concatenate([array, array])] if array.ndim else []
        for changes in [{}, *({name: other} for other in others)]:
            path.write_bytes(npz(**{n: a for n, a in arrays.items() if n != name} | changes))
            with pytest.raises(ValueError, match=rf"{kind}\.npz.* (Write|Make|write|make) it"):
                load(path)


def test_a_compressed_member_that_is_damaged(tmp_path):
    """The index of the zip is whole, and the data are not."""
    path = tmp_path / "ngram.npz"
    counts(path)
    with zipfile.ZipFile(path) as file:
        begin = file.getinfo("times.npy").header_offset + 60
    data = bytearray(path.read_bytes())
    data[begin : begin + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"ngram\.npz"):
        ngram.load(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Lines to decode, pairs of a task, a config."""
    lines, pairs, config = (tmp_path / name for name in ("in.txt", "pairs.jsonl", "config.json"))
    lines.write_bytes(MARK + "é\nsecond\n".encode())
    assert inputs.read_texts(str(lines), "") == ["é", "second"]
    pairs.write_bytes(MARK + json.dumps({"input": "a", "target": "b"}).encode())
    assert tasks.jsonl.load(pairs) == [tasks.Example("a", "b")]
    config.write_bytes(MARK + b'{"a": 1}')
    assert files.read_json(config) == {"a": 1}
    assert files.decode("a\ufeffb".encode(), "x") == "a\ufeffb"  # only where a file begins


def test_files_of_another_encoding_are_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"pairs\.jsonl is not UTF-8"):
        tasks.jsonl.load(path)
    with pytest.raises(ValueError, match=r"pairs\.jsonl is not UTF-8"):
        inputs.read_texts(str(path), "")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        files.read_json(tmp_path / "config.json")


def test_only_one_writer(tmp_path):
    place = tmp_path / "out.jsonl"
    with files.only_writer(place):
        with (
            pytest.raises(ValueError, match=rf"out\.jsonl is being written .*{os.getpid()}"),
            files.only_writer(place),
        ):
            pass
        with files.only_writer(tmp_path / "other.jsonl"):
            pass
    with files.only_writer(place):  # free again
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    place = tmp_path / "out.jsonl"
    with (
        pytest.raises(OSError, match=f"Cannot write {place}: .*Make room"),
        files.only_writer(place),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def no_lock(lock, place):
    """Make what no lock is; return a file that must keep its text, None where there is none."""
    if place == "file":
        lock.write_text("PRECIOUS")
        return lock
    if place == "link":
        lock.symlink_to("thesis.txt")
        return lock.with_name("thesis.txt")
    {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda at: os.symlink(at, at)}[place](lock)
    return None


@pytest.mark.parametrize("place", ["file", "link", "pipe", "folder", "loop"])
@pytest.mark.parametrize("within", [False, True])
def test_a_lock_touches_nothing_that_it_did_not_make(place, within, tmp_path):
    (tmp_path / "thesis.txt").write_text("PRECIOUS")
    lock = tmp_path / (".lock" if within else ".out.lock")
    kept = no_lock(lock, place)
    held = tmp_path if within else tmp_path / "out"
    with (
        pytest.raises(ValueError, match=rf"{lock}.*(Move it away, or n|N)ame another place"),
        files.only_writer(held, within=within),
    ):
        pass
    assert os.path.lexists(lock)
    assert kept is None or kept.read_text() == "PRECIOUS"


def test_a_lock_whose_name_is_too_long_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"too long\. Name another"), files.only_writer("x" * 250):
        pass


def test_a_dead_writer_holds_nothing(tmp_path):
    place = tmp_path / "out.jsonl"
    code = "import os; from specjax.support import files; held = files.only_writer({!r}); "
    subprocess.run(
        [sys.executable, "-c", code.format(str(place)) + "held.__enter__(); os._exit(9)"],
        check=False,
    )
    assert (tmp_path / ".out.jsonl.lock").exists()
    with files.only_writer(place):
        pass


def test_rows_have_one_writer(tmp_path):
    """Two handles that do not know of each other: the second is refused, and no row comes twice."""
    path = tmp_path / "rows.jsonl"
    first, second = files.Rows(path), files.Rows(path)
    first.append({"a": 1})
    with pytest.raises(ValueError, match=r"rows\.jsonl has been written by another process"):
        second.append({"a": 1})
    with pytest.raises(ValueError, match=r"rows\.jsonl has been written by another process"):
        second.keep(lambda row: False)
    first.append({"a": 2})
    first.keep(lambda row: row["a"] == 2)
    first.append({"a": 3})
    assert files.read_rows(path) == first.done == [{"a": 2}, {"a": 3}]


def test_a_reader_of_rows_leaves_the_file_alone(tmp_path):
    """A line that is being written is no row yet, and stays."""
    path = tmp_path / "rows.jsonl"
    assert files.read_rows(path) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert files.read_rows(path) == [{"a": 1}]
    assert path.read_text() == '{"a": 1}\n{"a": '
    assert files.Rows(path).done == [{"a": 1}]  # the writer drops it
    assert path.read_text() == '{"a": 1}\n'


def test_fields_of_earlier_versions(tmp_path):
    """Fields of 0.2 get their names of today once they are read, those of inner objects too."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"drafted": 3, "outputs": [{"levels": 2}], "tokens": 4}\n')
    wanted = [{"verified": 3, "outputs": [{"draft_calls": 2}], "tokens": 4}]
    assert files.read_rows(path) == files.Rows(path).done == wanted


def test_rows_that_cannot_be_written_are_named(tmp_path):
    rows = files.Rows(tmp_path / "gone" / "rows.jsonl")
    with pytest.raises(ValueError, match=r"Cannot write to .*rows\.jsonl: No such file"):
        rows.append({"a": 1})
    assert rows.done == []
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        for reader in (files.Rows, files.read_rows):
            with pytest.raises(ValueError, match=f"{place} is a device, a pipe or a directory"):
                reader(place)


@pytest.mark.parametrize(
    "line", ["[1]", "5", "null", "no JSON", "[" * 100_000], ids=lambda x: x[:7]
)
def test_lines_that_are_no_rows_are_named(line, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(f'{{"a": 1}}\n{line}\n')
    for read in (files.read_rows, files.Rows):
        with pytest.raises(ValueError, match=r"results\.jsonl, line 2: not (a )?JSON"):
            read(file)
    assert file.read_text() == f'{{"a": 1}}\n{line}\n'


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[1]"])
def test_json_files_are_named(data, tmp_path):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.json (is not valid JSON|is not UTF-8|should hold)"):
        files.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["/dev/zero", "sparse.json"])
def test_files_without_an_end_are_refused_at_once(name, tmp_path):
    file = tmp_path / name
    if name == "sparse.json":
        with file.open("wb") as stream:
            stream.truncate(5 << 30)
    for read in (files.read_json, Settings.load):
        with pytest.raises(
            ValueError, match=rf"{file} (has more than 67,108,864 bytes|is a device)"
        ):
            read(file)


def test_loops_of_links_are_named(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for check in (files.check_regular, files.check_directory):
        with pytest.raises(ValueError, match=f"{loop} is a loop of links. Name another"):
            check(loop)


# --- places to write to ------------------------------------------------------------------------


def test_only_regular_files_are_replaced(tmp_path):
    """A pipe stays a pipe, whether it is removed or replaced, by its name or by a link."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        for write in (files.remove, lambda path: files.write_text(path, "x")):
            with pytest.raises(ValueError, match=rf"{path.name} is a device, a pipe or a direct"):
                write(path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    files.write_text(tmp_path / "file", "x")
    files.remove(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "file is a file, not a directory"),
        ("file/below", "file is a file, not a directory"),
        ("", "'' does not name a directory"),
        ("/", "'/' does not name a directory"),
        ("caf\udce9", r"The name '.*caf\\udce9' is not UTF-8"),
    ],
)
def test_convert_looks_at_its_output_first(name, message, tmp_path, monkeypatch):
    """There is no source, and the output is what is named."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "none", name)
    with pytest.raises(FileNotFoundError, match="none"):
        convert(tmp_path / "none", "new")


def test_a_parent_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for directory in (tmp_path / "new", tmp_path / "new" / "below", tmp_path):
        with pytest.raises(ValueError, match=rf"Cannot write to {tmp_path}\."):
            files.check_directory(directory)


def test_parts_of_a_killed_process_are_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, sys; from specjax.support import files; w = files.replacing_within('out'); "
        "(w.__enter__() / 'weights').write_bytes(bytes(9)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert any(path.name.endswith(".part") for path in tmp_path.iterdir())
    (tmp_path / ".out.part").mkdir()  # anybody's
    with files.replacing_within("out") as part:
        assert list(part.iterdir()) == []
        (part / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="is being written"), files.replacing_within("out"):
            pass
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {
        ".out.part", "out", "out/config.json",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds config\.json"), files.replacing_within("."):
        pass
    with files.replacing_within(".", ["*.json"]) as part:
        (part / "weights").touch()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"weights"}


def test_a_full_disk_is_named(tmp_path):
    """Python's error has no name, and numpy's has no number either."""
    file = tmp_path / "out.json"
    file.write_text("before")
    for error in (OSError(errno.ENOSPC, "No space left on device"), OSError("9 requested")):
        said = r": (No space left|9 requested).*kept\. Make room"
        with pytest.raises(OSError, match=f"{file}{said}"), files.replacing(file):
            raise error
        new = tmp_path / "out"
        with pytest.raises(OSError, match=f"{new}{said}"), files.replacing_within(new):
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert file.read_text() == "before"


def test_nobody_reads():
    """`specjax decode … | head -1` ends without a word, with the status of SIGPIPE."""
    code = (
        "from specjax.support import command_line; "
        "command_line.run(lambda argv: [print('row', flush=True) for _ in range(10**6)], None)"
    )
    begun = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert begun.stdout.readline() == b"row\n"
    begun.stdout.close()
    assert begun.stderr.read() == b""
    begun.stderr.close()
    assert begun.wait() == 141
