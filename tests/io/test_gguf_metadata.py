"""Metadata of GGUF files: what is followed, what changes nothing, and what is refused by an error
of one line that names the file."""

import math

import gguf
import numpy as np
import pytest

import gguf_variants as variants
from gguf_variants import entry, header, length
from specjax.checkpoints import load, outline
from specjax.checkpoints.formats import gguf_files
from specjax.models.llama import Rope


@pytest.fixture
def file(tmp_path):
    """A Llama."""
    return variants.write_model(tmp_path / "x.gguf")


def rewritten(file, path, *, fields=None, arrays=None, drop=(), architecture="llama"):
    """A copy of a file with other metadata, or with other tensors."""
    reader, given = gguf.GGUFReader(file), fields or {}
    writer = gguf.GGUFWriter(path, architecture)
    left_out = (*given, *drop, "general.architecture")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in left_out:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    kinds = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
    kinds |= {float: writer.add_float32}
    for name, value in given.items():
        whole = writer.add_int32 if value in (-2, -7) else writer.add_uint32
        kinds.get(type(value), whole)(name, value)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            array = (arrays or {}).get(tensor.name, tensor.data)
            writer.add_tensor(tensor.name, np.array(array))
    variants.finish(writer)
    return path


def refused(file, message):
    with pytest.raises(ValueError, match=message) as error:
        load(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A file that is not changed."""
    return variants.write_model(tmp_path_factory.mktemp("llama") / "x.gguf")


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
}  # fmt: skip
TENSORS = [
    ("output_norm.weight", np.ones(5, np.float32), "shape"),
    ("blk.0.attn_q.weight", np.ones((5, 5), np.float32), "impossible shape"),
    ("blk.1.ffn_up.weight", np.ones((5, 5), np.float32), "shape"),
    ("rope_freqs.weight", np.ones(5, np.float32), "shape"),
    ("rope_freqs.weight", np.full(8, 3, np.float32), "not as Llama 3 has it"),
    ("output_norm.weight", np.ones(64, np.int32), "stored as int32"),
]
CHANGES = {
    **{case: ({"fields": fields}, message) for case, (fields, message) in METADATA.items()},
    **{
        f"no {name}": ({"drop": [f"llama.{name}"]}, f"no 'llama.{name}'")
        for name in ("embedding_length", "block_count", "attention.head_count")
    },
    **{
        name: ({"architecture": name}, f"'{name}' is not supported; supported are 'llama'")
        for name in ("t5encoder", "falcon", "llama4")
    },
    **{
        f"{name} {array.dtype}{array.shape}": ({"arrays": {name: array}}, message)
        for name, array, message in TENSORS
    },
    "no tensor": ({"drop": ["blk.1.attn_v.weight"]}, "v_proj.weight' missing .* Convert the model"),
    "longrope": (
        {"fields": {"llama.rope.scaling.type": "longrope"}, "drop": ["rope_freqs.weight"]},
        "rope.scaling.type='longrope' is not supported",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_files_are_checked(case, llama, tmp_path):
    options, message = CHANGES[case]
    refused(rewritten(llama, tmp_path / "changed.gguf", **options), message)


WRONG = (-7, "x", float("nan"), [1, 2])


def test_metadata_of_any_kind(tmp_path):
    """A wrong value gives a ValueError of one line that names the file, or changes nothing."""
    file, changed = tmp_path / "x.gguf", tmp_path / "changed.gguf"
    variants.with_vocabulary(file, "sentencepiece")
    names = [n for n in gguf.GGUFReader(file).fields if not n.startswith(("GGUF.", "general."))]
    names += ["split.count", "llama.expert_count", "llama.rope.scaling.type"]
    names += ["llama.attention.sliding_window", "tokenizer.ggml.merges"]
    refused = 0
    for name in names:
        for value in WRONG:
            try:
                outline(rewritten(file, changed, fields={name: value}))
            except ValueError as error:
                refused += 1
                assert str(changed) in str(error), (name, value)  # noqa: PT017
                assert "\n" not in str(error), (name, value)  # noqa: PT017
    assert refused > len(names)


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
def test_scalings_of_positions(case, unscaled, tmp_path):
    fields, rope = ROPES[case]
    fields = {f"llama.rope.{k}": v for k, v in fields.items()}
    assert outline(rewritten(unscaled, tmp_path / "y.gguf", fields=fields)).config.rope == rope


def test_neutral_metadata(unscaled, tmp_path):
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
    fields = {f"llama.{k}": v for k, v in fields.items()}
    assert outline(rewritten(unscaled, tmp_path / "y.gguf", fields=fields)).config == size


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
        variants.write_model(tmp_path / "x.gguf", "gemma3"),
        tmp_path / "changed.gguf",
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


OTHER_FILES = {  # whole files, of which a copy is no better
    "version 1": (header(version=1), "older than GGUF 2. Convert the model"),
    "ggjt": (b"tjgg" + bytes([3]) * 99, "older than GGUF 2. Convert the model"),
    "version 4": (header(version=4), "version 4 of GGUF, which is newer .* Update specjax"),
    "big-endian": (header(version=3 << 24), "byte order of big-endian .*gguf-convert-endian"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1", "pointer to one: run `git lfs"),
    "an adapter": (variants.some_file("llama", "adapter"), r"holds an adapter \(LoRA\)"),
    "a projector": (variants.some_file("clip", None), "holds a projector of images"),
    "a matrix": (variants.some_file(None, "imatrix"), "holds a matrix for quantisation"),
    "a vocabulary": (
        header(entry(0, b"1", key=b"tokenizer.ggml.tokens")),
        "holds a vocabulary alone. Give the file of a whole model",
    ),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_whole_files_that_hold_no_model(case, tmp_path):
    data, message = OTHER_FILES[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    refused(file, rf"^((?!again).)*{message}((?!again).)*$")


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
    file.write_bytes(header())
    refused(file, "holds no tensors")
