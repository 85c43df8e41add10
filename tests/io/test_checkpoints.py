"""Checkpoints as they are found: each format gives the parameters that safetensors give, or an
error that names the file; and no file runs anything."""

import dataclasses
import functools
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save_file

import checkpoint_formats as formats
import gguf_variants
import gpt_variants
import llama_variants
import make_checkpoint_data
import t5_variants
from specjax.checkpoints import convert, load, safetensors_files, save, tensors
from specjax.checkpoints.formats import gguf_files, spiece, t5x_files, torch_files
from specjax.checkpoints.tensors import Held, Turned, equal, read_into
from specjax.checkpoints.weights import FLAX, find_tensors, wanted
from specjax.cli import convert as convert_command

DATA = make_checkpoint_data.DATA
V1_0, V1_1 = t5_variants.VARIANTS["v1_0"], t5_variants.VARIANTS["v1_1"]
MODELS = {
    "t5 v1.0": (t5_variants, "v1_0"),
    "t5 v1.1": (t5_variants, "v1_1"),
    "gpt2": (gpt_variants, "untied"),
    "bare gpt2": (gpt_variants, "bare"),
    "llama": (llama_variants, "llama3"),
    "qwen2": (llama_variants, "qwen2"),
}


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.model, b.model)


def weights_of(module, variant):
    """Arrays of a variant; scalars too."""
    return {name: np.asarray(array) for name, array in module.tensors(variant).items()}


def contents(tensor) -> np.ndarray:
    """All numbers of a tensor."""
    out = np.empty(tensor.shape, tensor.dtype)
    read_into(tensor, out)
    return out


@pytest.fixture
def directory(tmp_path):
    """A T5 in torch's format."""
    made = t5_variants.write(tmp_path / "model", V1_0)
    return formats.rewrite(made, t5_variants.tensors(V1_0), "bin")


@pytest.fixture
def flax_directory(tmp_path):
    """A T5 in flax's format."""
    made = t5_variants.write(tmp_path / "model", V1_0)
    return formats.rewrite(made, t5_variants.tensors(V1_0), "flax")


@pytest.fixture
def t5x_directory(tmp_path):
    """A T5 in T5X's format, beside its config.gin."""
    made = formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(V1_1))
    (made.parent / "config.gin").write_text(formats.gin(V1_1.raw))
    return made


