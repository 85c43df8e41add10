"""What config.json and the tensors' names of one family say: heads, ids, rotations, older names."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import gemma_variants
import gpt_variants
import llama_variants
import t5_variants
import t5gemma_variants
from checkpoint_edits import assert_same, edit_json, edit_weights
from specjax import checkpoints
from specjax.checkpoints import load
from specjax.models.llama import Rope

V1_0 = t5_variants.VARIANTS["v1_0"]

# --- defaults ----------------------------------------------------------------------------------

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
EOI = transformers.AutoConfig.for_model("t5gemma2").encoder.eoi_token_index


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    """Also what follows from others: windows, rotations, and sizes that are null."""
    theirs, family = transformers.AutoConfig.for_model(kind), checkpoints.FAMILIES[kind]
    for field, default in family.defaults.items():
        assert default is None or default == getattr(theirs, field), field
    ours = family.config_from_hub({"model_type": kind, "eos_token_id": 2}, {})
    if kind.startswith("t5gemma"):
        encoder = theirs.encoder.text_config if kind == "t5gemma2" else theirs.encoder
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        check_decoder(ours, theirs.decoder)
        check_decoder(ours.encoder, encoder)
        assert getattr(ours, "eoi_token_index", EOI) == EOI
    elif kind == "gpt2":
        assert (ours.n_inner, ours.pad_token_id, ours.start_id) == (4 * 768, 50256, 50256)
    elif "d_kv" in family.defaults:
        assert ours.num_decoder_layers == ours.num_layers
        assert (ours.start_id, ours.pad_token_id, ours.scale_decoder_outputs) == (
            0,
            0,
            kind != "mt5",
        )
    else:
        check_decoder(ours, theirs)


def check_decoder(ours, theirs):
    """Compare the config of a stack in the Llama layout with transformers' own."""
    gemma = hasattr(theirs, "query_pre_attn_scalar")
    more = ("bos_token_id", "pad_token_id", "query_pre_attn_scalar", *CAPS) if gemma else ()
    for field in (*SIZES, *more):
        expected = getattr(theirs, field) or (0.0 if field in CAPS else getattr(theirs, field))
        assert getattr(ours, field) == expected, field
    assert ours.head_dim == getattr(theirs, "head_dim", 4096 // 32)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", 0) or 0)
    ropes = theirs.rope_parameters
    whole = ropes.get("full_attention", ropes)
    assert (ours.rope.kind, ours.rope.theta) == ("default", whole["rope_theta"])
    if gemma:
        local = ["sliding_attention" if window else "full_attention" for window in ours.windows]
        assert local == theirs.layer_types
    if "sliding_attention" in ropes:
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]


# --- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "own_head", "tied", "scaled"),
    [
        ({}, False, True, True),  # v1.0, silent
        ({"tie_word_embeddings": True}, False, True, True),  # v1.0
        ({"tie_word_embeddings": False}, True, False, False),  # v1.1
        # v1.1 as transformers 5 saves it
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, False, True, True),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True, False, True),
    ],
)
def test_the_files_decide_on_tying_and_scaling(tmp_path, config, own_head, tied, scaled):
    variant = dataclasses.replace(V1_0, config=config, own_head=own_head)
    found = load(t5_variants.write(tmp_path, variant)).config
    assert (found.tie_word_embeddings, found.scale_decoder_outputs) == (tied, scaled)


def test_a_promised_head_that_is_missing_is_the_embedding(tmp_path):
    """As in transformers."""
    variant = dataclasses.replace(V1_0, config={"tie_word_embeddings": False})
    directory = t5_variants.write(tmp_path, variant)
    with pytest.warns(UserWarning, match=r"no 'lm_head\.weight', so the embedding") as caught:
        found = load(directory).config
    assert [warning.filename for warning in caught] == [__file__]
    assert (found.tie_word_embeddings, found.scale_decoder_outputs) == (True, False)


