"""GGUF files give the parameters that safetensors give, or an error of one line that names the
file. `tests/torch/test_gguf_torch.py` compares logits and ids with transformers' own reading."""

import logging
import math
import sys
import tracemalloc

import gguf
import jax
import numpy as np
import pytest

import gguf_variants as variants
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
from specjax.models.llama import Rope

KINDS = [kind.name for kind in gguf.GGMLQuantizationType]
DECODED = [kind for kind in KINDS if gguf_files._is_decoded(kind)]


def written(path, model="llama", **options):
    """A file of one of the families, and its variant and arrays."""
    module, variant = variants.MODELS[model]
    return variants.write(path, variant, module.tensors(variant), **options)


@pytest.fixture
def file(tmp_path):
    """A Llama."""
    return written(tmp_path / "x.gguf")


def assert_same(a, b):
    assert a.config == b.config
    assert a.eos_ids == b.eos_ids
    jax.tree.map(np.testing.assert_array_equal, a.model, b.model)


@pytest.mark.parametrize("model", variants.MODELS)
def test_each_family_has_the_parameters_of_safetensors(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 64)  # several pieces to a tensor
    module, variant = variants.MODELS[model]
    plain = load(module.write(tmp_path / "plain", variant))
    assert_same(load(written(tmp_path / "x.gguf", model)), plain)


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
    found = gguf_models.read(written(tmp_path / "x.gguf", model, kind=kind))[1]
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
    path = written(tmp_path / "x.gguf", kind=kind)
    found = load(path)
    asked = {"weights": "int8"} if held == "int8" else {"dtype": held}
    assert_same(found, load(path, **asked))
    assert found.precision.startswith(f"{held}, as ")
    assert outline(path).precision == found.precision
    lines = [f"{path} is held in {found.precision}."] if held != "float32" else []
    assert caplog.messages == lines
    assert load(path, dtype="float32").precision == ""


def test_outline_and_description(file):
    assert outline(file).config == described(file).config == load(file).config
    assert outline(file).name == str(file)


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


WRONG = (-7, "x", float("nan"), [1, 2])


def test_metadata_of_any_kind(tmp_path):
    """A wrong value gives a ValueError of one line that names the file, or changes nothing."""
    file = variants.with_vocabulary(tmp_path / "x.gguf", "sentencepiece")
    names = [n for n in gguf.GGUFReader(file).fields if not n.startswith(("GGUF.", "general."))]
    names += ["split.count", "llama.expert_count", "llama.rope.scaling.type"]
    names += ["llama.attention.sliding_window", "tokenizer.ggml.merges"]
    refused = 0
    for name in names:
        for value in WRONG:
            changed = rewritten(file, fields={name: value})
            try:
                outline(changed)
            except ValueError as error:
                refused += 1
                assert str(changed) in str(error), (name, value)  # noqa: PT017
                assert "\n" not in str(error), (name, value)  # noqa: PT017
    assert refused > len(names)


# --- names ---------------------------------------------------------------------------------------


def test_a_directory(file, tmp_path):
    """One file is the model; of several, one has to be named."""
    assert_same(load(tmp_path), load(file))
    (tmp_path / "mmproj-x.gguf").write_bytes(some_file("clip", "mmproj"))
    (tmp_path / "imatrix.GGUF").write_bytes(some_file(None, "imatrix"))
    assert gguf_files.only(tmp_path) == file
    (tmp_path / "adapter.gguf").write_bytes(some_file("llama", "adapter"))
    with pytest.raises(ValueError, match=r"several models: .*adapter\.gguf, x\.gguf\."):
        load(tmp_path)


@pytest.mark.parametrize("name", ["x.GGUF", "sha256-0f"])
def test_names_of_other_writers(name, file):
    moved = file.rename(file.with_name(name))
    assert outline(moved).config == described(moved).config
    assert list(fingerprint(moved)) == [name]


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


# --- what is refused -----------------------------------------------------------------------------