# --- every format, every family ----------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "form", ["bin", "bin-sharded", "legacy", "legacy-sharded", "flax", "flax-sharded"]
)
def test_each_format_gives_the_same_parameters(model, form, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 64)  # several pieces to a tensor
    module, name = MODELS[model]
    variant = module.VARIANTS[name]
    if form.startswith("flax") and getattr(variant, "bare", False):
        pytest.skip("Flax models stored neither masks nor bare names")
    plain = load(module.write(tmp_path / "plain", variant))
    arrays = weights_of(module, variant)
    found = load(formats.rewrite(module.write(tmp_path / "other", variant), arrays, form))
    assert found.config == plain.config
    assert_same_params(found, plain)


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy", "flax", "t5x"])
def test_a_part_of_a_tensor(form, tmp_path, monkeypatch):
    """What a device of a mesh reads: some rows, some columns, turned or not."""
    monkeypatch.setattr(tensors, "CHUNK", 64)
    arrays = t5_variants.tensors(V1_1)
    if form == "t5x":
        directory = formats.write_t5x(tmp_path / "checkpoint_7", arrays)
    else:
        directory = t5_variants.write(tmp_path, V1_1)
        directory = directory if form == "safetensors" else formats.rewrite(directory, arrays, form)
    for tensor in find_tensors(directory).values():
        part = tuple(slice(size // 3, size // 3 + (size + 1) // 2) for size in tensor.shape)
        whole = contents(tensor)
        out = np.full(whole[part].shape, np.nan, tensor.dtype)
        read_into(tensor, out, part)
        np.testing.assert_array_equal(out, whole[part])
        out.fill(np.nan)
        read_into(Turned.of(tensor), out.T, part[::-1])
        np.testing.assert_array_equal(out, whole[part])


@pytest.mark.parametrize("name", ["v1_0", "v1_1", "deep_decoder", "deep_encoder", "odd_heads"])
@pytest.mark.parametrize("said", ["nothing", "bindings", "block", "config.json"])
def test_t5x_gives_the_same_parameters(name, said, tmp_path):
    variant = t5_variants.VARIANTS[name]
    distance = {"relative_attention_max_distance": 128}  # all of T5X's have that
    variant = dataclasses.replace(variant, config={**variant.config, **distance})
    plain = t5_variants.write(tmp_path / "plain", variant)
    made = formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(variant))
    if said == "config.json":
        formats.copy_config(plain, made)
    elif said != "nothing":
        text = formats.gin(variant.raw, block=said == "block")
        (made.parent / "config.gin").write_text(text)
    found, expected = load(made), load(plain)
    assert found.config == expected.config
    assert found.eos_ids == (1,)
    assert_same_params(found, expected)


def test_of_a_t5x_run_the_last_step_is_read(t5x_directory):
    other = {name: 2 * array for name, array in t5_variants.tensors(V1_1).items()}
    formats.write_t5x(t5x_directory.with_name("checkpoint_10"), other)
    assert_same_params(load(t5x_directory.parent), load(t5x_directory.parent / "checkpoint_10"))


@pytest.mark.parametrize("version", [2, 3])
def test_t5x_in_half_precision_and_with_arrays_in_the_file_itself(version, tmp_path):
    arrays = {n: a.astype(ml_dtypes.bfloat16) for n, a in t5_variants.tensors(V1_0).items()}
    inline = ("shared.weight", "encoder.block.1.layer.0.SelfAttention.q.weight")
    made = formats.write_t5x(tmp_path / "t5x", arrays, version=version, inline=inline)
    variant = dataclasses.replace(V1_0, config={"relative_attention_max_distance": 128})
    plain = t5_variants.write(tmp_path / "plain", variant, dtype=ml_dtypes.bfloat16)
    assert_same_params(load(made), load(plain))


def test_the_name_of_a_size_says_the_config(tmp_path, monkeypatch):
    raw = V1_1.raw
    sizes = tuple(raw[key] for key in ("d_model", "d_kv", "d_ff", "num_layers", "num_heads"))
    monkeypatch.setitem(t5x_files.SIZES["1_1"], "small", sizes)
    arrays = t5_variants.tensors(V1_1)
    made = formats.write_t5x(tmp_path / "t5_1_1_small" / "checkpoint_5", arrays)
    assert load(made).config.num_layers == 2
    wrong = formats.write_t5x(tmp_path / "t5.1.1.xxl", arrays)
    with pytest.raises(ValueError, match=r"missing from the weights|has shape"):
        load(wrong)


def test_t5x_names_of_sizes():
    def version_and_size(name):
        found = t5x_files.NAMED.fullmatch(name)
        return found and found.groups()

    assert version_and_size("t5_1_1_xxl") == ("1", "xxl")
    assert version_and_size("t5.1.1.xl") == ("1", "xl")
    assert version_and_size("t5-v1_1-base") == ("1", "base")
    assert version_and_size("t5_1_0_3b") == ("0", "3b")
    assert version_and_size("t5-small") == (None, "small")
    assert version_and_size("mt5_small") is None
    assert version_and_size("t5_smaller") is None
    assert version_and_size("my_t5_base_with_two_layers") is None


def test_safetensors_win(directory):
    t5_variants.write(directory, V1_0)
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    (directory / "flax_model.msgpack").write_bytes(b"never read")
    load(directory)


def test_torch_wins_over_flax(directory):
    (directory / "flax_model.msgpack").write_bytes(b"never read")
    load(directory)


# --- what torch itself writes, from stored files -----------------------------------------------


@pytest.mark.parametrize("file", ["torch_zip.bin", "torch_legacy.bin"])
@pytest.mark.parametrize("chunk", [8, 1 << 22])
def test_files_of_torch_itself(file, chunk, monkeypatch):
    """Every dtype, tied and non-contiguous tensors, in pieces of one number or as a whole."""
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    found = torch_files.find(DATA / file)
    for name in ("float64", "float32", "float16", "bfloat16", "bool", "uint8", "int64"):
        np.testing.assert_array_equal(
            contents(found[name]), make_checkpoint_data.numbers((2, 3), name)
        )
        assert found[name].dtype.name == name
    whole = make_checkpoint_data.numbers((4, 6), "float32")
    expected = {"whole": whole, "tied": whole, "turned": whole.T, "rows": whole[1:3]}
    expected |= {"columns": whole[:, 1:4:2], "one": whole[2, 3], "empty": whole[:0]}
    expected |= {"expanded": np.broadcast_to(whole[1:2], (3, 6)), "parameter": whole}
    for name, array in expected.items():
        np.testing.assert_array_equal(contents(found[name]), array, err_msg=name)
        assert found[name].shape == array.shape
    assert found["tied"] == found["whole"] != found["rows"]


def test_a_piece_is_no_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 48)
    found = torch_files.find(DATA / "torch_zip.bin")
    for name in ("whole", "turned", "columns"):
        pieces = [piece for _, piece in found[name].pieces()]
        assert len(pieces) > 1
        assert max(piece.nbytes for piece in pieces) <= 48


