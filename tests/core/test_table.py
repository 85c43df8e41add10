"""Table models whose α is known, by closed form, the acceptance rule and outputs."""

import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from specjax import formulas, rules
from specjax import sampling as smp
from specjax.drafters.base import ModelDrafter
from specjax.models import table
from specjax.types import Inputs


def inputs_of(first: list[int]) -> Inputs:
    """Prompts of one token each, (B, 1)."""
    zeros = jnp.zeros((len(first),), jnp.int32)
    source = jnp.zeros((len(first), 0), jnp.int32)
    return Inputs(source, zeros, jnp.array(first, jnp.int32)[:, None], zeros + 1)


def test_table_looks_at_the_last_token():
    distributions = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
    model = table.by_last_token(distributions)
    context, cache = model.start(inputs_of([0]), 8)
    hidden, _ = model(jnp.array([[1, 2, 0]]), jnp.array([3]), context, cache)
    np.testing.assert_allclose(np.exp(model.logits(hidden))[0], distributions[[1, 2, 0]], rtol=1e-6)
    assert (model.order, model.vocab_size) == (1, 3)


def test_fixed_table_looks_at_nothing():
    model = table.fixed([0.7, 0.3])
    context, cache = model.start(inputs_of([0]), 8)
    hidden, _ = model(jnp.array([[1, 0]]), jnp.array([0]), context, cache)
    np.testing.assert_allclose(np.exp(model.logits(hidden))[0], [[0.7, 0.3]] * 2, rtol=1e-6)
    assert (model.order, model.vocab_size) == (0, 2)


def test_draft_of_alpha_by_every_measure():
    """Its overlap in closed form, in the acceptance rule's terms and along an output."""
    alphas = np.array([0.0, 0.3, 1.0])
    target_probs = np.array([[0.6, 0.4, 0.0], [0.1, 0.9, 0.0], [0.5, 0.5, 0.0]])
    draft_probs = table.draft_of_alpha(target_probs, alphas)
    np.testing.assert_allclose(1 - formulas.d_lk(target_probs, draft_probs), alphas, atol=1e-12)
    target, draft = table.by_last_token(target_probs), table.by_last_token(draft_probs)
    np.testing.assert_allclose(rules.overlap(target.table, draft.table), alphas, atol=1e-6)
    output = [[0, 1, 1, 0]]  # after the prompt 0: the overlaps after 0, 0, 1, 1, 0
    betas = test_loops.betas(target, ModelDrafter(draft), smp.Sampling(), inputs_of([0]), output)
    np.testing.assert_allclose(betas[0], alphas[[0, 0, 1, 1, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table.fixed([0.5, 0.4]), "sum to 1"),
        (lambda: table.fixed([1.5, -0.5]), "≥ 0"),
        (lambda: table.fixed([[0.5, 0.5]]), "1 axes"),
        (
            lambda: table.by_last_token([[0.5, 0.5]]),
            "a distribution over all tokens for each token",
        ),
        (lambda: table.draft_of_alpha([0.5, 0.5], 0.3), "probability 0"),
        (lambda: table.draft_of_alpha([1.0, 0.0], 1.3), "must lie in"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
