"""Files that take more memory or time than they weigh are refused before that, by name; and places
that are not what a user thinks are not written to.

Each bomb has a few megabytes, so that nothing happens where one goes off.
"""

import errno
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

import checkpoint_formats as formats
import t5_variants
from specjax.checkpoints import convert, weights
from specjax.checkpoints.formats import msgpack_files, pickles, t5x_files, torch_files
from specjax.drafters import ngram
from specjax.support import files, npz

PAIRS = b"(" + b"".join(b"(" + formats.text(f"{i}") + b"Nl" for i in range(100)) + b"l"
FILLS = b"ccollections\nOrderedDict\nq\0" + PAIRS + b"\x85q\1" + b"h\0h\1R0" * 200
BOMBS = {
    "dicts": (b"}" * 3_000_000, "takes more than 1,048,576 steps"),
    "dicts made again and again from one list": (FILLS, "takes more than 5,000 steps"),
    "a long number": (b"\x8b\x40\x42\x0f\0" + b"\1" * 1_000_000, "a number of 7,999,993 bits"),
    "a long key": (b"}\x8a\x09" + b"\1" * 9 + b"Ns", "key of a dict is a int"),
    "a long number to keep by": (b"Np99999999999999999999\n", "under an impossible number"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_pickles(case, tmp_path, monkeypatch):
    program, message = BOMBS[case]
    if program is FILLS:
        monkeypatch.setattr(pickles, "MAX_STEPS", 5_000)
    formats.zipped(tmp_path / "x.bin", b"\x80\x02" + program + b".", {})
    with pytest.raises(ValueError, match=rf"x\.bin cannot be read: .*{message}"):
        torch_files.find(tmp_path / "x.bin")


def test_a_storage_that_no_file_can_hold(tmp_path):
    """A size that is no offset in a file either."""
    entry = formats.tensor("0", np.ones(1, np.float32), legacy=True)
    entry = entry.replace(formats.number(1) + b"NtQ", formats.number(1 << 61) + b"NtQ")
    start = formats.MAGIC + pickle.dumps(1001, 2) + formats.SYSTEM
    size = (1 << 61).to_bytes(8, "little")
    data = start + formats.pickled({"x": entry}) + pickle.dumps(["0"], 2) + size + bytes(8)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.bin is cut short or damaged"):
        torch_files.find(tmp_path / "x.bin")


def test_archives(tmp_path, monkeypatch):
    """A list of many files, a name that is no UTF-8, and no tensors at all."""
    file = tmp_path / "pytorch_model.bin"
    formats.zipped(file, formats.pickled({}), {"café": b"x"})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds no tensors"):
        weights.find_tensors(tmp_path)
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is cut short or damaged \('utf-8'"):
        torch_files.find(file)
    monkeypatch.setattr(npz, "MAX_LIST", 2_000)
    formats.zipped(file, formats.pickled({}), {f"{i}": b"" for i in range(50)})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is .* \(a list of files of"):
        torch_files.find(file)


def array(shape: bytes) -> bytes:
    """A float in msgpack, of this shape."""
    inner = b"\x93" + shape + b"\xa7float32\xc4\4" + bytes(4)
    return b"\xc7" + bytes([len(inner), 1]) + inner


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x81\xa1x\xdd\0\x2d\xc6\xc0" + b"\x80" * 3_000_000, "more than 1,048,576 values"),
        ((b"\x81\xd9\xff" + b"x" * 255) * 5 + array(b"\x90"), "has too long a name"),
        (b"\x81\xa1x" + array(b"\x99" + b"\1" * 9), "impossible shape"),
        (b"\x81\xa1x" + array(b"\x90"), None),
    ],
    ids=["maps", "names of names", "a product of many sizes", "none"],
)
def test_msgpack(content, message, tmp_path):
    file = tmp_path / "x.msgpack"
    file.write_bytes(content)
    if message is None:
        assert list(msgpack_files.find(file)) == ["x"]
        return
    with pytest.raises(ValueError, match=rf"x\.msgpack.*{message}"):
        msgpack_files.find(file)


@pytest.fixture
def t5x(tmp_path):
    """A checkpoint of T5X, and the folder of one of its arrays."""
    variant = t5_variants.VARIANTS["v1_1"]
    made = formats.write_t5x(tmp_path / "checkpoint_7", t5_variants.tensors(variant))
    return made, made / "target.encoder.layers_0.attention.query.kernel"


def rewrite_metadata(folder, **changes):
    file = folder / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_zarr_chunks(t5x):
    """One that is far larger than its array, and more than there can be files."""
    directory, folder = t5x
    rewrite_metadata(folder, chunks=[2_000, 2_000])
    (folder / "0.0").write_bytes(gzip.compress(bytes(16_000_000)))
    with pytest.raises(ValueError, match=rf"{folder.name}: a chunk has 16,000,000 bytes"):
        t5x_files.find(directory)
    rewrite_metadata(folder, shape=[1 << 10, 1 << 10], chunks=[1, 1], fill_value=0.0)
    with pytest.raises(ValueError, match=rf"{folder.name} is cut into 1,048,576 chunks"):
        t5x_files.find(directory)


def test_chunks_of_blosc(t5x):
    """They say themselves how much they hold, and as much would be allocated."""
    directory, folder = t5x
    metadata = json.loads((folder / ".zarray").read_text())
    blosc = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
    rewrite_metadata(folder, compressor=blosc, chunks=metadata["shape"])
    (folder / "0.0").write_bytes(b"\2\1\2\4" + (16_000_000).to_bytes(4, "little") + bytes(24))
    with pytest.raises(ValueError, match=rf"{folder.name}: a chunk has 16,000,000 bytes"):
        t5x_files.find(directory)


def test_a_gin_file_of_spaces(t5x):
    """Runs of spaces cost linear time, and no more than a megabyte is read."""
    directory, _ = t5x
    text = formats.gin(t5_variants.VARIANTS["v1_1"].raw)
    file = directory.parent / "config.gin"
    file.write_text(text + f"a =b{' ' * 20_000}c\n{' ' * 20_000}\n")
    assert t5x_files.config(directory, t5x_files.find(directory))["d_model"] == 16
    file.write_text(text + " " * (1 << 20))
    with pytest.raises(ValueError, match=r"config\.gin has more than 1,048,576 bytes"):
        t5x_files.config(directory, t5x_files.find(directory))


def member(shape: tuple[int, ...], data: bytes) -> bytes:
    """A file of numpy's whose header says any shape."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    return head.getvalue() + data


def test_npz(tmp_path):
    """Nothing is unpacked before names, sizes and headers are those of a file of counts."""
    zeros, few = np.zeros(40_000_000, np.uint8), np.zeros(5, np.uint8)
    names = ("unigram", "successors", "gaps", "times")
    file = tmp_path / "ngram.npz"
    tracemalloc.start()
    try:
        for arrays, message in (
            ({"a": zeros}, "is not a file of n-gram counts: it holds a"),
            (dict.fromkeys(names, few) | {"times": zeros}, "its arrays take 40,"),
        ):
            np.savez_compressed(file, **arrays)
            assert file.stat().st_size < 100_000
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(ValueError, match=rf"ngram\.npz:? {message}"):
                ngram.load(file)
            assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(f"{name}.npy", member((30_000_000,), bytes(5)))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(ValueError, match=r"ngram\.npz: .* has more numbers than the file"):
            ngram.load(file)
        assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
    finally:
        tracemalloc.stop()


def test_counts_of_more_pairs_than_bits(tmp_path):
    pairs = np.zeros(1_000_000, np.uint8)
    few = np.array([1_000_000, 0], np.int32)
    np.savez_compressed(
        tmp_path / "ngram.npz", unigram=few, successors=few, gaps=pairs, times=pairs
    )
    with pytest.raises(ValueError, match=r"ngram\.npz says that it has 2 ids and 1,000,000 pairs"):
        ngram.load(tmp_path / "ngram.npz")


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


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[1]"])
def test_json_files_are_named(data, tmp_path):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.json (is not valid JSON|is not UTF-8|should hold)"):
        files.read_json(tmp_path / "x.json")