HEADS = {  # the variant, the embedding, and whether its head is tied where config.json is silent
    "gpt2": (gpt_variants, "tied", "transformer.wte.weight", True),
    "llama": (llama_variants, "llama3", "model.embed_tokens.weight", False),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_files_decide_whether_a_head_is_the_embedding(case, tmp_path):
    """A copy of the embedding is none unless config.json says so; other numbers are always one."""
    module, name, embedding, silent = HEADS[case]
    made = module.write(tmp_path, module.VARIANTS[name])
    for factor in (1, 2):
        head = np.float32(factor)
        edit_weights(made, lambda t, by=head: t | {"lm_head.weight": by * t[embedding]})
        for said in (True, False, None):
            edit_json(made / "config.json", tie_word_embeddings=said)
            tied = factor == 1 and (silent if said is None else said)
            assert load(made).config.tie_word_embeddings == tied, (factor, said)
    edit_weights(made, lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"})
    edit_json(made / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' missing from the weights"):
        load(made)


@pytest.mark.parametrize("module", [t5_variants, gpt_variants, llama_variants])
def test_a_tied_matrix_under_the_name_of_the_head(module, tmp_path):
    name = {t5_variants: "v1_0", gpt_variants: "tied", llama_variants: "qwen2"}[module]
    made = module.write(tmp_path, module.VARIANTS[name])
    edit_json(made / "config.json", tie_word_embeddings=True)
    edit_weights(made, lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"})
    plain = load(made)
    (embedding,) = {"shared.weight", "transformer.wte.weight", "model.embed_tokens.weight"} & set(
        load_file(made / "model.safetensors")
    )
    edit_weights(made, lambda t: t.update({"lm_head.weight": t.pop(embedding)}))
    found = load(made)
    assert_same(found, plain)


# --- Llama, Mistral, Qwen ----------------------------------------------------------------------


@pytest.fixture
def llama_directory(tmp_path):
    """A complete checkpoint with groups of heads and scaled rotations."""
    return llama_variants.write(tmp_path / "llama", llama_variants.VARIANTS["llama3"])


@pytest.mark.parametrize("name", ["llama3", "linear", "yarn"])
def test_both_spellings_of_scalings(llama_directory, name):
    """As transformers wrote them before version 5, and as it does since; the older one wins."""
    scaling = {
        "llama3": llama_variants.LLAMA3,
        "linear": {"rope_type": "linear", "factor": 3.0},
        "yarn": {**llama_variants.YARN, "mscale": 1.0},
    }[name]
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    file = llama_directory / "config.json"
    edit_json(file, rope_theta=500.0, rope_scaling=scaling)
    old = load(llama_directory).config
    assert (old.rope.kind, old.rope.theta) == (name, 500.0)
    parameters = {**scaling, "rope_theta": 500.0}
    edit_json(file, rope_theta=None, rope_scaling=None, rope_parameters=parameters)
    assert load(llama_directory).config == old
    edit_json(file, rope_theta=500.0, rope_scaling=scaling, rope_parameters={"rope_theta": 2.0})
    assert load(llama_directory).config == old
    edit_json(file, rope_theta=7.0, rope_scaling=None, rope_parameters=None)
    assert load(llama_directory).config.rope == Rope("default", 7.0)


def test_ids_of_a_llama(llama_directory):
    file = llama_directory / "config.json"
    edit_json(file, eos_token_id=[7, 5], pad_token_id=None)
    for changes, start in (({}, 1), ({"bos_token_id": None}, 7)):
        edit_json(file, **changes)
        found = load(llama_directory)
        assert (found.start_id, found.pad_id, found.eos_ids) == (start, start, (5, 7))


def test_windows_of_a_qwen_follow_its_flag(tmp_path):
    """A window that is not used, as most of them say, is none."""
    variant = llama_variants.VARIANTS["qwen2_windows"]
    directory = llama_variants.write(tmp_path, variant)
    assert load(directory).config.windows == (0, 4, 4)
    edit_json(directory / "config.json", use_sliding_window=False)
    assert load(directory).config.windows == (0, 0, 0)
    edit_json(directory / "config.json", use_sliding_window=True, max_window_layers=3)
    assert load(directory).config.sliding_window == 0


# --- Gemma 3 and T5Gemma -----------------------------------------------------------------------


@pytest.mark.parametrize("old", [True, False])
def test_the_text_model_of_a_gemma3_that_reads_images(old, tmp_path):
    """Names as transformers wrote them before version 5, and since; the ids are the outer ones."""
    variant = gemma_variants.VARIANTS["gemma3"]
    plain = load(gemma_variants.write(tmp_path / "plain", variant))
    made = gemma_variants.write(tmp_path / "both", variant)
    whole = {"model_type": "gemma3", "text_config": variant.raw, "eos_token_id": [2, 5]}
    (made / "config.json").write_text(json.dumps(whole))

    def renamed(tensors):
        found = {
            f"language_model.{name}" if old else name.replace("model.", "model.language_model."): x
            for name, x in tensors.items()
        }
        vision = "vision_tower.post_layernorm.weight"
        return found | {vision if old else f"model.{vision}": np.zeros(2, np.float32)}

    edit_weights(made, renamed)
    found = load(made)
    assert (found.config, found.eos_ids) == (plain.config, (2, 5))
    jax.tree.map(np.testing.assert_array_equal, found.model, plain.model)


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_other_names_of_a_t5gemmas_tensors(name, tmp_path):
    """Tied copies, a model without its head, names of before transformers 5, a vision model."""
    variant = t5gemma_variants.VARIANTS[name]
    plain = load(t5gemma_variants.write(tmp_path / "plain", variant))
    made = t5gemma_variants.write(tmp_path / "made", variant)

    def renamed(tensors):
        found = {n.removeprefix("model.").replace("text_model.", ""): x for n, x in tensors.items()}
        if name == "t5gemma2":
            found |= {n.replace("enc", "dec"): x for n, x in found.items() if "encoder.embed" in n}
            found["encoder.vision_tower.post_layernorm.weight"] = np.zeros(2, np.float32)
        return found | {"lm_head.out_proj.weight": found["decoder.embed_tokens.weight"]}

    edit_weights(made, renamed)
    found = load(made)
    assert_same(found, plain)


def test_a_t5gemmas_ids_are_the_outer_ones_or_its_decoders(tmp_path):
    variant = t5gemma_variants.VARIANTS["t5gemma"]
    made = t5gemma_variants.write(tmp_path, variant)
    found = load(made)
    assert (found.start_id, found.eos_ids, found.pad_id) == (3, (1,), 0)
    edit_json(made / "config.json", eos_token_id=[1, 5], bos_token_id=4)
    edit_json(made / "generation_config.json", decoder_start_token_id=6)
    found = load(made)
    assert (found.start_id, found.eos_ids, found.pad_id) == (6, (1, 5), 0)
