"""T5Gemma and T5Gemma 2: logits by the papers' equations, and drafters that share the encoder."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
import t5gemma_variants
import test_mesh
from gemma_equations import capped, run
from model_calls import uncached
from specjax.checkpoints import load, save
from specjax.drafters import eagle
from specjax.drafters.views import kangaroo, shallow
from specjax.models.t5gemma import T5Gemma
from test_families import near

VARIANTS = t5gemma_variants.VARIANTS
TEXTS = [[5, 9, 4, 7, 11, 3, 8, 2, 6], [8, 2, 6], [9, 7, 3, 5, 7, 2, 12], [4]]


def by_hand(config, tensors, source, tokens):
    """Logits (T, V) of one pair."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    newer = config.model_type == "t5gemma2"
    places = {"encoder": "model.encoder.text_model" if newer else "model.encoder"}
    places["decoder"] = "model.decoder"

    def embed(place, ids):
        shared = places["encoder"] if newer and config.tie_word_embeddings else place
        rows = w[f"{shared}.embed_tokens.weight"][ids]
        rows = rows * rows.shape[-1] ** 0.5
        if newer:
            rows[ids == config.eoi_token_index] = w[f"{shared}.embed_tokens.eoi_embedding"]
        return rows

    def sees(offset, window):
        if not window:
            return offset == offset
        if newer:  # as many as the window in all
            return (offset > -((window + 1) // 2)) & (offset <= window // 2)
        return abs(offset) <= window

    read = embed(places["encoder"], source)
    encoded = run(w, places["encoder"], config.encoder, read, sees)
    read = embed(places["decoder"], tokens)
    hidden = run(w, places["decoder"], config, read, encoded=encoded, merged=newer)
    table = places["encoder" if newer else "decoder"]
    head = w.get("lm_head.out_proj.weight", w[f"{table}.embed_tokens.weight"])
    return capped(hidden @ head.T, config.final_logit_softcapping)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_equations(name, tmp_path):
    made = VARIANTS[name]
    found = load(t5gemma_variants.write(tmp_path, made))
    source, lengths, tokens = t5gemma_variants.inputs(made)
    logits = np.asarray(uncached(found.model, *map(jnp.asarray, (tokens, source, lengths))))
    assert len(np.unique(logits.argmax(-1))) > 5
    tensors = t5gemma_variants.tensors(made)
    for i, length in enumerate(lengths):
        expected = by_hand(found.config, tensors, source[i, :length], tokens[i])
        np.testing.assert_allclose(logits[i], expected, rtol=0, atol=1e-4)


DRAFTS = {
    "early_exit": lambda target: specjax.early_exit(target, (0, 2)),
    "kangaroo": lambda target: kangaroo(target, 1),
    "shallow": lambda target: shallow(target, (0, 1)),
    "eagle": lambda target: eagle.fresh(target, version=1, heads=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_drafters_read_the_targets_encoding(name, tmp_path, monkeypatch):
    """The encoder is traced once, and the tokens are plain decoding's."""
    target = load(t5gemma_variants.write(tmp_path, three_layers(VARIANTS[name])))
    plain = specjax.generate(target, None, TEXTS, max_new_tokens=8)
    assert len(set(map(tuple, plain.tokens))) > 1
    read, calls = T5Gemma.read, []

    def counted(self, *args):
        calls.append(args)
        return read(self, *args)

    monkeypatch.setattr(T5Gemma, "read", counted)
    for kind, draft in DRAFTS.items():
        calls.clear()
        found = specjax.generate(target, draft(target), TEXTS, gamma=2, max_new_tokens=8)
        assert found.tokens == plain.tokens, kind
        assert len(calls) == 1, kind


def three_layers(variant):
    decoder = {**variant.decoder, "num_hidden_layers": 3}
    decoder.pop("layer_types", None)
    return dataclasses.replace(variant, decoder=decoder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma_untied", "t5gemma2_untied"])
def test_a_mesh_repeats_heads_and_pads_both_embeddings(name, tmp_path):
    target = load(t5gemma_variants.write(tmp_path / "made", VARIANTS[name]))
    save(tmp_path / name / "target", target)
    save(tmp_path / name / "draft", near(target))
    one = test_mesh.case(name, "model=4", 0.0)
    found = test_mesh.ask(tmp_path, [one, test_mesh.alone(one)])
    there, here = (found[json.dumps(case)] for case in (one, test_mesh.alone(one)))
    assert there["tokens"] == here["tokens"]
    assert here["accepted"] > 0


def test_a_source_beyond_the_encoders_positions_is_refused(tmp_path):
    target = load(t5gemma_variants.write(tmp_path, VARIANTS["t5gemma"]))
    assert target.max_source_len == 64
    with pytest.raises(ValueError, match=r"of 65 tokens exceeds the 64 positions .* encoder"):
        specjax.generate(target, None, [[5] * 65], max_new_tokens=2, max_source_len=70)
    with pytest.raises(ValueError, match="64 positions"):
        specjax.generate(target, None, [[5]], max_new_tokens=64)
