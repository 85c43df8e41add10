"""Files of every format but pickles that are damaged, say more than they hold, or take more memory
than they weigh: an error that names the file, before anything is allocated."""

import functools
import gzip
import io
import shutil
import tracemalloc
import zipfile

import gguf
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save_file

import checkpoint_formats as formats
import gguf_variants
import make_checkpoint_data
import t5_variants
from checkpoint_edits import contents, edit_json
from gguf_variants import entry, header, info, length
from specjax.checkpoints import load, safetensors_files
from specjax.checkpoints.formats import gguf_files, msgpack_files, spiece, torch_files
from specjax.checkpoints.weights import FLAX
from specjax.drafters import ngram
from tiny_models import slow

# --- damage anywhere ---------------------------------------------------------------------------


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
@pytest.mark.parametrize("step", [5, slow(1)])
def test_damage_anywhere_is_an_error_that_names_the_file_or_a_number(form, step, tmp_path):
    """Each byte is spoiled, and the file cut short there; nothing else escapes.

    Of five other values of a byte, and of five places to cut, one is tried, or all.
    """
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

    whole, tried = read(data), 0
    assert whole is not None
    for at in range(len(data)):
        for value in (0, 0x2E, 0x80, 0xFF, data[at] ^ 1)[at % step :: step]:
            errors += read(data[:at] + bytes([value]) + data[at + 1 :]) is None
            tried += 1
        if at % step == 0:
            cut = read(data[:at])
            assert cut is None or (form == "gguf" and cut == whole), at  # which ends in padding
    assert errors > tried / 10


@pytest.mark.parametrize("form", READERS)
def test_a_file_that_is_cut_once_its_header_was_read(form, tmp_path):
    write, find = READERS[form]
    file = tmp_path / "file.gguf"
    write(file, {"a/kernel": np.ones((2, 3), np.float32)})
    (tensor,) = find(file).values()
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"{file} is cut short"):
        contents(tensor)


LFS = b"version https://git-lfs.github.com/spec/v1\n"
MISLABELLED = [
    ("pytorch_model.bin", b"<html>404</html>", "neither of the two formats"),
    *((name, LFS, "git lfs pull") for name in ("pytorch_model.bin", "flax_model.msgpack")),
    ("model.safetensors", LFS, "git lfs pull"),
    ("flax_model.msgpack", b"<html>404</html>", "not written by flax"),
    ("pytorch_model.bin", b"\x80\x02]G?\xf0\0\0\0\0\0\0a.", "a pickle that torch did not save"),
    ("spiece.model", b"<html>404</html>", "cut short or damaged"),
    ("spiece.model", b"", "cut short or damaged"),
    ("spiece.model", b"\xff" * 40, "cut short or damaged"),
    # One piece, of BPE.
    ("spiece.model", b"\x0a\x05\x0a\x03abc\x12\x02\x18\x02", "is no tokenizer of a T5"),
]


