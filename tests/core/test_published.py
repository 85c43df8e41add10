"""Published EAGLE heads for a Llama: what they say, against the reference in numpy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import eagles
from eagles import features_of, target_of
from specjax import drafters
from specjax.drafters import attached

V, E, ROWS = 12, 8, 5
LLAMA = {
    "model_type": "llama", "vocab_size": V, "hidden_size": E, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "hidden_act": "silu",
}  # fmt: skip
IDS = np.array([1, 2, 5, 7, 10])


def layer(place: str, inputs: int, size: int = 2) -> dict[str, tuple]:
    attention, feed_forward = f"{place}.self_attn", f"{place}.mlp"
    return {
        f"{attention}.q_proj.weight": (4 * size, inputs),
        f"{attention}.k_proj.weight": (2 * size, inputs),
        f"{attention}.v_proj.weight": (2 * size, inputs),
        f"{attention}.o_proj.weight": (E, 4 * size),
        f"{feed_forward}.gate_proj.weight": (12, E),
        f"{feed_forward}.up_proj.weight": (12, E),
        f"{feed_forward}.down_proj.weight": (E, 12),
        f"{place}.post_attention_layernorm.weight": (E,),
    }


def three(place: str) -> dict[str, tuple]:
    norms = {f"{place}.hidden_norm.weight": (E,), f"{place}.input_layernorm.weight": (E,)}
    head = {"norm.weight": (E,), "lm_head.weight": (ROWS, E), "fc.weight": (E, 3 * E)}
    return {**layer(place, 2 * E), **norms, **head}


# config.json, shapes, and the taps that they mean in a target of two layers.
LAYOUTS = {
    "EAGLE-1": (
        LLAMA,
        {**layer("layers.0", E), "fc.weight": (E, 2 * E), "fc.bias": (E,),
         "embed_tokens.weight": (V, E)},
        (),
    ),
    "EAGLE-1, speculators": (
        {"speculators_model_type": "eagle", "layernorms": False,
         "transformer_layer_config": {**LLAMA, "num_hidden_layers": 2}},  # of the target
        {**layer("transformer", E), "fusion_fc.weight": (E, 2 * E)},
        (),
    ),
    "EAGLE-3, SpecForge": (
        {**LLAMA, "draft_vocab_size": ROWS, "head_dim": 2,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}},
        three("midlayer"),
        (1, 2, 2),
    ),
    "EAGLE-3, speculators": (
        {"speculators_model_type": "eagle3", "draft_vocab_size": ROWS,
         "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_residual": True,
         "transformer_layer_config": LLAMA},
        three("layers.0"),
        (0, 1, 2),
    ),
}  # fmt: skip


def write(directory, name):
    raw, shapes, _ = LAYOUTS[name]
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    if "lm_head.weight" in tensors:
        tensors |= {"d2t": IDS - np.arange(ROWS), "t2d": np.isin(np.arange(V), IDS)}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    return directory, tensors


@jax.jit
def said(drafter, tokens, hidden):
    features = drafter.features(hidden)
    before = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    start = jnp.zeros((len(tokens),), jnp.int32)
    return drafter.logits(drafter.module(drafter.embed(tokens), before, start, None, ())[0])


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_reference(name, tmp_path):
    """At every slot but the first, which has no feature. As by its directory's name."""
    target = target_of("llama", V)
    directory, tensors = write(tmp_path / "head", name)
    drafter = drafters.load(str(directory), target)
    assert drafter.config.taps == LAYOUTS[name][2]
    tokens = np.random.default_rng(1).integers(0, V, (2, 9), np.int32)
    nothing = np.zeros((2, 0), np.int32), np.zeros(2, np.int32)
    hidden = features_of(drafter, *nothing, tokens)
    settings = drafter.settings()
    assert settings["layer"]["rope_theta"] == 500.0
    renamed = {
        key.replace("transformer.", "layers.0.").replace("fusion_fc", "fc"): array
        for key, array in tensors.items()
    }
    if settings["taps"]:
        renamed = {key.replace("layers.0", "midlayer"): x for key, x in renamed.items()}
    table = np.asarray(drafter.embed(jnp.arange(V)[None])[0])

    def head(x):
        return np.asarray(target.model.logits(jnp.asarray(x, jnp.float32)))

    found = np.asarray(said(drafter, jnp.asarray(tokens), jnp.asarray(hidden)))
    for row in range(2):
        parts = settings, renamed, table, head, hidden[row], tokens[row]
        expected = eagles.reference(*parts)
        np.testing.assert_array_equal(np.isfinite(found[row]), np.isfinite(expected))
        finite = np.isfinite(expected[1:])
        scale = np.abs(expected[1:][finite]).max()
        np.testing.assert_allclose(
            found[row, 1:][finite], expected[1:][finite], rtol=1e-4, atol=1e-5 * scale
        )