def rewritten(file, *, fields=None, change=None, drop=(), architecture="llama"):
    """A copy of a file with other metadata, or with other tensors."""
    reader = gguf.GGUFReader(file)
    path = file.with_name("changed.gguf")
    writer = gguf.GGUFWriter(path, architecture)
    given = fields or {}
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")) or field.name in drop:
            continue
        if field.name not in given:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for name, value in given.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value < 0:
            writer.add_int32(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            array = np.array(tensor.data)
            name, array = (change or (lambda name, array: (name, array)))(tensor.name, array)
            writer.add_tensor(name, array)
    variants.finish(writer)
    return path


METADATA = {
    "a tokenizer of too few": ({"tokenizer.ggml.tokens": ["a", "b"]}, "not as many as the rows"),
    "no tokens": ({"tokenizer.ggml.tokens": 3}, "not as many as the rows"),
    "no size": ({"llama.embedding_length": "x"}, "hidden_size='x' should be an integer"),
    "many layers": ({"llama.block_count": 4_000_000_000}, "num_hidden_layers=4000000000 should be"),
    "more layers": ({"llama.block_count": 7}, "layers beyond the 2 .* Convert the model"),
    "heads by layer": ({"llama.attention.head_count": [4, 2]}, r"num_attention_heads=\[4, 2\]"),
    "other layers": ({"llama.attention.head_count": [4]}, r"num_attention_heads=\[4\]"),
    "other heads": ({"llama.attention.head_count": 3}, "impossible shape .* Convert the"),
    "part of a head": ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count=8 is not supp"),
    "experts": ({"llama.expert_count": 8}, r"expert_count=8 is not supported"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, None),
    "an id": ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id='x' should be"),
    "a large id": ({"tokenizer.ggml.eot_token_id": 2**31}, "ggml.eot_token_id=2147483648 sho"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps=nan"),
    "a large epsilon": ({"llama.attention.layer_norm_rms_epsilon": 1e18}, "rms_norm_eps=1e[+]18"),
    "a factor of true": ({"llama.rope.scaling.factor": True},
        "scaling.factor=True should be a fin"),
    "two scalings": ({"llama.rope.scaling.factor": 2.0}, "factor=2.0 and rope_freqs.weight"),
    "dynamic": ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type='dynamic' is not supp"),
    "a logarithm": ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1 is"),
    "a scale": ({"llama.attention.scale": 0.5}, r"attention.scale=0.5 is not supported, only 0 or"),
    "scaled logits": ({"llama.logit_scale": 2.0}, "logit_scale=2.0 is not supported, only 0 or 1"),
    "caps": ({"llama.final_logit_softcapping": 30.0}, "logit_softcapping=30.0 is not supported"),
    "long values": ({"llama.attention.value_length": 8},
        "value_length=8 is not supported, only 16"),
    "bases": ({"llama.rope.freq_base_per_layer": [1.0, 2.0]},
        r"base_per_layer=\[1.0, 2.0\] is not"),
    "an alignment": ({"general.alignment": 3}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_metadata_is_checked(case, file):
    fields, message = METADATA[case]
    if case == "an alignment":
        data = file.read_bytes()
        added = b"\x11" + bytes(7) + b"general.alignment" + b"\4\0\0\0\3\0\0\0"
        count = int.from_bytes(data[16:24], "little") + 1
        changed = file.with_name("changed.gguf")
        changed.write_bytes(data[:16] + count.to_bytes(8, "little") + added + data[24:])
        message = "general.alignment=3 is no power of two"
    elif case == "longrope":
        changed, message = rewritten(file, fields=fields, drop=["rope_freqs.weight"]), "'longrope'"
    else:
        changed = rewritten(file, fields=fields)
    refused(changed, message)


PLAIN_ROPE = Rope("default", 10_000.0)
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
ROPES = {  # metadata of `rope.`, and the rotation that llama.cpp makes of it
    "a factor alone": ({"scaling.factor": 4.0}, Rope("linear", factor=4.0)),
    "the factor's first name": ({"scale_linear": 4.0}, Rope("linear", factor=4.0)),
    "both names": ({"scale_linear": 2.0, "scaling.factor": 4.0}, Rope("linear", factor=4.0)),
    "linear without a factor": ({"scaling.type": "linear"}, PLAIN_ROPE),
    "a factor of 0": ({"scaling.factor": 0.0}, PLAIN_ROPE),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, PLAIN_ROPE),
    "yarn": ({f"scaling.{key}": value for key, value in YARN_KEYS.items()},
        Rope("yarn", factor=4.0, original_length=16, attention_factor=1 + 0.1 * math.log(4))),
    "yarn's attention": (
        {f"scaling.{k}": v for k, v in {**YARN_KEYS, "yarn_attn_factor": 2.0}.items()},
        Rope("yarn", factor=4.0, original_length=16, attention_factor=2.0)),
}  # fmt: skip


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory):
    """A Llama whose positions are not scaled."""
    module, variant = variants.MODELS["llama"]
    variant = variants.changed(variant, rope_scaling=None, rope_theta=10_000.0)
    path = tmp_path_factory.mktemp("unscaled") / "x.gguf"
    return variants.write(path, variant, module.tensors(variant))


@pytest.mark.parametrize("case", ROPES)
def test_scalings_of_positions(case, unscaled):
    fields, rope = ROPES[case]
    changed = rewritten(unscaled, fields={f"llama.rope.{k}": v for k, v in fields.items()})
    assert outline(changed).config.rope == rope


def test_neutral_metadata(unscaled):
    """What changes nothing is no reason to refuse a file, nor are equal numbers for each layer."""
    size = outline(unscaled).config
    fields = {
        "attention.head_count_kv": [size.num_key_value_heads] * 2,
        "feed_forward_length": [size.intermediate_size] * 2,
        "attention.scale": size.head_dim**-0.5,
        "attention.clamp_kqv": 0.0,
        "logit_scale": 1.0,
        "rope.scaling.finetuned": 1,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    changed = rewritten(unscaled, fields={f"llama.{k}": v for k, v in fields.items()})
    assert outline(changed).config == size


EPSILON, BASE = "attention.layer_norm_rms_epsilon", "rope.freq_base"
# Other metadata, what is left out, θ and the factor of full layers, and θ of the others.
GEMMA3_KEYS = {
    "ollama's": ({"rope.global.freq_base": 5e5, "rope.local.freq_base": 2e4}, [BASE], 5e5, 1, 2e4),
    "no bases": ({}, [BASE, EPSILON], 1e6, 1, 1e4),
    "ollama's of the 4B": ({"context_length": 131072}, [BASE, EPSILON], 1e6, 8, 1e4),
    "a cap of 0": ({"final_logit_softcapping": 0.0}, [BASE], 1e6, 1, 1e4),
    "pattern": ({"attention.sliding_window_pattern": -2}, [], "pattern=-2 should be an int", 0, 0),
    "floats": ({"attention.sliding_window_pattern": [0.5] * 7}, [], r"0.5\] should be", 0, 0),
    "no pattern": ({"attention.sliding_window_pattern": [True]}, [], r"\[True\] should be", 0, 0),
}


@pytest.mark.parametrize("case", GEMMA3_KEYS)
def test_metadata_of_gemma3(case, tmp_path):
    fields, left_out, theta, factor, local = GEMMA3_KEYS[case]
    changed = rewritten(
        written(tmp_path / "x.gguf", "gemma3"),
        fields={f"gemma3.{key}": value for key, value in fields.items()},
        drop=[f"gemma3.{key}" for key in (*left_out, "rope.scaling.type", "rope.scaling.factor")],
        architecture="gemma3",
    )
    if isinstance(theta, str):
        refused(changed, theta)
        return
    found = outline(changed).config
    assert (found.rope.theta, found.rope.factor) == (theta, factor)
    assert (found.local_rope.theta, found.rms_norm_eps) == (local, 1e-6)
    assert found.final_logit_softcapping == 0


def refused(file, message):
    with pytest.raises(ValueError, match=message) as error:
        load(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("name", ["embedding_length", "block_count", "attention.head_count"])
def test_missing_metadata(name, file):
    refused(rewritten(file, drop=[f"llama.{name}"]), f"no 'llama.{name}'")


@pytest.mark.parametrize("name", ["t5encoder", "falcon", "llama4"])
def test_architectures(name, file):
    refused(rewritten(file, architecture=name), f"'{name}' is not supported; supported are 'llama'")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("output_norm.weight", np.ones(5, np.float32), "shape"),
        ("blk.0.attn_q.weight", np.ones((5, 5), np.float32), "impossible shape"),
        ("blk.1.ffn_up.weight", np.ones((5, 5), np.float32), "shape"),
        ("rope_freqs.weight", np.ones(5, np.float32), "shape"),
        ("rope_freqs.weight", np.full(8, 3, np.float32), "not as Llama 3 has it"),
        ("output_norm.weight", np.ones(64, np.int32), "stored as int32"),
    ],
)
def test_tensors_are_checked(name, array, message, file):
    def change(found, stored):
        return found, array if found == name else stored

    refused(rewritten(file, change=change), message)


def test_a_missing_tensor(file):
    refused(
        rewritten(file, drop=["blk.1.attn_v.weight"]), "v_proj.weight' missing .* Convert the model"
    )


def test_a_type_that_is_not_decoded(file):
    """It is an error only where the model needs the tensor."""
    data, name = file.read_bytes(), b"blk.1.ffn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    for kind, shown in ((15, "Q8_K"), (99, "99")):
        file.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
        refused(file, f"{name.decode()}' is stored as {shown}, which is not read")


def test_a_surplus_tensor(tmp_path):
    """It is left out with a warning, of whatever type it is."""
    module, variant = variants.MODELS["llama"]
    arrays = module.tensors(variant) | {"other.weight": np.ones(3, np.float32)}
    file = variants.write(tmp_path / "x.gguf", variant, arrays)
    data, at = file.read_bytes(), file.read_bytes().index(b"other.weight") + 12 + 4 + 8
    file.write_bytes(data[:at] + b"\x63" + data[at + 1 :])
    with pytest.warns(UserWarning, match=r"x\.gguf: 'other\.weight' in the weights belong"):
        outline(file)


def length(count):
    return count.to_bytes(8, "little")


def entry(kind, value, key=b"x"):
    return length(len(key)) + key + kind.to_bytes(4, "little") + value


def header(*fields, tensors=(), version=3, counts=None):
    count = counts or (len(tensors), len(fields))
    start = b"GGUF" + version.to_bytes(4, "little") + length(count[0]) + length(count[1])
    return start + b"".join(fields) + b"".join(tensors)


def info(shape, kind=0, offset=0, name=b"t", axes=None):
    axes = len(shape) if axes is None else axes
    return (
        length(len(name)) + name + axes.to_bytes(4, "little")
        + b"".join(map(length, shape)) + kind.to_bytes(4, "little") + length(offset)
    )  # fmt: skip


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


OTHER_FILES = {  # whole files, of which a copy is no better
    "version 1": (header(version=1), "older than GGUF 2. Convert the model"),
    "ggjt": (b"tjgg" + bytes([3]) * 99, "older than GGUF 2. Convert the model"),
    "version 4": (header(version=4), "version 4 of GGUF, which is newer .* Update specjax"),
    "big-endian": (header(version=3 << 24), "byte order of big-endian .*gguf-convert-endian"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1", "pointer to one: run `git lfs"),
    "an adapter": (("llama", "adapter"), r"holds an adapter \(LoRA\)"),
    "a projector": (("clip", None), "holds a projector of images"),
    "a matrix": ((None, "imatrix"), "holds a matrix for quantisation"),
}


def some_file(architecture, kind):
    """A file with one tensor."""
    named = {"architecture": architecture, "type": kind}
    fields = [
        entry(8, length(len(value)) + value.encode(), key=f"general.{key}".encode())
        for key, value in named.items()
        if value
    ]
    data = header(*fields, tensors=(info([8]),))
    return data + bytes(-len(data) % 32 + 32)


@pytest.mark.parametrize("case", OTHER_FILES)
def test_whole_files_that_hold_no_model(case, tmp_path):
    data, message = OTHER_FILES[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(data if isinstance(data, bytes) else some_file(*data))
    refused(file, message)
    with pytest.raises(ValueError, match=r"^((?!again).)*$"):
        load(file)


def test_a_vocabulary_alone(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(header(entry(0, b"1", key=b"tokenizer.ggml.tokens")))
    refused(file, "holds a vocabulary alone. Give the file of a whole model")


@pytest.mark.parametrize("behind", [32, 100])
def test_numbers_that_belong_to_no_tensor(behind, file):
    """They are those of a tensor that a count in the header leaves out."""
    data = file.read_bytes()
    file.write_bytes(data + bytes(behind))
    refused(file, f"{behind} bytes belong to no tensor")
    count = int.from_bytes(data[8:16], "little")
    file.write_bytes(data[:8] + length(count - 1) + data[16:])
    refused(file, "bytes belong to no tensor")
    file.write_bytes(data + bytes(31))
    assert gguf_files.read(file)


def test_a_long_value(tmp_path, monkeypatch):
    """A header is held in memory, and one value must not fill it, however large the file."""
    monkeypatch.setattr(gguf_files, "MAX_VALUE", 100)
    file = tmp_path / "x.gguf"
    file.write_bytes(header(entry(8, length(101) + bytes(101))))
    refused(file, "a value of 101 bytes")


def test_no_tensors(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(header())
    refused(file, "holds no tensors")


def test_a_directory_with_such_a_name(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"x\.gguf has no config\.json"):
        load(tmp_path / "x.gguf")
