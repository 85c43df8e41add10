"""Directories and names that are refused: what is changed in a whole checkpoint, and a part of the
error."""

import json

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest

import checkpoint_formats as formats
import gemma_variants
import gpt_variants
import llama_variants
import t5_variants
import t5gemma_variants
from checkpoint_edits import WORDS, edit_json, edit_weights, make_tokenizer
from specjax import checkpoints
from specjax.checkpoints import load, parameters, save

V1_0 = t5_variants.VARIANTS["v1_0"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path):
    """A complete checkpoint of the v1.0 variant, without a tokenizer."""
    return t5_variants.write(tmp_path / "model", V1_0)


# --- names -------------------------------------------------------------------------------------

NAMES = [
    ("./no/such/place", FileNotFoundError, "No such directory: "),
    ("a/b/c", FileNotFoundError, "No such directory: "),
    ("", FileNotFoundError, r"no config\.json"),  # the working directory
    ("x" * 5000, FileNotFoundError, r"^'x*(… cannot be read: File name|' is neither)"),
    ("google-t5/t5-smal", FileNotFoundError, r"'google-t5/t5-smal' is neither .*hf download"),
    ("model/config.json", ValueError, r"config\.json is a file; give the directory"),
    (5, ValueError, "5 must be a directory or a hub name, as text"),
    (None, ValueError, "None must be a directory or a hub name, as text"),
]