@pytest.mark.parametrize(("name", "content", "message"), MISLABELLED)
def test_mislabelled_files(name, content, message, tmp_path):
    made = t5_variants.write(tmp_path, t5_variants.VARIANTS["v1_0"])
    if name != "spiece.model":
        (made / "model.safetensors").unlink()
    (made / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        load(made)


@pytest.mark.parametrize("end", [3, 1000, -1])
def test_pieces_that_are_cut_short(end, tmp_path):
    data = (make_checkpoint_data.DATA / "spiece.model").read_bytes()
    (tmp_path / "spiece.model").write_bytes(data[:end])
    with pytest.raises(ValueError, match=r"spiece\.model is cut short or damaged"):
        spiece.read(tmp_path / "spiece.model")


# --- msgpack -----------------------------------------------------------------------------------


def array(shape: bytes, dtype: bytes = b"float32", count: int = 4) -> bytes:
    """An array of flax, under the name "a": shape, dtype and bytes as it says them."""
    text = bytes([0xA0 + len(dtype)]) + dtype
    inner = b"\x93" + shape + text + b"\xc4" + bytes([count]) + bytes(count)
    return b"\x81\xa1a\xc7" + bytes([len(inner), 1]) + inner


MSGPACK = [
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
    (b"\x81\xa1x\xdd\0\x2d\xc6\xc0" + b"\x80" * 3_000_000, "more than 1,048,576 values"),
    ((b"\x81\xd9\xff" + b"x" * 255) * 5 + array(b"\x90")[3:], "has too long a name"),
    (array(b"\x92\x02\x03"), "another number of bytes"),
    (array(b"\x92\xfe\xfe", count=16), "impossible shape"),
    (array(b"\x99" + b"\1" * 9), "impossible shape"),
    (array(b"\xa22\x32", count=16), "impossible shape"),
    (array(b"\x92\2\2", b"object", 16), "an array of 'object'"),
    (array(b"\x92\2\2", b"<U4", 16), "an array of '<U4'"),
]


@pytest.mark.parametrize(("content", "message"), MSGPACK, ids=[m for _, m in MSGPACK])
def test_msgpack(content, message, tmp_path):
    file = tmp_path / "x.msgpack"
    file.write_bytes(array(b"\x91\1"))
    assert list(msgpack_files.find(file)) == ["a"]
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.msgpack.*{message}"):
        msgpack_files.find(file)


# --- T5X ---------------------------------------------------------------------------------------

V1_1 = t5_variants.VARIANTS["v1_1"]
QUERY = "target.encoder.layers_0.attention.query.kernel"


@pytest.fixture(scope="module")
def t5x(tmp_path_factory):
    """What a checkpoint of T5X holds."""
    made = tmp_path_factory.mktemp("t5x") / "run" / "checkpoint_7"
    return formats.write_t5x(made, t5_variants.tensors(V1_1))


def gin(text):
    return lambda made: (made.parent / "config.gin").write_text(text)


def zarr(content=None, chunk="0.0", **metadata):
    """Change the metadata of an array, and the bytes of a chunk."""

    def edit(made):
        edit_json(made / QUERY / ".zarray", **metadata)
        if content is not None:
            (made / QUERY / chunk).write_bytes(content)

    return edit


def encoder(edit):
    """Change the encoder's tree in `checkpoint`."""

    def edited(made):
        tree = serialization.msgpack_restore((made / "checkpoint").read_bytes())
        edit(tree["optimizer"]["target"]["encoder"])
        (made / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))

    return edited


def scanned(layers):
    """Arrays of two layers, and one of `layers`."""
    arrays = {"wo": {"kernel": np.ones((24, 2, 16))}, "wi_0": {"kernel": np.ones((16, layers, 24))}}
    return {"encoder": {"mlp": arrays}}


def checkpoint(content):
    return lambda made: (made / "checkpoint").write_bytes(content)


def metadata(text):
    return lambda made: (made / QUERY / ".zarray").write_text(text)