def test_equality_whatever_the_layout(tmp_path):
    rng = np.random.default_rng(0)
    array = rng.normal(size=(7, 5)).astype(np.float32)
    other = array.copy()
    other[6, 4] += 1
    formats.write_torch(tmp_path / "a.bin", {"x": array, "turned": array.T, "other": other})
    found = torch_files.find(tmp_path / "a.bin")
    assert equal(found["x"], found["x"])
    assert equal(found["x"], Held.of(array))
    assert equal(found["x"], Turned.of(found["turned"]))
    assert not equal(found["x"], found["other"])
    assert not equal(found["x"], Turned.of(Held.of(other.T)))
    assert not equal(found["x"], found["turned"])


# --- hostile pickles ---------------------------------------------------------------------------

ARRAY = np.ones((2, 2), np.float32)
GOOD = formats.tensor("0", ARRAY)


class Runs:
    """Says so in a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


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


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_by_name(case, legacy, directory):
    instructions, message = HOSTILE[case]
    file = directory / "pytorch_model.bin"
    program = formats.pickled({"x": instructions})
    if not legacy:
        formats.zipped(file, program, {"0": ARRAY.tobytes()})
    else:
        if "storage" in case or case == "endless":
            pytest.skip("said otherwise, and tested by itself")
        keys = pickle.dumps(["0"], 2)
        start = formats.MAGIC + pickle.dumps(1001, 2) + formats.SYSTEM
        file.write_bytes(start + program + keys + b"\4" + bytes(7) + ARRAY.tobytes())
    with pytest.raises(ValueError, match=message) as error:
        load(directory)
    assert str(error.value).startswith(str(file))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("place", ["the object", "the magic number", "the system", "the keys"])
def test_nothing_is_run_wherever_it_stands(place, directory, tmp_path):
    """The very files would run code in pickle.loads."""
    mark = tmp_path / "ran"
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
    file = directory / "pytorch_model.bin"
    file.write_bytes(b"".join({**good, place: bad}.values()))
    with pytest.raises(ValueError, match=r"asks for 'posix\.mkdir'|asks for 'nt\.mkdir'"):
        load(directory)
    if place == "the object":
        formats.zipped(file, bad, {})
        with pytest.raises(ValueError, match=r"asks for '\w+\.mkdir'"):
            load(directory)
    assert not mark.exists()


def test_nothing_is_imported(directory, monkeypatch):
    """Not even a module whose name is on the list."""
    asked = []
    real = __import__

    def importing(name, *args, **options):
        asked.append(name)
        return real(name, *args, **options)

    monkeypatch.setattr("builtins.__import__", importing)
    torch_files.find(directory / "pytorch_model.bin")
    assert not any(name.startswith("torch") for name in asked)


def test_a_legacy_file_whose_storages_are_not_its_tensors(directory):
    file = directory / "pytorch_model.bin"
    formats.write_torch(file, {"x": ARRAY}, legacy=True)
    data = file.read_bytes()
    assert data[-24:-16] == b"\4" + bytes(7)
    file.write_bytes(data[:-24] + b"\5" + data[-23:])
    with pytest.raises(ValueError, match="storages are not those of its tensors"):
        load(directory)
    start = formats.MAGIC + pickle.dumps(1001, 2)
    other = pickle.dumps({"little_endian": False}, 2)
    file.write_bytes(start + other + formats.pickled({}) + pickle.dumps([], 2))
    with pytest.raises(ValueError, match="bytes in the other order"):
        load(directory)


# --- truncated, corrupted and mislabelled files ------------------------------------------------


def write_gguf(path, arrays):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a", 3)
    writer.add_array("b", ["x", "yz"])
    writer.add_array("c", [1.0, 2.0])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    gguf_variants.finish(writer)


READERS = {
    "safetensors": (lambda path, arrays: save_file(arrays, path), safetensors_files.find),
    "bin": (formats.write_torch, torch_files.find),
    "legacy": (functools.partial(formats.write_torch, legacy=True), torch_files.find),
    "flax": (formats.write_flax, FLAX.find),
    "gguf": (write_gguf, lambda path: gguf_files.read(path).tensors),
}


@pytest.mark.parametrize("form", READERS)
def test_damage_anywhere_is_an_error_that_names_the_file_or_a_number(form, tmp_path):
    """Each byte is spoiled, and the file cut short there; nothing else escapes."""
    write, find = READERS[form]
    file = tmp_path / "file.gguf"
    write(
        file, {"a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.half)}
    )
    data, errors = file.read_bytes(), 0

    def read(content):
        file.write_bytes(content)
        try:
            return {name: contents(tensor).tobytes() for name, tensor in find(file).items()}
        except ValueError as error:
            assert str(file) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            return None

    whole = read(data)
    assert whole is not None
    for at in range(len(data)):
        for value in {0, 0x2E, 0x80, 0xFF, data[at] ^ 1} - {data[at]}:
            errors += read(data[:at] + bytes([value]) + data[at + 1 :]) is None
        cut = read(data[:at])
        assert cut is None or (form == "gguf" and cut == whole), at  # which ends in padding
    assert errors > len(data) / 2


def test_a_flipped_bit_of_the_numbers_is_found_in_an_archive(directory):
    file = directory / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        data[archive.getinfo("archive/data/0").header_offset + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged \(wrong checksum"):
        load(directory)


def test_an_archive_whose_checksums_were_not_computed(tmp_path):
    """As torch writes with `set_crc32_options(False)`: zeros stand for them."""
    file = tmp_path / "a.bin"
    formats.write_torch(file, {"x": ARRAY})
    with zipfile.ZipFile(file) as archive:
        sums = [info.CRC.to_bytes(4, "little") for info in archive.infolist()]
    data = file.read_bytes()
    for checksum in sums:
        data = data.replace(checksum, bytes(4))
    file.write_bytes(data)
    np.testing.assert_array_equal(contents(torch_files.find(file)["x"]), ARRAY)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", b"<html>404</html>", "neither of the two formats"),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("flax_model.msgpack", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("flax_model.msgpack", b"<html>404</html>", "not written by flax"),
        ("pytorch_model.bin", pickle.dumps({"a": 1}, 2), "a pickle that torch did not save"),
        ("pytorch_model.bin", pickle.dumps([1.0], 4), "a pickle that torch did not save"),
    ],
)
def test_mislabelled_files(name, content, message, tmp_path):
    (t5_variants.write(tmp_path, V1_0) / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        load(tmp_path)


def test_other_zip_archives(directory):
    file = directory / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "x")
    with pytest.raises(ValueError, match="a zip archive that torch did not save"):
        load(directory)
    program = formats.pickled({"x": GOOD})
    formats.zipped(file, program, {"0": ARRAY.tobytes()}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="compressed or encrypted"):
        load(directory)
    formats.zipped(file, program, {"0": ARRAY.tobytes()})
    file.write_bytes(file.read_bytes().replace(b"little", b"biglit"))
    with pytest.raises(ValueError, match="checksum of byteorder"):
        load(directory)


@pytest.mark.parametrize("form", ["bin-sharded", "legacy-sharded", "flax-sharded"])
def test_shards_of_two_models(form, tmp_path):
    made = formats.rewrite(t5_variants.write(tmp_path, V1_0), t5_variants.tensors(V1_0), form)
    first, second = sorted([*made.glob("*-of-*.bin"), *made.glob("*-of-*.msgpack")])[:2]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"missing from the weights"):
        load(made)
    first.write_bytes(kept)
    (index,) = made.glob("*.index.json")
    raw = json.loads(index.read_text())
    raw["weight_map"].popitem()
    index.write_text(json.dumps(raw))
    load(made)  # what the index does not list is there all the same
    second.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{second.name} is missing"):
        load(made)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path):
    made = formats.rewrite(
        t5_variants.write(tmp_path / "model", V1_0), t5_variants.tensors(V1_0), "bin-sharded"
    )
    index = made / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"shared.weight": "../elsewhere.bin"}}))
    with pytest.raises(ValueError, match=r"which should be the name of a file"):
        load(made)


# --- flax --------------------------------------------------------------------------------------


def test_flax_files_are_read_as_flax_reads_them(tmp_path, monkeypatch):
    """Arrays of many dtypes, in several parts too, beneath `params` or not."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 40)
    rng = np.random.default_rng(0)
    names = ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool")
    arrays = {f"a/{name}": (3 * rng.random((7, 5))).astype(name) for name in names}
    arrays |= {"scalar": np.float32(3).reshape(()), "empty": np.zeros((0, 3), np.float32)}
    arrays |= {"long" * 90: np.ones(70_000, np.uint8)}
    file = tmp_path / "x.msgpack"
    for above in ("", "params/"):
        formats.write_flax(file, {above + name: array for name, array in arrays.items()})
        assert b"__msgpack_chunked_array__" in file.read_bytes()
        theirs = serialization.msgpack_restore(file.read_bytes())
        theirs = theirs["params"] if above else theirs
        found = FLAX.find(file)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            here = theirs["a"][name[2:]] if "/" in name else theirs[name]
            np.testing.assert_array_equal(here, array)
            np.testing.assert_array_equal(contents(found[name]), array, err_msg=name)
            assert found[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x81\xa1a\x01", "entry 'a' is no array"),
        (b"\x93\x01\x02\x03", "it is no map"),
        (b"\x80\x80", "it is no map"),
        (b"\x82\xa1a\x01\xa1a\x01", "comes twice"),
        (b"\x81\x01\x01", "a key is no string"),
        (b"\x81\xa1a" * 100 + b"\x01", "maps in maps without end"),
        (b"\x91" * 100_000, "maps in maps without end"),
        (b"\xdf\xff\xff\xff\xff", "ends too early"),
        (b"\x81\xdb\xff\xff\xff\xff", "a string of 4294967295 bytes"),
        (b"\x81\xa1a\xc1", "byte 0xc1 begins nothing"),
        (b"\x81\xa1a\xd4\x07\x00", "an extension of type 7"),
        (b"\x81\xa1a\xc7\x02\x01\x92\x90", "an array is not three things"),
    ],
)
def test_hostile_msgpack(content, message, flax_directory):
    (flax_directory / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=rf"flax_model\.msgpack.*{message}"):
        load(flax_directory)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ([2, 3], "float32", "another number of bytes"),
        ([-2, -2], "float32", "impossible shape"),
        ([2, 2], "object", "an array of 'object'"),
        ([2, 2], "<U4", "an array of '<U4'"),
        ("22", "float32", "impossible shape"),
    ],
)
def test_arrays_that_are_not_what_they_say(shape, dtype, message, flax_directory):
    msgpack = pytest.importorskip("msgpack")  # flax's own
    inner = msgpack.packb((shape, dtype, bytes(16)), use_bin_type=True)
    content = msgpack.packb({"a": msgpack.ExtType(1, inner)}, use_bin_type=True)
    (flax_directory / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(flax_directory)


# --- T5X ---------------------------------------------------------------------------------------

QUERY = "target.encoder.layers_0.attention.query.kernel"


def test_a_t5x_folder_that_is_missing(t5x_directory):
    (t5x_directory / QUERY).rename(t5x_directory / "elsewhere")
    with pytest.raises(FileNotFoundError, match=rf"{QUERY} is missing, but .*checkpoint lists"):
        load(t5x_directory)


@pytest.mark.parametrize("damage", ["missing", "short", "other"])
def test_a_t5x_chunk_that_is_damaged(damage, t5x_directory):
    """tensorstore would read a chunk that is missing as zeros."""
    chunk = t5x_directory / QUERY / "1.0"
    if damage == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:9] if damage == "short" else b"other")
    with pytest.raises(ValueError, match=rf"{QUERY} is damaged"):
        load(t5x_directory)


