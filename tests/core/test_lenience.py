"""Lenience: the distribution that it gives, its bound, its limits, and what the loop accepts under
it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from reference import total_variation
from specjax import loop, speculative
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.rules import Lenient, LenientArgmax, Token, surviving
from specjax.sampling import Sampling, row_keys
from specjax.testing.enumeration import output_distribution
from table_models import inputs_of, logits_after, random_table, repeat

EOS = 2
PROMPT = (1, 0)
BUDGET = 5
GAMMA = 2
LENIENCES = (1.0, 0.5, 0.3, 0.1)
SAMPLINGS = {
    "warm": {"temperature": 0.7},
    "plain": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
}

P = np.array([0.35, 0.25, 0.15, 0.10, 0.07, 0.04, 0.02, 0.02])
Q = np.array([0.20, 0.20, 0.20, 0.15, 0.10, 0.08, 0.05, 0.02])


def log(probs):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probs), jnp.float32)


# What should come out, in slow numpy: the distribution written down in the rule's docstring.


def lenient_distribution(target_probs, draft_probs, lenience):
    """(accepted, replaced): what a drafted position gives each token by either way."""
    accepted = np.minimum(draft_probs, target_probs / lenience)
    left = np.maximum(target_probs - draft_probs, 0)
    left = left / left.sum() if left.sum() > 0 else target_probs
    return accepted, (1 - accepted.sum()) * left


class Distributions:
    """Both models' distributions after any prefix, in float64."""

    def __init__(self, target, draft, distribution):
        self.models, self.distribution, self.known = (target, draft), distribution, {}

    def __call__(self, prefix):
        if prefix not in self.known:
            inputs = inputs_of([list(PROMPT)])
            width = len(PROMPT) + BUDGET
            self.known[prefix] = tuple(
                reference.distribution(
                    logits_after(model, inputs, [PROMPT + prefix], width)[0], self.distribution
                )
                for model in self.models
            )
        return self.known[prefix]


def predicted(distributions, position, after=lambda target: target) -> dict[tuple, float]:
    """P(output) for every output, round by round: γ drafted positions and one more.

    Args:
      position: (accepted, replaced) of a drafted position from both distributions.
      after: the distribution of the token after a fully accepted draft, from the target's.
    """
    distribution: dict[tuple, float] = {}

    def go(output, weight, left):
        """`left` tokens may still be accepted in this round; None: a new one begins."""
        if weight == 0:
            return
        if len(output) == BUDGET or (output and output[-1] == EOS):
            distribution[output] = distribution.get(output, 0.0) + weight
            return
        if left is None:
            left = min(GAMMA, BUDGET - len(output) - 1)
        target, draft = distributions(output)
        accepted, replaced = position(target, draft)
        if left == 0:
            accepted, replaced = 0 * accepted, after(target)
        for token in range(len(target)):
            go((*output, token), weight * accepted[token], left - 1)
            go((*output, token), weight * replaced[token], None)

    go((), 1.0, None)
    return distribution


def enumerated(target, draft, distribution, rule) -> dict[tuple, float]:
    method = speculative.Speculative(
        target, ModelDrafter(draft), rule, constant(GAMMA), distribution, jnp.int32([EOS]), GAMMA
    )
    return output_distribution(method, inputs_of([list(PROMPT)]), BUDGET)


def worst_excess(distribution, distributions, lenience) -> float:
    """max of P(token | prefix) − p(token | prefix)/l over all prefixes of the outputs."""
    mass: dict[tuple, float] = {}
    for output, weight in distribution.items():
        for end in range(len(output) + 1):
            mass[output[:end]] = mass.get(output[:end], 0.0) + weight
    return max(
        weight / mass[prefix[:-1]] - distributions(prefix[:-1])[0][prefix[-1]] / lenience
        for prefix, weight in mass.items()
        if prefix and mass[prefix[:-1]] > 1e-9
    )