BLOSC = {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}}
MANY = {"shape": [1 << 10, 1 << 10], "chunks": [1, 1], "fill_value": 0.0}
LARGE = gzip.compress(bytes(16_000_000))
LARGER = rf"{QUERY}: a chunk has 16,000,000 bytes"
LARGE_BLOSC = b"\2\1\2\4" + (16_000_000).to_bytes(4, "little") + bytes(24)
T5X = {  # what is called "no …" is a file that is missing
    "no folder": (
        lambda made: (made / QUERY).rename(made / "elsewhere"),
        rf"{QUERY} is missing, but .*checkpoint lists",
    ),
    "no T5X's": (checkpoint(b'model_checkpoint_path: "model.ckpt-1"\n'), r"has no config\.json"),
    "another tree": (
        checkpoint(serialization.to_bytes({"step": np.ones(3)})),
        r"checkpoint has no 'optimizer/target'",
    ),
    "moe": (encoder(lambda tree: tree.update(moe={"x": np.ones(2)})), "'encoder/moe/x' is no para"),
    "layers twice": (
        encoder(lambda tree: tree.update(scanned(2))),
        r"holds 'encoder/layers_0/mlp/.*/kernel' a second time",
    ),
    "a layer more": (
        encoder(lambda tree: (tree.clear(), tree.update(scanned(3)))),
        r"/mlp/w.*/kernel' has shape .*: axis 1 should have the layers, at most 1000 and as many",
    ),
    # tensorstore would read a chunk that is missing as zeros.
    "a missing chunk": (lambda made: (made / QUERY / "1.0").unlink(), rf"{QUERY} is damaged"),
    "a short chunk": (zarr(b"\x1f\x8b\x08", "1.0"), rf"{QUERY} is damaged"),
    "another chunk": (zarr(b"other", "1.0"), rf"{QUERY} is damaged"),
    **{
        f"metadata {text}": (metadata(text), rf"{QUERY} cannot be read")
        for text in ("", "{", '{"zarr_format": 2}')
    },
    "a large chunk": (zarr(LARGE, chunks=[2_000, 2_000]), LARGER),
    "many chunks": (zarr(**MANY), rf"{QUERY} is cut into 1,048,576 chunks"),
    # Chunks of blosc say themselves how much they hold, and as much would be allocated.
    "blosc": (zarr(LARGE_BLOSC, chunks=[16, 16], **BLOSC), LARGER),
    "silu": (
        gin("network.T5Config.mlp_activations = ('silu', 'linear')"),
        r"mlp_activations = \('silu', 'linear'\) is not among",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", T5X)
def test_t5x(case, t5x, tmp_path):
    shutil.copytree(t5x.parent, tmp_path / "run")
    made = tmp_path / "run" / t5x.name
    change, message = T5X[case]
    change(made)
    with pytest.raises(FileNotFoundError if case.startswith("no ") else ValueError, match=message):
        load(made)


def test_a_gin_file_of_spaces(t5x, tmp_path):
    """Runs of spaces cost linear time."""
    made = shutil.copytree(t5x.parent, tmp_path / "run") / t5x.name
    gin(f"a =b{' ' * 20_000}c\n{' ' * 20_000}\nmlp_activations{' ' * 20_000}")(made)
    assert load(made).config.d_model == 16


# --- GGUF --------------------------------------------------------------------------------------


HUGE = 1 << 60
HEADERS = {
    "empty": (b"", "ends too early"),
    "magic": (b"FUGG" + header()[4:], "does not begin with GGUF"),
    "version 0": (header(version=0), "does not begin with GGUF and a version"),
    "many fields": (header(counts=(0, HUGE)), "ends too early"),
    "many tensors": (header(counts=(HUGE, 0)), "ends too early"),
    "a long key": (header(length(HUGE) + b"x"), "ends too early"),
    "a long text": (header(entry(8, length(HUGE))), "ends too early"),
    "many texts": (header(entry(9, b"\x08\0\0\0" + length(HUGE))), "ends too early"),
    "many numbers": (header(entry(9, b"\x06\0\0\0" + length(HUGE))), "ends too early"),
    "arrays of arrays": (header(entry(9, b"\x09\0\0\0" + length(1))), "the unknown type 9"),
    "an unknown type": (header(entry(13, bytes(8))), "the unknown type 13"),
    "a key twice": (header(entry(0, b"1"), entry(0, b"1")), "'x' is there twice"),
    "no UTF-8": (header(entry(0, b"1", key=b"\xff")), "utf-8"),
    "a text that is no UTF-8": (header(entry(8, length(1) + b"\xff")), "utf-8"),
    "a tensor twice": (header(tensors=(info([1]), info([1]))), "'t' is there twice"),
    "no axes": (header(tensors=(info([]),)), "'t' has 0 axes"),
    "many axes": (header(tensors=(info([1], axes=1 << 31),)), "axes"),
    "no numbers": (header(tensors=(info([0]),)), "impossible shape"),
    "a huge shape": (header(tensors=(info([HUGE, HUGE]),)), "missing or cut short"),
    "part of a block": (header(tensors=(info([33], kind=2),)), "impossible shape"),
    "a far place": (header(tensors=(info([1], offset=HUGE),)) + bytes(99), "missing or cut short"),
    "one place": (header(tensors=(info([8]), info([8], name=b"u"))) + bytes(99), "overlap"),
    "a name of bytes": (header(tensors=(info([1], name=b"\xff"),)) + bytes(99), "utf-8"),
    "an alignment of 3": (header(entry(4, b"\3\0\0\0", b"general.alignment")), "no power of two"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(case, tmp_path):
    data, message = HEADERS[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"x\.gguf is cut short or damaged \(.*{message}"):
            load(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- npz ---------------------------------------------------------------------------------------


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
