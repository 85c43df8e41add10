"""Trees through every family and every drafter: tokens, refusals. `check_model` has the caches."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax import sampling as smp
from specjax.decoding import building
from specjax.drafters import ngram
from specjax.measure import metrics
from specjax.tuning.ranks import acceptance_by_rank
from tiny_models import random_model, slow

pytestmark = pytest.mark.sweep


BEST = "best_first(width=3, depth=3, nodes=8)"


# `test_families.py` has fixed trees.
@pytest.mark.parametrize(
    ("family", "rows"), [("gpt2", 4), *map(slow, (("t5 tied", 4), ("llama", 16), ("qwen2", 1)))]
)
def test_greedy_tokens_are_plain_decodings(family, rows):
    """Rows of different lengths, alone and side by side; the draft is right now and then."""
    target = random_model(family, 12)
    draft = dataclasses.replace(target, model=shaken(target.model))
    texts = [[3, 4, 5, 6, 7], [8, 9], [10, 3, 4, 4], [5], [6, 6, 6]]
    texts += [[5 + row % 7] * (1 + row % 5) for row in range(5, rows)]
    options = {"max_new_tokens": 17, "batch_size": rows}
    plain = specjax.generate(target, None, texts, **options)
    found = specjax.generate(target, draft, texts, tree=BEST, **options)
    assert found.tokens == plain.tokens
    assert found.accepted.sum() > 0
    assert found.verified.sum() > found.accepted.sum()


def shaken(model, noise=0.03):
    """The same model with some noise on every weight."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape).astype(x.dtype), model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": "lookup"}, "PromptLookup drafts chains alone"),
        ({"passes": (0, 2)}, "passes=0"),
        ({"policy": "svip"}, "Svip decides token by token"),
        ({"rule": "typical", "temperature": 1.0, "key": 0}, "Typical is a rule for chains"),
        ({"tree": "bush"}, "chain, fixed, best_first"),
        ({"tree": "best_first(width=13, depth=1, nodes=4)"}, "width=13, but .* 12 ids"),
        ({"tree": "best_first(width=12, depth=1, nodes=13)"}, "give no more than 12"),
    ],
)
def test_what_trees_cannot_do_is_refused(options, said):
    target = random_model("llama", 12)
    known = {"draft": target, "tree": "fixed(2)"} | options
    draft = known.pop("draft")
    with pytest.raises(ValueError, match=said):
        specjax.generate(target, draft, [[3, 4]], max_new_tokens=4, **known)


@pytest.mark.parametrize("temperature", [0.0, slow((1.0,))])
def test_acceptance_by_rank(temperature):
    """The first child's chance is α; at temperature 0 ranks say which choice is the target's."""
    target = random_model("llama", 12)
    draft = dataclasses.replace(target, model=shaken(target.model, 0.3))
    texts = [[3, 4, 5, 6, 7], [8, 9], [10, 3, 4, 4], [5], [6, 6, 6]] * 4
    chosen = smp.Sampling(temperature)
    plain = specjax.generate(
        target, None, texts, temperature=temperature, key=0, max_new_tokens=17, batch_size=20
    )
    options = {"sampling": chosen, "batch_size": 20}
    known = target, draft, texts, plain.tokens
    loop = building.build(target, draft, gamma=1, sampling=chosen)
    alpha = metrics.alpha_of(loop, target, texts, plain.tokens, 20).value
    if temperature == 0:
        top = acceptance_by_rank(*known, **options)
        assert top[0] == pytest.approx(alpha, abs=1e-6)
        assert top.sum() <= 1 + 1e-6
        return
    drawn = acceptance_by_rank(*known, drawn=True, **options)
    assert drawn[0] == pytest.approx(alpha, abs=0.05)
    assert 0.8 < drawn.sum() < 1 + 1e-5  # ten of twelve tokens: one is nearly always accepted
    assert drawn[0] > drawn[1:].max()


@pytest.mark.parametrize("temperature", [slow((0.0,)), 1.0])
def test_children_that_are_not_there_are_not_accepted(temperature):
    """A lookup with two matches has two of ten ranks."""
    target = random_model("gpt2", 12)
    texts = [[3, 4, 5, 3, 6, 3], [8, 9, 8, 10, 8], [7, 7, 3, 7]] * 4
    plain = specjax.generate(
        target, None, texts, temperature=temperature, key=0, max_new_tokens=17, batch_size=12
    )
    found = acceptance_by_rank(
        target, ngram.PromptLookup(12, matches=2), texts, plain.tokens,
        sampling=smp.Sampling(temperature), drawn=temperature > 0, batch_size=12,
    )  # fmt: skip
    assert (found[:2] > 0).all()
    assert (found[2:] == 0).all()
