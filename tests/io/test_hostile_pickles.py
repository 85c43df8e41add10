"""Pickles of torch that do more than describe tensors, or lie: each is refused by name, nothing
runs, and nothing is allocated before that. And archives around them."""

import os
import pickle
import zipfile

import numpy as np
import pytest

import checkpoint_formats as formats
from specjax.checkpoints import weights
from specjax.checkpoints.formats import pickles, torch_files
from specjax.support import npz

ARRAY = np.ones((2, 2), np.float32)
GOOD = formats.tensor("0", ARRAY)


def call(function: bytes, *arguments: bytes) -> bytes:
    """The instructions that push what a function returns."""
    return function + b"(" + b"".join(arguments) + b"tR"


def storage(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tQ"


def rebuild(of: bytes, begin=0, shape=(2, 2), strides=(2, 1)) -> bytes:
    sizes = formats.sequence(shape) + formats.sequence(strides)
    parts = (of, formats.number(begin), sizes, b"\x89", b"}")
    return call(b"ctorch._utils\n_rebuild_tensor_v2\n", *parts)


FLOATS = b"ctorch\nFloatStorage\n"
STORAGE = storage(
    formats.text("storage"), FLOATS, formats.text("0"), formats.text("cpu"), formats.number(4)
)
SAID, PRINT = formats.text("x"), b"cbuiltins\nprint\n"
FEW = b"(" + b"".join(b"(" + formats.text(f"{i}") + b"Nl" for i in range(100)) + b"l"
HOSTILE = {
    "os.system": (call(b"cos\nsystem\n", SAID), r"asks for 'os\.system'"),
    "posix.system": (call(b"cposix\nsystem\n", SAID), r"'posix\.system'"),
    "eval": (call(b"cbuiltins\neval\n", SAID), r"'builtins\.eval'"),
    "py2 eval": (call(b"c__builtin__\neval\n", SAID), r"'__builtin__\.eval'"),
    "getattr": (call(b"cbuiltins\ngetattr\n", SAID, SAID), r"'builtins\.getattr'"),
    "torch.load": (call(b"ctorch\nload\n", SAID), r"'torch\.load'"),
    "a way through a known module": (
        call(b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n"),
        r"'torch\._utils\._rebuild_tensor_v2\.__globals__'",
    ),
    "a module of collections": (b"ccollections\n_sys.exit\n", r"'collections\._sys\.exit'"),
    "stack global": (
        formats.text("os") + formats.text("system") + b"\x93(" + SAID + b"tR",
        r"'os\.system'",
    ),
    "names that are no strings": (b")))\x87)\x93", "asks for what has no name"),
    "inst": (b"(" + SAID + b"ios\nsystem\n", "instruction INST"),
    "obj": (b"(" + FLOATS + b"o", "instruction OBJ"),
    "newobj": (FLOATS + b")\x81", "instruction NEWOBJ"),
    "newobj_ex": (FLOATS + b")}\x92", "instruction NEWOBJ_EX"),
    "extension registry": (b"\x82\x01", "instruction EXT1"),
    "named persistent id": (b"Pstorage\n", "instruction PERSID"),
    "a known name called otherwise": (call(FLOATS, SAID), r"calls torch\.FloatStorage"),
    "a string called": (SAID + b")R", "calls what is no function"),
    "build on a tensor": (GOOD + b"}" + SAID + SAID + b"sb", "attributes of what is no dict"),
    "build on a name": (FLOATS + b"}b", "attributes of what is no dict"),
    "beyond its storage": (rebuild(STORAGE, 1), "reaches beyond its storage"),
    "before its storage": (rebuild(STORAGE, -1), "impossible shape"),
    "negative strides": (rebuild(STORAGE, 3, (2, 2), (-2, -1)), "impossible shape"),
    "wrong rank": (rebuild(STORAGE, 0, (2, 2), (1,)), "impossible shape"),
    "endless": (rebuild(STORAGE, 0, (1 << 60, 2), (0, 1)), "more numbers than the file"),
    "no storage": (rebuild(formats.number(1)), "a tensor has no storage"),
    "other storage": (
        rebuild(storage(SAID, FLOATS, SAID, SAID, formats.number(4))),
        "refers to what is no storage",
    ),
    "missing storage": (
        rebuild(storage(formats.text("storage"), FLOATS, SAID, SAID, formats.number(4))),
        "numbers of 'x' are missing",
    ),
    "larger storage": (
        rebuild(
            storage(formats.text("storage"), FLOATS, formats.text("0"), SAID, formats.number(9))
        ),
        "numbers of 'x' are missing or cut short",
    ),
    "a number": (formats.number(1), "entry 'x' is a int and no tensor"),
    "a dict of tensors": (b"}" + SAID + GOOD + b"s", "entry 'x' is a dict and no tensor"),
    "a huge string": (b"\x8d" + (1 << 62).to_bytes(8, "little"), "a string of"),
    "a huge number": (b"\x8b\xff\xff\xff\x7f", "a string of"),
    "an unknown memo": (b"h\x07", "cut short or damaged"),
    "an empty stack": (b"000000", "cut short or damaged"),
    "a deep nest": (b"]" + b"\x85" * 200_000, "entry 'x' is a tuple and no tensor"),
    "a deep nest for a key": (b"}" + b"]" + b"\x85" * 200_000 + b"Ns", "key of a dict is a tuple"),
    "copies of copies": (b"]" + b"2a" * 50, "instruction DUP"),
    "a list of itself": (b"]q\x01h\x01a", "entry 'x' is a list and no tensor"),
}
BOMBS = {
    "dicts": (b"}" * 3_000_000, "takes more than 1,048,576 steps"),
    "dicts made again and again from one list": (
        b"ccollections\nOrderedDict\nq\0" + FEW + b"\x85q\1" + b"h\0h\1R0" * 200,
        "takes more than 5,000 steps",
    ),
    "a long number": (b"\x8b\x40\x42\x0f\0" + b"\1" * 1_000_000, "a number of 7,999,993 bits"),
    "a long key": (b"}\x8a\x09" + b"\1" * 9 + b"Ns", "key of a dict is a int"),
    "a long number to keep by": (b"Np99999999999999999999\n", "under an impossible number"),
}


def refused(file, message):
    with pytest.raises(ValueError, match=message) as error:
        torch_files.find(file)
    assert str(error.value).startswith(str(file))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("case", HOSTILE)
def test_pickles(case, tmp_path):
    """In an archive; and in the older format, which would say it of storages in other words."""
    instructions, message = HOSTILE[case]
    file, program = tmp_path / "x.bin", formats.pickled({"x": instructions})
    formats.zipped(file, program, {"0": ARRAY.tobytes()})
    refused(file, message)
    if "storage" not in case and case != "endless":
        start = formats.MAGIC + pickle.dumps(1001, 2) + formats.SYSTEM
        keys = pickle.dumps(["0"], 2)
        file.write_bytes(start + program + keys + b"\4" + bytes(7) + ARRAY.tobytes())
        refused(file, message)


@pytest.mark.parametrize("case", BOMBS)
def test_bombs(case, tmp_path, monkeypatch):
    """Each has a few megabytes, so that nothing happens where one goes off."""
    program, message = BOMBS[case]
    if "5,000" in message:
        monkeypatch.setattr(pickles, "MAX_STEPS", 5_000)
    formats.zipped(tmp_path / "x.bin", b"\x80\x02" + program + b".", {})
    refused(tmp_path / "x.bin", rf"x\.bin cannot be read: .*{message}")


class Runs:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["the object", "the magic number", "the system", "the keys"])
def test_nothing_is_run_wherever_it_stands(place, tmp_path):
    """The very files would run code in pickle.loads."""
    mark, file = tmp_path / "ran", tmp_path / "x.bin"
    bad = pickle.dumps(Runs(mark), 2)
    pickle.loads(bad)
    mark.rmdir()  # it would have
    good = {
        "the magic number": formats.MAGIC,
        "the protocol": pickle.dumps(1001, 2),
        "the system": formats.SYSTEM,
        "the object": formats.pickled({}),
        "the keys": pickle.dumps([], 2),
    }
    file.write_bytes(b"".join({**good, place: bad}.values()))
    refused(file, r"asks for '\w+\.mkdir'")
    if place == "the object":
        formats.zipped(file, bad, {})
        refused(file, r"asks for '\w+\.mkdir'")
    assert not mark.exists()


def test_nothing_is_imported(tmp_path, monkeypatch):
    """Not even a module whose name is on the list."""
    formats.write_torch(tmp_path / "x.bin", {"x": ARRAY})
    asked = []
    real = __import__

    def importing(name, *args, **options):
        asked.append(name)
        return real(name, *args, **options)

    monkeypatch.setattr("builtins.__import__", importing)
    torch_files.find(tmp_path / "x.bin")
    assert not any(name.startswith("torch") for name in asked)


def test_storages_of_the_older_format(tmp_path):
    """Others than those of the tensors, in the other order, or larger than any file."""
    file = tmp_path / "x.bin"
    formats.write_torch(file, {"x": ARRAY}, legacy=True)
    data = file.read_bytes()
    assert data[-24:-16] == b"\4" + bytes(7)
    file.write_bytes(data[:-24] + b"\5" + data[-23:])
    refused(file, "storages are not those of its tensors")
    start = formats.MAGIC + pickle.dumps(1001, 2)
    other = pickle.dumps({"little_endian": False}, 2)
    file.write_bytes(start + other + formats.pickled({}) + pickle.dumps([], 2))
    refused(file, "bytes in the other order")
    entry = formats.tensor("0", np.ones(1, np.float32), legacy=True)
    entry = entry.replace(formats.number(1) + b"NtQ", formats.number(1 << 61) + b"NtQ")
    size = (1 << 61).to_bytes(8, "little")
    keys = pickle.dumps(["0"], 2)
    file.write_bytes(
        start + formats.SYSTEM + formats.pickled({"x": entry}) + keys + size + bytes(8)
    )
    refused(file, r"x\.bin is cut short or damaged")


def test_archives(tmp_path, monkeypatch):
    """Archives of other programs, compressed, changed, without tensors, with names that are no
    UTF-8 or too many."""
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "x")
    refused(file, "a zip archive that torch did not save")
    program, numbers = formats.pickled({"x": GOOD}), {"0": ARRAY.tobytes()}
    formats.zipped(file, program, numbers, compression=zipfile.ZIP_DEFLATED)
    refused(file, "compressed or encrypted")
    formats.zipped(file, program, numbers)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"little", b"biglit"))
    refused(file, "checksum of byteorder")
    with zipfile.ZipFile(file) as archive:
        at = archive.getinfo("archive/data/0").header_offset + 50
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged \(wrong checksum"):
        list(torch_files.find(file)["x"].pieces())
    formats.zipped(file, formats.pickled({}), {"café": b"x"})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds no tensors"):
        weights.find_tensors(tmp_path)
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xff\xff"))
    refused(file, r"pytorch_model\.bin is cut short or damaged \('utf-8'")
    monkeypatch.setattr(npz, "MAX_LIST", 2_000)
    formats.zipped(file, formats.pickled({}), {f"{i}": b"" for i in range(50)})
    refused(file, r"pytorch_model\.bin is .* \(a list of files of")