@pytest.mark.parametrize("text", ["", "{", '{"zarr_format": 2}'])
def test_t5x_metadata_that_is_damaged(text, t5x_directory):
    (t5x_directory / QUERY / ".zarray").write_text(text)
    with pytest.raises(ValueError, match=rf"{QUERY} cannot be read"):
        load(t5x_directory)


def test_chunks_that_hold_the_fill_value_alone_may_be_missing(t5x_directory):
    file = t5x_directory / QUERY / ".zarray"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "fill_value": 0.5}))
    (t5x_directory / QUERY / "1.0").unlink()
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    found = contents(find_tensors(t5x_directory)[name])
    np.testing.assert_array_equal(found.T[10:, :10], 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("emb_dim = 16", "emb_dim = 32", r"has shape .* asks for"),
        ("num_heads = 2", "num_heads = two", r"config\.gin: num_heads = two is no value"),
        ("num_encoder_layers = 2", "num_encoder_layers = 3", "missing from the weights"),
        ("num_decoder_layers = 2", "num_decoder_layers = 3", "num_decoder_layers=3, but layers"),
        ("('gelu', 'linear')", "('silu', 'linear')", r"mlp_activations = \('silu', 'linear'\)"),
        ("emb_dim = 16", "emb_dim = %NOWHERE", r"emb_dim = %NOWHERE is no value"),
    ],
)
def test_a_gin_file_of_another_model(old, new, message, t5x_directory):
    file = t5x_directory.parent / "config.gin"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        load(t5x_directory)


