"""Logits and greedy tokens of each family against transformers, with random weights.

Skipped where torch is not installed. These are cells of the table in docs/checkpoints.md.
test_parity_torch.py and test_generate_torch.py have some families too: `make slow` runs them here.
"""

import dataclasses

import numpy as np
import pytest
import transformers

from family_rows import ROWS, cells
from specjax.checkpoints import load
from specjax.generation import generate
from test_families import near

torch = pytest.importorskip("torch")

import test_parity_torch as parity  # noqa: E402  needs torch

from make_reference import torch_causal_logits, torch_logits  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # transformers' and torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
EOS_IDS = [1, *range(3, 40, 9)]
LIMIT = 10
GEMMAS = "T5Gemma", "T5Gemma 2"
# Twelve inputs of 1 to 5 ids, the last of them EOS, as an encoder has it.
TEXTS = [
    [*np.random.default_rng(seed).integers(2, 40, 1 + seed % 5).tolist(), 1] for seed in range(12)
]


def saved(row, directory):
    """Random weights of torch's making, with many ids that end a row."""
    variant = ROWS[row].made
    config = {**variant.config, "eos_token_id": EOS_IDS, "pad_token_id": 0}
    variant = dataclasses.replace(variant, config=config)
    encodes = variant.raw.get("is_encoder_decoder", False)
    save = parity.causal_saved_by_transformers
    if encodes:
        save = parity.encoding_saved_by_transformers
    return save(directory, variant), encodes


def greedy(directory, encodes):
    """transformers' own tokens for each text alone."""
    kind = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    model, found = kind.from_pretrained(directory), []
    for ids in TEXTS:
        whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LIMIT)[0]
        found.append(whole[1 if encodes else len(ids) :].tolist())
    return found


@pytest.mark.parametrize(("row", "column"), cells("logits", quick=set()))
def test_logits_are_those_of_transformers(row, column, tmp_path):
    directory, encodes = saved(row, tmp_path)
    if encodes:
        inputs = ROWS[row].variants.inputs(ROWS[row].made)
        ours, theirs = parity.our_logits(directory, inputs), torch_logits(directory, *inputs)
    else:
        tokens = ROWS[row].variants.texts()
        ours = parity.our_causal_logits(directory, tokens)
        theirs = torch_causal_logits(directory, tokens)
    assert len(np.unique(ours.argmax(-1))) > 5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("row", "column"), cells("greedy", quick={(row, "greedy") for row in ("umT5", "ByT5", *GEMMAS)})
)
def test_greedy_tokens_are_those_of_transformers(row, column, tmp_path):
    """Both loops, on twelve inputs in one batch."""
    expected = greedy(*saved(row, tmp_path))
    assert len(set(map(tuple, expected))) > 4
    target = load(tmp_path)
    plain = generate(target, None, TEXTS, max_new_tokens=LIMIT)
    speculative = generate(target, near(target), TEXTS, gamma=3, max_new_tokens=LIMIT)
    assert plain.tokens == speculative.tokens == expected
    assert 0 < speculative.accepted.sum() < speculative.verified.sum()
