"""Dropout of a T5 in training is where transformers' T5 has it."""

import jax
import numpy as np
import pytest

import t5_variants
from experiments.train import modes, steps
from experiments.train.batches import Batch
from specjax import checkpoints

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("name", ["v1_0", "v1_1"])
def test_places_of_dropout(name, tmp_path, monkeypatch):
    """Where both halve instead of dropping, logits are equal: each place is met as often."""
    import torch
    from transformers import T5ForConditionalGeneration

    variant = t5_variants.VARIANTS[name]
    place = t5_variants.write(tmp_path, variant)
    source, lengths, tokens = t5_variants.inputs(variant)
    monkeypatch.setattr(modes.Drop, "__call__", lambda self, x: x * 0.5)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_, **__: x * 0.5)
    theirs = T5ForConditionalGeneration.from_pretrained(place, attn_implementation="eager").train()
    mask = torch.tensor(np.arange(source.shape[1])[None] < lengths[:, None])
    ids = [torch.tensor(x, dtype=torch.long) for x in (source, tokens)]
    with torch.no_grad():
        expected = theirs(ids[0], attention_mask=mask, decoder_input_ids=ids[1]).logits.numpy()
    model = checkpoints.load(place).model
    # `teacher_forced` puts the start token first, and leaves out the last.
    target = np.append(tokens[:, 1:], tokens[:, :1], axis=1)
    batch = Batch(source, lengths, target, np.full(len(source), target.shape[1], np.int32))
    found = steps.teacher_forced(
        model.graphdef, model.params, batch, lambda m: modes.Mode(0.1)(m, jax.random.key(0))
    )
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-4)
