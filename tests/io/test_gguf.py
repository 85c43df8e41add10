"""GGUF files give the parameters that safetensors give, or an error of one line that names the
file. `tests/torch/test_gguf_torch.py` compares logits and ids with transformers' own reading."""

import logging
import sys

import gguf
import numpy as np
import pytest

import gguf_variants as variants
from checkpoint_edits import assert_same
from specjax import devices
from specjax.checkpoints import (
    FAMILIES,
    convert,
    described,
    fingerprint,
    load,
    outline,
    precision,
    tensors,
)
from specjax.checkpoints.formats import gguf_files, gguf_models
from specjax.checkpoints.tensors import Turned, read_into

KINDS = [kind.name for kind in gguf.GGMLQuantizationType]
DECODED = [kind for kind in KINDS if gguf_files._is_decoded(kind)]


@pytest.fixture
def file(tmp_path):
    """A Llama."""
    return variants.write_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("model", variants.MODELS)
def test_each_family_has_the_parameters_of_safetensors(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 64)  # several pieces to a tensor
    module, variant = variants.MODELS[model]
    plain = load(module.write(tmp_path / "plain", variant))
    assert_same(load(variants.write_model(tmp_path / "x.gguf", model)), plain)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("llama", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")),
        ("gpt2", "Q8_0"),
        ("t5 v1.1", "Q4_1"),
    ],
)
def test_quantised_models(model, kind, tmp_path, monkeypatch):
    """The parameters of a model whose matrices were rounded before."""
    monkeypatch.setattr(tensors, "CHUNK", 512)
    module, variant = variants.MODELS[model]
    arrays, chosen = module.tensors(variant), gguf.GGMLQuantizationType[kind]
    rounded = {}
    for name, array in arrays.items():
        turned = name.endswith(FAMILIES["gpt2"].turned)
        stored = array.T if turned else array
        if stored.ndim == 2 and stored.shape[1] % gguf.GGML_QUANT_SIZES[chosen][0] == 0:
            stored = np.ascontiguousarray(stored)
            stored = gguf.dequantize(gguf.quantize(stored, chosen), chosen)
        rounded[name] = stored.T if turned else stored
    assert any((rounded[name] != arrays[name]).any() for name in arrays)
    exact = variants.write(tmp_path / "exact.gguf", variant, rounded)
    found = variants.write(tmp_path / "x.gguf", variant, arrays, kind=kind)
    assert_same(load(found), load(exact))
    if kind == "Q4_1":
        assert_same(load(found, weights="int8"), load(exact, weights="int8"))


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize("head", [0, 4])
def test_every_type_of_numbers(kind, head, tmp_path, monkeypatch):
    """Random blocks in small pieces, and a part of them, as the package decodes the whole."""
    monkeypatch.setattr(tensors, "CHUNK", 4096)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, row = 24, 2 * block if block > 1 else 96
    data = np.random.default_rng(0).integers(0, 256, (rows, row // block * size), np.uint8)
    (tmp_path / "x").write_bytes(b"12345" + data.tobytes())
    dtype = tensors.DTYPES[gguf_files.PLAIN.get(kind, "float32")]
    tensor = gguf_files.GGUFTensor(tmp_path / "x", dtype, (rows, row), 5, kind, head)
    if kind in gguf_files.PLAIN:
        whole = data.view(dtype).reshape(rows, row)
    else:
        with np.errstate(all="ignore"):
            whole = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    if head:
        whole = whole.reshape(-1, head // 2, 2, row).swapaxes(1, 2).reshape(rows, row)
    out = np.zeros((rows, row), dtype)
    read_into(tensor, out)
    assert out.tobytes() == whole.tobytes()
    with np.errstate(invalid="ignore"):
        assert len(np.unique(whole[np.isfinite(whole)])) > 5
    part = (slice(5, 18), slice(3, row - 7))
    for shape, found in (((13, row - 10), tensor), ((row - 10, 13), Turned.of(tensor))):
        some = np.zeros(shape, dtype)
        read_into(found, some, part if found is tensor else part[::-1])
        assert some.tobytes() == (whole[part] if found is tensor else whole[part].T).tobytes()


def test_all_types_that_the_package_decodes():
    known = {kind.name for kind in gguf.quants._type_traits}
    assert known | set(gguf_files.PLAIN) == set(DECODED) | (known & {"F32", "F16"})
    assert "Q4_K" in DECODED and "IQ2_XS" in DECODED and "Q8_K" not in DECODED  # noqa: PT018


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5 v1.1"])
@pytest.mark.parametrize(
    ("kind", "expected"), [("F32", "float32"), ("Q4_0", "bfloat16"), ("F16", "bfloat16")]
)
def test_the_dtype_on_an_accelerator(model, kind, expected, tmp_path):
    """bfloat16 unless all numbers are float32: norms are in any file."""
    found = gguf_models.read(variants.write_model(tmp_path / "x.gguf", model, kind=kind))[1]
    assert precision.fastest(found, "gpu").dtype.name == expected


@pytest.mark.parametrize(
    ("kind", "large", "units", "held"),
    [
        ("Q4_0", 1, ("int8",), "int8"),
        ("Q8_0", 1, ("int8", "bfloat16"), "int8"),
        ("Q4_0", 1, ("bfloat16",), "float32"),
        ("Q4_0", 1 << 20, ("int8",), "float32"),
        ("BF16", 1, ("int8", "bfloat16"), "bfloat16"),
        ("BF16", 1, ("int8",), "float32"),
        ("F16", 1, ("int8", "bfloat16"), "float32"),
        ("F32", 1, ("int8", "bfloat16"), "float32"),
    ],
)
def test_the_dtype_on_a_cpu(kind, large, units, held, tmp_path, monkeypatch, caplog):
    """What large matrices are multiplied fastest in, if they are stored so; and it is logged."""
    monkeypatch.setattr(devices, "LARGE", {"int8": large, "bfloat16": large})
    monkeypatch.setattr(devices, "DEEP", 1)
    monkeypatch.setattr(devices, "cpu_multiplies", lambda dtype: dtype in units)
    caplog.set_level(logging.INFO, "specjax")
    path = variants.write_model(tmp_path / "x.gguf", kind=kind)
    found = load(path)
    asked = {"weights": "int8"} if held == "int8" else {"dtype": held}
    assert_same(found, load(path, **asked))
    assert found.precision.startswith(f"{held}, as ")
    assert outline(path).precision == found.precision
    lines = [f"{path} is held in {found.precision}."] if held != "float32" else []
    assert caplog.messages == lines
    assert load(path, dtype="float32").precision == ""


def test_converted(tmp_path):
    """The same parameters, tokenizer and template from safetensors."""
    file = variants.with_vocabulary(tmp_path / "x.gguf", "bpe of gpt2")
    convert(file, tmp_path / "converted")
    ours, theirs = load(file), load(tmp_path / "converted")
    assert_same(theirs, ours)
    for text in variants.TEXTS:
        assert theirs.tokenizer(text)["input_ids"] == ours.tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": "the"}]
    shown = theirs.tokenizer.apply_chat_template(chat, tokenize=False)
    assert shown == "<|im_start|>the<|im_end|>"


# --- names ---------------------------------------------------------------------------------------


def test_a_directory(file, tmp_path):
    """One file is the model; of several, one has to be named."""
    assert_same(load(tmp_path), load(file))
    (tmp_path / "mmproj-x.gguf").write_bytes(variants.some_file("clip", "mmproj"))
    (tmp_path / "imatrix.GGUF").write_bytes(variants.some_file(None, "imatrix"))
    assert gguf_files.only(tmp_path) == file
    (tmp_path / "adapter.gguf").write_bytes(variants.some_file("llama", "adapter"))
    with pytest.raises(ValueError, match=r"several models: .*adapter\.gguf, x\.gguf\."):
        load(tmp_path)


def test_names_of_other_writers(file):
    """As ollama's store has them; a directory is no file, whatever its name."""
    for name in ("x.GGUF", "sha256-0f"):
        file = file.rename(file.with_name(name))
        assert outline(file).config == described(file).config == load(file).config
        assert list(fingerprint(file)) == [name]
        assert outline(file).name == str(file)
    file.with_name("y.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"y\.gguf has no config\.json"):
        load(file.with_name("y.gguf"))


def test_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.gguf", "a/x.GGUF", tmp_path / "x.gguf"):
        for read in (load, described):
            with pytest.raises(FileNotFoundError, match=r"^No such file: .*x\.(gguf|GGUF)\.$"):
                read(name)


def split(file, count):
    """Rewrite a file as shards, as gguf-split does."""
    reader, names = gguf.GGUFReader(file), []
    for i in range(count):
        path = file.with_name(f"x-{i + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        variants.finish(writer)
        names.append(path)
    return names


def test_shards(file, tmp_path):
    whole = load(file)
    paths = split(file, 3)
    file.unlink()
    for name in (tmp_path, *paths):
        assert_same(load(name), whole)
    assert sorted(fingerprint(tmp_path)) == [path.name for path in paths]
    moved = paths[1].rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"x-00002-of-00003\.gguf is missing"):
        load(paths[0])
    paths[0].rename(tmp_path / "x-00001-of-00002.gguf")
    moved.rename(tmp_path / "x-00002-of-00002.gguf")
    with pytest.raises(ValueError, match=r"x-00001-of-00002\.gguf is a part of a model in 3 files"):
        load(tmp_path / "x-00001-of-00002.gguf")
    (tmp_path / "x-00002-of-00002.gguf").rename(tmp_path / "y.gguf")
    with pytest.raises(ValueError, match=r"y\.gguf is a part of a model in 3 files"):
        load(tmp_path / "y.gguf")


def test_the_fingerprint_is_of_the_file(file):
    before = fingerprint(file)
    assert list(before) == ["x.gguf"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(file) != before


def test_without_the_package(file, tmp_path, monkeypatch):
    """Only GGUF files need it."""
    module, variant = variants.MODELS["llama"]
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load(module.write(tmp_path / "plain", variant)).config.hidden_size == 64
    with pytest.raises(ValueError, match=r"pip install 'specjax\[gguf\]'"):
        load(file)