@pytest.mark.parametrize(("name", "error", "message"), NAMES, ids=lambda value: str(value)[:20])
def test_names(name, error, message, directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    with pytest.raises(error, match=message):
        load(name)


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


def test_a_repository_of_gguf(monkeypatch):
    files = ["README.md", "x-q4_0.gguf", "x-q8_0.gguf"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: files)
    with pytest.raises(FileNotFoundError, match=r"hf download a/x-GGUF x-q4_0\.gguf`, and give"):
        load("a/x-GGUF")


@pytest.mark.parametrize("dtype", ["float64", "float7", "int8", 5])
def test_dtypes(dtype, directory, tmp_path):
    message = rf"dtype={dtype!r} must be one of float32, bfloat16, float16"
    for read in (
        lambda: load(directory, dtype=dtype),
        lambda: save(tmp_path / "new", load(directory), dtype=dtype),
        lambda: checkpoints.convert(directory, tmp_path / "new", dtype=dtype),
    ):
        with pytest.raises(ValueError, match=message):
            read()


@pytest.mark.parametrize("argument", ["device", "mesh"])
def test_devices(argument, directory):
    with pytest.raises(ValueError, match=f"{argument}=5 must be a jax"):
        load(directory, **{argument: 5})


# --- files -------------------------------------------------------------------------------------


def without(name):
    return lambda made: (made / name).unlink()


def text(name, content):
    return lambda made: (made / name).write_text(content)


def config(**changes):
    return lambda made: edit_json(made / "config.json", **changes)


def weights(edit):
    return lambda made: edit_weights(made, edit)


def stored(dtype):
    return weights(lambda tensors: {name: array.astype(dtype) for name, array in tensors.items()})


def entry(**change):
    """Change what the header of the weights says of one tensor."""

    def edit(made):
        data = (made / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header["shared.weight"] |= change
        new = json.dumps(header).encode()
        (made / WEIGHTS).write_bytes(len(new).to_bytes(8, "little") + new + data[end:])

    return edit


def tokenizer(words=WORDS, *, change=lambda made: None):
    def edit(made):
        make_tokenizer(words).save_pretrained(made)
        change(made)

    return edit


DAMAGED = r"model\.safetensors is cut short or damaged \(.+\)\. Copy or download it again"
TWO = {"decoder.embed_tokens.weight": np.ones((40, 16), np.float32)}
FILES = {  # what is called "no …" is a file that is missing
    "no config": (without("config.json"), r"has no config\.json"),
    "no weights": (without(WEIGHTS), r"neither model\.safetensors nor .* Copy"),
    "no weights but GGUF": (
        lambda made: (made / WEIGHTS).rename(made / "x.gguf"),
        r"Give the file .*x\.gguf itself\.$",
    ),
    "an empty config": (text("config.json", ""), r"config\.json is not valid JSON"),
    "half a config": (text("config.json", '{"model_type": "t5"'), r"config\.json is not valid"),
    "a list": (text("generation_config.json", "[1]"), r"generation_config\.json should hold"),
    "no JSON object": (text("generation_config.json", "\0"), r"generation_config\.json is not val"),
    "another size": (entry(shape=[40, 15]), DAMAGED),
    "an unknown dtype": (entry(dtype="F99"), DAMAGED),
    "half a place": (entry(data_offsets=[0]), DAMAGED),
    "a negative size": (entry(shape=[-1]), DAMAGED),
    "bytes": (stored(np.uint8), "is stored as uint8; weights should be floats"),
    "int8": (stored(np.int8), "is stored as I8; supported are F64, F32"),
    "float8": (stored(ml_dtypes.float8_e4m3fn), "is stored as F8_E4M3; supported are F64"),
    "layers are lacking": (
        weights(lambda tensors: {n: a for n, a in tensors.items() if "decoder" not in n}),
        r"layers beyond the 0 of decoder\.block\.\* are missing",
    ),
    "other rows": (config(vocab_size=48), r"'shared\.weight' has shape \(40, 16\).* \(48, 16\)"),
    "two embeddings": (
        weights(lambda tensors: tensors | TWO),
        r"decoder\.embed_tokens\.weight' differs from 'shared",
    ),
    "more ids": (
        tokenizer([*WORDS, *"ABCDEFGHIJKLMNOP"]),
        "tokenizer has 45 ids and the model only 40",
    ),
    "half a tokenizer": (
        tokenizer(change=text("tokenizer.json", '{"version": "1.0", ')),
        r"tokenizer in .* cannot be read .*download it again",
    ),
    "pieces are lacking": (
        tokenizer(change=without("tokenizer.json")),
        r"no tokenizer\.json.*pip install sentencepiece",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case, directory):
    change, message = FILES[case]
    change(directory)
    error = FileNotFoundError if case.startswith(("no config", "no weights")) else ValueError
    with pytest.raises(error, match=message):
        load(directory)


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy", "flax"])
def test_shards(form, tmp_path):
    """One of another model, an index that lists too little, a missing one, one elsewhere."""
    if form == "safetensors":
        made = t5_variants.write(tmp_path, V1_0, shards=3)
    else:
        arrays = t5_variants.tensors(V1_0)
        made = formats.rewrite(t5_variants.write(tmp_path, V1_0), arrays, f"{form}-sharded")
    first, second, _ = sorted(made.glob("*-of-*"))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="missing from the weights"):
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
    for listed, message in (
        ({}, "has no 'weight_map'"),
        ({"shared.weight": "../elsewhere"}, "which should be the name of a file"),
    ):
        index.write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(ValueError, match=rf"{index.name}.*{message}"):
            load(made)


# --- configs -----------------------------------------------------------------------------------

NESTED = {"full_attention": {"rope_theta": 2.0}}
NO_WINDOW = "'sliding_attention', but there is no window"
MORE_LAYERS = {"num_hidden_layers": 9}
BEYOND = "num_hidden_layers=9, but layers beyond"
# Changes of config.json, and the message, by module and variant; test_config_fields.py has values
# of a wrong kind in every field.
REFUSED = {
    (t5_variants, "v1_0"): [
        ({"model_type": "bert"}, "model_type='bert' is not supported.*'t5'"),
        ({"d_model": 0}, "d_model=0 should be an integer ≥ 1"),
        ({"layer_norm_epsilon": 1e18}, r"layer_norm_epsilon=1e\+18 should be a number in \[0, 1\)"),
        ({"d_model": 2**63}, f"d_model={2**63} should be at most {2**31 - 1}"),
        ({"relative_attention_max_distance": 4}, "max_distance=4 should be above half"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
        ({"dense_act_fn": "silu"}, "dense_act_fn='silu' is not supported; .* dense_act_fn='relu'"),
        ({"is_gated_act": True}, "is_gated_act=True is not supported"),
        ({"hidden_size": 32}, "hidden_size=32 is not supported; .* hidden_size=16"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"pad_token_id": 40}, "pad_token_id=40 is no id of a vocabulary of 40"),
        *(({"eos_token_id": i}, "eos_token_id=.* below 2³¹") for i in ([1, "x"], -2, 2**31)),
        *(({field: count}, f"{field}={count}.*(beyond the 2|at most 1000|below 2³¹)")
          for field in ("num_layers", "num_decoder_layers") for count in (3, 900, 10**9, 2**63)),
    ],
    (gpt_variants, "tied"): [
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported.*=True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "=True is not supported.*=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported.*=False"),
        ({"activation_function": "silu"}, "activation_function='silu' is not supported"),
        ({"bos_token_id": 40}, "bos_token_id=40 is no id of a vocabulary of 40"),
        ({"pad_token_id": -2}, "pad_token_id=-2 should be an integer ≥ 0"),
        ({"tie_word_embeddings": False}, r"'lm_head\.weight' missing from the weights"),
    ],
    (llama_variants, "llama3"): [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; .* hidden_act='silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not .*llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None should be a number > 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None should"),
        ({"rope_scaling": NESTED}, "full_attention.* are not one set of settings"),
        ({"num_key_value_heads": 3}, "heads=4 is not divisible by num_key_value_heads=3"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"hidden_size": 1, "head_dim": None}, "head_dim=0 is odd or 0"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1.0}, "rope_theta=1 above 1"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 1e-320}}, "beta_slow=1e-320 should be"),
        ({"bos_token_id": None, "eos_token_id": None}, "neither bos_token_id nor eos_token_id"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 should be an integer"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported.*'llama', 'mistral', 'qwen2'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types=.* each of 2"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, NO_WINDOW),
    ],
    (gemma_variants, "gemma2"): [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"final_logit_softcapping": 0}, "softcapping=0 should be a number > 0, or null"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 should be an integer"),
        ({"sliding_window": None}, NO_WINDOW),
    ],
    (gemma_variants, "gemma3"): [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"rope_parameters": {"rope_theta": 2.0}}, "'full_attention' and 'sliding_att"),
        ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
    ],
    (t5gemma_variants, "t5gemma"): [
        ({"decoder": {"hidden_activation": "relu"}}, "decoder: hidden_activation='relu'"),
        ({"encoder": {"vocab_size": 41}}, "vocab_size=41 differs from the decoder's 40"),
        ({"decoder": {"cross_attention_hidden_size": 16}}, "decoder: cross_attention_hidden_size"),
        ({"decoder": MORE_LAYERS}, BEYOND),
        ({"encoder": MORE_LAYERS}, BEYOND),
        ({"encoder": 5}, "encoder=5 should be an object"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not"),
    ],
    (t5gemma_variants, "t5gemma2"): [
        ({"decoder": {"hidden_size": 32}}, "hidden_size=16 differs from the decoder's"),
        ({"decoder": {"attn_logit_softcapping": 9.0}}, "decoder: attn_logit_softcapping=9.0 is"),
        ({"encoder": {"text_config": [1]}}, r"text_config=\[1\] should be an object"),
        ({"encoder": {"eoi_token_index": "x"}}, "eoi_token_index='x' should be an int"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"), REFUSED, ids=lambda value: getattr(value, "__name__", value)
)
def test_configs(module, name, tmp_path, monkeypatch):
    """None of them builds a module."""
    monkeypatch.setattr(parameters, "without_params", None)
    variant = module.VARIANTS[name]
    made = module.write(tmp_path, variant)
    for changes, message in REFUSED[module, name]:
        stacks = {
            key: {**variant.raw[key], **value}
            for key, value in changes.items()
            if key in ("encoder", "decoder") and isinstance(value, dict)
        }
        (made / "config.json").write_text(json.dumps({**variant.raw, **changes, **stacks}))
        with pytest.raises(ValueError, match=message):
            load(made)


@pytest.mark.parametrize("ids", [2**31, [1, 2**40], 10**60])
def test_ids_of_generation_config(ids, directory):
    edit_json(directory / "generation_config.json", eos_token_id=ids)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=.* below 2³¹"):
        load(directory)


def test_a_gpt_projection_that_lies_the_other_way(tmp_path):
    made, name = gpt_variants.write(tmp_path, gpt_variants.VARIANTS["tied"]), "h.1.mlp.c_fc.weight"
    name = f"transformer.{name}"
    edit_weights(made, lambda tensors: tensors | {name: tensors[name].T.copy()})
    with pytest.raises(ValueError, match=r"c_fc\.weight' has shape \(64, 16\).* for \(16, 64\)"):
        load(made)