def test_other_files_of_the_name_checkpoint(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1000000"\n')
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "checkpoint").write_bytes(serialization.to_bytes({"step": np.ones(3)}))
    with pytest.raises(ValueError, match=r"checkpoint has no 'optimizer/target'"):
        load(tmp_path)


def test_layers_that_are_scanned_are_refused(t5x_directory):
    tree = serialization.msgpack_restore((t5x_directory / "checkpoint").read_bytes())
    target = tree["optimizer"]["target"]
    target["encoder"]["encoder"] = {"attention": target["encoder"].pop("layers_0")["attention"]}
    (t5x_directory / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    with pytest.raises(ValueError, match="whose layers are scanned are not supported"):
        load(t5x_directory)


# --- spiece.model ------------------------------------------------------------------------------

STORED = json.loads((DATA / "spiece_ids.json").read_text(encoding="utf-8"))


@pytest.fixture
def with_spiece(request, tmp_path):
    """A T5, or another family, with the stored sentencepiece model and nothing else of a
    tokenizer."""
    variant = t5_variants.OTHERS.get(getattr(request, "param", "t5"), V1_0)
    variant = dataclasses.replace(variant, config={**variant.config, "vocab_size": 160})
    made = t5_variants.write(tmp_path / "model", variant)
    (made / "spiece.model").write_bytes((DATA / "spiece.model").read_bytes())
    extra = {"extra_ids": make_checkpoint_data.EXTRA_IDS}
    (made / "tokenizer_config.json").write_text(json.dumps(extra))
    return made


def test_a_spiece_model_gives_the_ids_of_transformers(with_spiece):
    found = load(with_spiece)
    for text, ids in STORED["ids"].items():
        assert found.tokenizer(text)["input_ids"] == ids, text
    for token, i in STORED["special"].items():
        assert found.tokenizer.convert_tokens_to_ids(token) == i
    assert set(found.tokenizer.all_special_tokens) == set(STORED["special"])
    assert found.model.vocab_size == STORED["size"]
    text = "the house is wonderful"
    again = found.tokenizer.decode(found.tokenizer(text)["input_ids"], skip_special_tokens=True)
    assert again == text


@pytest.mark.parametrize("with_spiece", ["t5", "mt5", "umt5"], indirect=True)
def test_a_tokenizer_from_pieces_is_saved_for_others(with_spiece, tmp_path):
    convert(with_spiece, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "spiece.model").exists()
    again = load(tmp_path / "out")
    for text, ids in STORED["ids"].items():
        assert again.tokenizer(text)["input_ids"] == ids, text


def test_what_is_beside_a_spiece_model_is_followed(with_spiece):
    (with_spiece / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    special = {"eos_token": {"content": "</s>"}, "additional_special_tokens": None}
    (with_spiece / "special_tokens_map.json").write_text(json.dumps(special))
    with pytest.raises(ValueError, match="the tokenizer has 250 ids and the model only 160"):
        load(with_spiece)
    (with_spiece / "tokenizer_config.json").write_text('{"model_max_length": 77, "extra_ids": 0}')
    assert load(with_spiece).max_source_len == 77
    (with_spiece / "tokenizer_config.json").write_text('{"extra_ids": "many"}')
    with pytest.raises(ValueError, match="extra_ids='many' should be an integer"):
        load(with_spiece)


def test_t5x_finds_its_pieces_beside_its_steps(tmp_path):
    variant = dataclasses.replace(V1_0, config={"vocab_size": 260})
    made = formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(variant))
    pieces = (DATA / "spiece.model").read_bytes()
    (made.parent / "sentencepiece.model").write_bytes(pieces)
    text = "parse: return self.line"
    assert load(made).tokenizer(text)["input_ids"] == STORED["ids"][text]


def test_damaged_spiece_models(with_spiece):
    file = with_spiece / "spiece.model"
    data = file.read_bytes()
    for content in (b"", data[:3], data[:1000], data[:-1], b"\xff" * 40, b"<html>404</html>"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"spiece\.model"):
            load(with_spiece)


def test_a_spiece_model_of_another_kind(with_spiece):
    file = with_spiece / "spiece.model"
    found = spiece.read(file)
    assert (found.model_type, found.unknown_id) == (spiece.UNIGRAM, 2)
    file.write_bytes(b"\x0a\x05\x0a\x03abc\x12\x02\x18\x02")  # one piece, of BPE
    with pytest.raises(ValueError, match="is no tokenizer of a T5"):
        load(with_spiece)


# --- the hub -----------------------------------------------------------------------------------

BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
OTHERS = ["tf_model.h5", "rust_model.ot", "onnx/model.safetensors", "onnx/tokenizer.json", "README"]
OTHERS += ["model.fp16.safetensors", "training_args.bin", "optimizer.bin", ".gitattributes"]


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        (["model.safetensors", "pytorch_model.bin", "flax_model.msgpack"], ["model.safetensors"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (["flax_model.msgpack"], ["flax_model.msgpack"]),
        (
            ["pytorch_model.bin.index.json", *BINS, "flax_model.msgpack"],
            ["pytorch_model.bin.index.json", *BINS],
        ),
        (
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors", *BINS],
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors"],
        ),
    ],
)
def test_one_format_is_downloaded(weights, kept, directory, monkeypatch):
    asked = {}

    def snapshot_download(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(directory)

    offered = [*OTHERS, *weights, *BESIDE, "spiece.model"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: offered)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("google/t5-v1_1-xxl").name == "google/t5-v1_1-xxl"
    assert asked["name"] == "google/t5-v1_1-xxl"
    fetched = huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=asked["patterns"])
    assert sorted(fetched) == sorted([*BESIDE, *kept])


def test_pieces_are_downloaded_where_there_is_no_better_tokenizer():
    assert wanted(["config.json", "spiece.model", "flax_model.msgpack"]) == [
        "config.json",
        "spiece.model",
        "flax_model.msgpack",
    ]


def test_without_a_network_what_was_downloaded_serves(directory, monkeypatch):
    def offline(name):
        raise ConnectionError("no network")

    def snapshot_download(name, *, local_files_only):
        assert local_files_only
        if name != "here/before":
            raise FileNotFoundError("not in the cache")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    load("here/before")
    with pytest.raises(FileNotFoundError, match=r"ConnectionError: no network"):
        load("never/before")


# --- convert -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bin", "legacy-sharded", "flax"])
@pytest.mark.parametrize("model", ["t5 v1.1", "gpt2", "llama"])
def test_what_is_converted_is_what_is_saved(form, model, tmp_path):
    module, name = MODELS[model]
    variant = module.VARIANTS[name]
    arrays = weights_of(module, variant)
    made = formats.rewrite(module.write(tmp_path / "made", variant), arrays, form)
    said = []
    convert(made, tmp_path / "converted", progress=lambda *counts: said.append(counts))
    save(tmp_path / "saved", load(made))
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {path.name for path in (tmp_path / "converted").iterdir()}
    for file in files:
        ours = (tmp_path / "converted" / file).read_bytes()
        assert ours == (tmp_path / "saved" / file).read_bytes()
    assert_same_params(load(tmp_path / "converted"), load(made))
    whole = 4 * sum(array.size for array in arrays.values())
    assert said[-1] == (whole, whole)
    assert [count for count, _ in said] == sorted({count for count, _ in said})


def test_convert_keeps_half_precision_unless_told(tmp_path):
    arrays = {n: a.astype(ml_dtypes.bfloat16) for n, a in t5_variants.tensors(V1_0).items()}
    made = formats.rewrite(t5_variants.write(tmp_path / "made", V1_0), arrays, "bin")
    convert(made, tmp_path / "same")
    convert(made, tmp_path / "wide", dtype=np.float32)
    stored = {t.dtype.name for t in find_tensors(tmp_path / "same").values()}
    assert stored == {"bfloat16"}
    assert {t.dtype.name for t in find_tensors(tmp_path / "wide").values()} == {"float32"}
    assert_same_params(load(tmp_path / "same"), load(tmp_path / "wide"))


def test_convert_into_its_own_directory(t5x_directory, directory):
    """Only if asked to, and what it would not write again is no model that it replaces."""
    held = {path.name for path in t5x_directory.iterdir()}
    for overwrite, said in ((True, "would not be replaced but lost"), (False, "but lost")):
        with pytest.raises(ValueError, match=said):
            convert(t5x_directory, t5x_directory, overwrite=overwrite)
    assert {path.name for path in t5x_directory.iterdir()} == held
    before = load(directory)
    with pytest.raises(ValueError, match=r"holds config\.json already.* --overwrite"):
        convert(directory, directory)
    convert(directory, directory, overwrite=True)
    assert {p.name for p in directory.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (directory / "pytorch_model.bin").exists()
    assert_same_params(load(directory), before)


def test_a_converted_model_keeps_nothing_of_the_one_before(t5x_directory, tmp_path):
    """Neither its chat template nor its tokenizer, shards and index."""
    place = tmp_path / "place"
    convert(t5x_directory, place)
    whole = {path.name for path in place.iterdir()}
    older = ("chat_template.jinja", "tokenizer_config.json", "vocab.json", "flax_model.msgpack",
             "model.safetensors.index.json", "model-00001-of-00002.safetensors")  # fmt: skip
    for name in older:
        (place / name).write_text("{}")
    (place / "additional_chat_templates").mkdir()
    convert(t5x_directory, place, overwrite=True)
    assert {path.name for path in place.iterdir()} == whole
    (place / "thesis.tex").touch()
    for write in (lambda: convert(t5x_directory, place, overwrite=True),
                  lambda: save(place, load(t5x_directory))):  # fmt: skip
        with pytest.raises(ValueError, match=r"holds thesis\.tex, which would not be replaced"):
            write()
    assert load(place).config == load(t5x_directory).config


def test_nothing_is_left_of_a_conversion_that_fails(directory):
    file = directory / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        last = [name for name in archive.namelist() if "/data/" in name][-1]
        data[archive.getinfo(last).header_offset + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="wrong checksum"):
        convert(directory, directory.with_name("out"))
    assert [path.name for path in Path(directory.parent).iterdir()] == ["model"]


def test_convert_from_a_shell(directory, tmp_path, capsys):
    convert_command.main([str(directory), str(tmp_path / "out"), "--dtype=bfloat16"])
    said = capsys.readouterr()
    assert re.fullmatch(rf"{tmp_path / 'out'}: a t5 with 0\.0 MB of .* no tokenizer\n", said.out)
    # The bar is for terminals.
    assert said.err == f"converting {directory} into {tmp_path / 'out'}\n"
    assert {t.dtype.name for t in find_tensors(tmp_path / "out").values()} == {"bfloat16"}


def test_errors_of_convert_are_one_sentence(directory, tmp_path, capsys):
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran"), 2))
    with pytest.raises(SystemExit) as left:
        convert_command.main([str(directory), str(tmp_path / "out")])
    assert left.value.code == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"error: .*pytorch_model\.bin cannot be read: it ", said)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()