@pytest.mark.sweep
def test_what_is_not_built_is_refused(tmp_path):
    target = target_of("llama", V)
    for name, changes, words in (
        ("EAGLE-1, speculators", {"layernorms": True}, "layernorms is not supported"),
        ("EAGLE-3, speculators", {"embed_requires_grad": True}, "embed_requires_grad is not supp"),
        ("EAGLE-1, speculators", {"speculators_model_type": "mlp"}, "'mlp' is no EAGLE"),
        ("EAGLE-1", {"vocab_size": 40}, "a target of vocabulary 40, and tiny llama has 12"),
        ("EAGLE-3, SpecForge", {"hidden_size": 16}, "a target of width 16, and tiny llama has 8"),
        ("EAGLE-3, SpecForge", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("EAGLE-3, SpecForge", {"eagle_config": [1]}, r"json: eagle_config=\[1\] should be an obj"),
        ("EAGLE-3, SpecForge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}}, "a list"),
        ("EAGLE-3, speculators", {"eagle_aux_hidden_state_layer_ids": ["a"]}, "a list of integers"),
        (
            "EAGLE-3, speculators",
            {"transformer_layer_config": 5},
            "transformer_layer_config=5 should",
        ),
        ("EAGLE-3, speculators", {"transformer_layer_config": {"hidden_act": 5}}, "hidden_act=5"),
        ("EAGLE-3, speculators", {"speculators_model_type": ["eagle"]}, "should be a string"),
        ("EAGLE-3, SpecForge", {"target_hidden_size": "8"}, "target_hidden_size='8' should be"),
        ("EAGLE-3, SpecForge", {"eagle_config": {}}, r"taps=\(2, 1, -1\).* has 2 layers"),
    ):
        directory, _ = write(tmp_path / "head", name)
        raw = {**LAYOUTS[name][0], **changes}
        (directory / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=words):
            attached.load(directory, target)


def test_models_are_no_heads(pair, tmp_path):
    assert not attached.is_attached(pair.target.name)
    assert not attached.is_attached(tmp_path)


@pytest.mark.parametrize("own", [True, False])
def test_an_embedding_of_its_own_is_used_and_kept(own, tmp_path):
    target = target_of("llama", V)
    place, tensors = write(tmp_path / "head", "EAGLE-1")
    ids = jnp.arange(V)[None]
    theirs = np.asarray(target.model.module().embed(ids)[0])
    if not own:
        tensors["embed_tokens.weight"] = theirs.astype(np.float16).astype(np.float32)
        save_file(tensors, place / "model.safetensors")
    head = drafters.load(str(place), target)
    expected = tensors["embed_tokens.weight"] if own else theirs
    np.testing.assert_array_equal(head.embed(ids)[0], expected)
    assert (head.table is not None) == own
    attached.save(tmp_path / "again", head, target, dtype=np.float32)
    again = attached.load(tmp_path / "again", target)
    np.testing.assert_array_equal(again.embed(ids)[0], expected)


@pytest.mark.parametrize("row", [-1, V])
def test_ids_that_the_target_has_not(row, tmp_path):
    place, tensors = write(tmp_path / "head", "EAGLE-3, SpecForge")
    tensors["d2t"][-1] = row - (ROWS - 1)
    save_file(tensors, place / "model.safetensors")
    with pytest.raises(ValueError, match=rf"d2t gives the id {row}, and .* has 0 … {V - 1}"):
        attached.load(place, target_of("llama", V))


def test_medusa_heads_load_by_their_directory(tmp_path):
    target = target_of("llama", V)
    rng, tensors = np.random.default_rng(0), {}
    for k in range(2):
        tensors[f"{k}.0.linear.weight"] = rng.normal(size=(E, E)).astype(np.float32)
        tensors[f"{k}.0.linear.bias"] = np.zeros(E, np.float32)
        tensors[f"{k}.1.weight"] = rng.normal(size=(V, E)).astype(np.float32)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = drafters.load(str(tmp_path), target)
    assert len(found.heads) == 2
    np.testing.assert_array_equal(found.heads[1].linear, tensors["1.1.weight"].T)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "medusa_num_heads": 1}))
    with pytest.warns(UserWarning, match="says medusa_num_heads=1, and .* holds 2 heads"):
        found = drafters.load(str(tmp_path), target)
    assert len(found.heads) == 1
    np.testing.assert_array_equal(found.heads[0].linear, tensors["0.1.weight"].T)