@pytest.mark.sweep
@pytest.mark.parametrize("distribution", SAMPLINGS)
def test_enumerated_distribution_is_the_predicted_one(distribution):
    """All outputs of up to 5 tokens, γ = 2: TV < 1e-12 for each l; no token above p/l; l < 1 is
    not exact, by more than 1e-3.
    """
    with jax.enable_x64(True):
        chosen, target, draft = (
            Sampling(**SAMPLINGS[distribution]),
            random_table(1),
            random_table(2),
        )
        distributions = Distributions(target, draft, chosen)
        exact = reference.sequence_distribution(
            target, inputs_of([list(PROMPT)]), chosen, {EOS}, BUDGET
        )
        for value in LENIENCES:
            rule = Lenient(value)
            found, lenience = enumerated(target, draft, chosen, rule), float(rule.lenience)
            position = partial(lenient_distribution, lenience=lenience)
            assert total_variation(found, predicted(distributions, position)) < 1e-12
            assert worst_excess(found, distributions, lenience) < 1e-12
            moved = total_variation(found, exact)
            assert moved < 1e-12 if value == 1 else moved > 1e-3


@pytree
class AcceptAll(Token):
    """Lenience without its bound: whatever was drafted is kept."""

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        slots = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
        return (slots == draft_len[:, None]).astype(target_logprobs.dtype)


@pytree
class OtherResidual(Token):
    """Lenience 0.3 with norm(max(0, p − l·q)): within the bound, but not the distribution that is
    stated."""

    def stop(self, *distributions):
        return Lenient(0.3).stop(*distributions)

    def next_probs(self, target_logprobs, draft_logprobs, *rest):
        scaled = draft_logprobs + jnp.log(jnp.float32(0.3).astype(draft_logprobs.dtype))
        return super().next_probs(target_logprobs, scaled, *rest)


@pytest.mark.sweep
def test_planted_faults():
    """The bound sees that everything is accepted; the predicted distribution sees another
    residual."""
    with jax.enable_x64(True):
        target, draft, lenience = random_table(1), random_table(2), float(np.float32(0.3))
        distributions = Distributions(target, draft, Sampling())
        everything = enumerated(target, draft, Sampling(), AcceptAll())
        assert worst_excess(everything, distributions, lenience) > 0.1
        other = enumerated(target, draft, Sampling(), OtherResidual())
        assert worst_excess(other, distributions, lenience) < 1e-12
        position = partial(lenient_distribution, lenience=lenience)
        assert total_variation(other, predicted(distributions, position)) > 1e-3


@pytest.mark.parametrize("lenience", LENIENCES)
def test_one_position_by_hand(lenience):
    """For P and Q: the predicted distribution sums to 1, stays below p/l, and α agrees with
    `theory`."""
    accepted, replaced = lenient_distribution(P, Q, lenience)
    np.testing.assert_allclose((accepted + replaced).sum(), 1)
    assert np.all(accepted + replaced <= P / lenience + 1e-12)
    rule = Lenient(lenience)
    np.testing.assert_allclose(rule.acceptance(log(P), log(Q)), accepted.sum(), rtol=1e-6)
    drafts = jnp.asarray(np.arange(8, dtype=np.int32)[:, None])
    rows = (
        jnp.tile(log(P), (8, 2, 1)),
        jnp.tile(log(Q), (8, 1, 1)),
        drafts,
        jnp.ones((8,), jnp.int32),
    )
    survival = surviving(rule.stop(*rows))[:, 0]
    np.testing.assert_allclose(survival, np.minimum(1, P / (lenience * Q)), rtol=1e-5)
    found = rule.next_probs(*rows, jnp.zeros((8,), jnp.int32))
    np.testing.assert_allclose(found[0], [0.75, 0.25, 0, 0, 0, 0, 0, 0], atol=1e-6)


# Temperature 0.


def greedy_rule(lenience) -> LenientArgmax:
    rule = Lenient(lenience).under(Sampling(0.0))
    assert isinstance(rule, LenientArgmax)
    return rule


@pytest.mark.parametrize(
    ("lenience", "kept"),
    [(1.0, [0]), (0.8, [0]), (0.7, [0, 1]), (0.4, [0, 1, 2]), (0.1, [0, 1, 2, 3, 4, 5])],
)
def test_greedy_by_hand(lenience, kept):
    """p/max p = 1, .714, .429, .286, .2, .114, .057, .057: kept where ≥ l; then the argmax."""
    rule, greedy = greedy_rule(lenience), Sampling(0.0)
    target = rule.target_distribution(log(P), greedy)  # un-standardised, where Token reads one-hot
    np.testing.assert_allclose(np.exp(target), P, rtol=1e-5)
    drafts = jnp.asarray(np.arange(8, dtype=np.int32)[:, None])
    draft = jnp.asarray(log(np.eye(8))[:, None])
    rows = jnp.tile(target, (8, 2, 1)), draft, drafts, jnp.ones((8,), jnp.int32)
    survival = np.asarray(surviving(rule.stop(*rows))[:, 0])
    np.testing.assert_array_equal(survival, np.isin(np.arange(8), kept))
    chance = rule.acceptance(jnp.tile(target, (8, 1)), draft[:, 0])
    np.testing.assert_array_equal(chance, survival)
    for accepted in (0, 1):
        found = rule.next_probs(*rows, jnp.full((8,), accepted, jnp.int32))
        np.testing.assert_array_equal(found, np.tile(np.eye(8)[0], (8, 1)))


def test_greedy_stops_at_the_first_that_is_not_kept():
    """Tokens 1, 5, 0 at l = .5: kept, not kept, never tested; and past the draft's end nothing."""
    rule = greedy_rule(0.5)
    target = jnp.tile(log(P), (2, 4, 1))
    drafts = jnp.int32([[1, 5, 0], [1, 0, 0]])
    survival = surviving(rule.stop(target, target[:, :3], drafts, jnp.int32([3, 2])))
    np.testing.assert_array_equal(survival, [[1, 0, 0], [1, 1, 0]])


def test_greedy_ties():
    """Among equals l = 1 keeps the first alone, as the argmax does; l < 1 keeps both."""
    target = log(np.array([0.2, 0.4, 0.4]))
    for lenience, kept in ((1.0, [0, 1, 0]), (0.9, [0, 1, 1])):
        chance = greedy_rule(lenience).acceptance(jnp.tile(target, (3, 1)), log(np.eye(3)))
        np.testing.assert_array_equal(chance, kept)


def decode(rule, distribution, batch, budget, gamma, *, target=None):
    """The state after the real jitted loop, on the host: one prompt, `batch` rows of it."""
    target = random_table(1, dtype=jnp.float32) if target is None else target
    draft = ModelDrafter(random_table(2, dtype=jnp.float32))
    method = speculative.Speculative(
        target, draft, rule, constant(gamma), distribution, jnp.int32([-1]), gamma
    )
    rows = jnp.arange(batch, dtype=jnp.int32)
    context, state = loop.start(
        method,
        repeat(inputs_of([list(PROMPT)]), batch),
        row_keys(jax.random.key(0), rows, rows),
        jnp.full((batch,), budget, jnp.int32),
        buffer_len=len(PROMPT) + budget + gamma + 1,
    )
    return jax.device_get(loop.decode(method, context, state).replace(keys=()))


@pytest.mark.sweep
def test_greedy_loop():
    """40 tokens: l = 1 gives the argmax; at l = .2 each has p ≥ l·max p, and more are accepted."""
    greedy, target = Sampling(0.0), random_table(1, dtype=jnp.float32)
    states = {value: decode(Lenient(value), greedy, 1, 40, 3) for value in (1.0, 0.2)}
    exact = decode(Token(), greedy, 1, 40, 3)
    np.testing.assert_array_equal(states[1.0].tokens[0, :42], exact.tokens[0, :42])
    assert states[1.0].stats.accepted == exact.stats.accepted < states[0.2].stats.accepted
    tokens = states[0.2].tokens[0, :42].tolist()
    prefixes = [tuple(tokens[:end]) for end in range(2, 42)]
    logits = logits_after(target, inputs_of([list(PROMPT)]), prefixes, 42)
    gap = logits.max(axis=1) - logits[np.arange(40), tokens[2:]]
    assert np.all(gap <= -np.log(0.2) + 1e-5)
    assert gap.max() > 0


# What the jitted loop accepts.


@pytest.mark.parametrize("lenience", [0.0, -0.5, 1.5, float("nan")])
def test_out_of_range(lenience):
    with pytest.raises(ValueError, match=r"lenience=.* must be a number in \(0, 1\]"):
        Lenient(lenience)
