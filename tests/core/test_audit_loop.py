"""The audit of samples, of rules and of slots: also those of the package."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import policies, rules
from specjax.audit import audit, auditing
from specjax.audit.cases import algorithm1
from specjax.audit.findings import margin
from specjax.policies import Costs
from specjax.policies.base import Observation
from specjax.policies.slots import allocate, rated
from specjax.rounds import Drafts


def sampler(logits, temperature, rng, *, lost=False):
    if temperature == 0 and not lost:
        return np.argmax(logits)
    p = np.exp((logits - logits.max()) / (1.0 if lost else temperature))
    return rng.choice(len(p), p=p / p.sum())


@pytest.mark.parametrize("lost", [False, True])
def test_samples_of_numpy(lost):
    found = audit(functools.partial(sampler, lost=lost), "sampler", rng="generator", draws=1000)
    assert found.exact == (not lost)
    assert (found.verdict.startswith("biased: TV at least 0.")) == lost
    assert found.at_least < found.total_variation


def late(drafts, draft_probs, target_probs, rng):
    """From the second token on the residual is right for one-hot drafts alone."""
    tokens = algorithm1(drafts, draft_probs, target_probs, rng)
    last = len(tokens) - 1
    if 0 < last < len(drafts):
        left = np.where(np.arange(len(target_probs[0])) == drafts[last], 0.0, target_probs[last])
        tokens[-1] = rng.choice(len(left), p=left / left.sum())
    return tokens


def by_key(drafts, draft_probs, target_probs, key, *, late=False):
    """Algorithm 1 for one row of γ + 1 tokens; `late`: with the residual of the function above."""
    accepting, drawing = jax.random.split(key)
    gamma = drafts.shape[0]
    each = jnp.arange(gamma)
    kept = jax.random.uniform(accepting, (gamma,)) * draft_probs[each, drafts]
    count = jnp.cumprod(kept < target_probs[each, drafts]).sum().astype(jnp.int32)
    draft = jnp.concatenate([draft_probs, jnp.zeros_like(draft_probs[:1])])
    left = jnp.maximum(target_probs[count] - draft[count], 0.0)
    left = jnp.where(left.sum() > 0, left, target_probs[count])
    drafted = jnp.arange(left.shape[0]) == jnp.append(drafts, -1)[count]
    left = jnp.where(late & (count > 0) & (count < gamma) & ~drafted, target_probs[count], left)
    token = jax.random.categorical(drawing, jnp.log(left)).astype(jnp.int32)
    return jnp.append(drafts, 0).at[count].set(token), count + 1


@pytest.fixture
def three_ids(monkeypatch):
    """Keeps the drawn tables with V = 3 and γ = 2, which show the error of `late`."""
    few = auditing.few
    monkeypatch.setattr(
        auditing, "few", lambda problems: [p for p in few(problems) if p.size == (2, 3, 1)]
    )


@pytest.mark.parametrize(("wrong", "seed"), [(False, 0), (True, 0), (True, 1), (True, 2)])
def test_late_errors_by_numpy(wrong, seed, three_ids):
    found = audit(late if wrong else algorithm1, rng="generator", draws=12_000, seed=seed)
    assert (found.exact, found.fault) == (not wrong, ""), str(found)


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", [False, True])
def test_late_errors_by_jax(wrong, three_ids):
    verify = functools.partial(by_key, late=wrong)
    for seed in range(3 if wrong else 1):
        found = audit(verify, rng="key", draws=50_000, dtype="float32", seed=seed)
        assert (found.exact, found.fault) == (not wrong, ""), str(found)


def test_the_margin_holds():
    """The empirical distribution of fair draws is within it, for few and many outcomes."""
    rng = np.random.default_rng(0)
    for size, draws in ((2, 50), (8, 1000), (100, 1000)):
        p = rng.dirichlet(np.ones(size))
        apart = np.abs(rng.multinomial(draws, p, 2000) / draws - p).sum(axis=1) / 2
        assert np.mean(apart > margin(size, draws, 1)) <= 1e-3
        assert apart.max() > margin(size, draws, 1) / 4  # and is no more than a few times too wide


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "figure"), [("token", 0.0), ("block", 0.0), ("lenient(lenience=0.5)", 0.2)]
)
def test_rules(rule, figure):
    """p = (.7, .3), q = (.5, .5): with l = .5 the draft is kept whole."""
    found = audit(rules.parse(rule))
    assert found.exact == (figure == 0)
    assert found.findings[0].total_variation == pytest.approx(figure, abs=1e-6)


def test_tokens_of_jax_are_integers(three_ids):
    found = audit(lambda x, q, p, key: (jnp.float32([jnp.nan] * 3), 1), rng="key", draws=9)
    assert "returns numbers of dtype float32, where integers are due" in found.verdict


class Wide(rules.Token):
    def next_probs(self, *arguments):
        return jnp.pad(super().next_probs(*arguments), ((0, 0), (0, 1)))


class Broken(rules.Token):
    def stop(self, *arguments):
        return {}["stop"]


class Nan(rules.Token):
    def stop(self, *arguments):
        return jnp.nan * super().stop(*arguments)


def test_rules_that_return_no_distributions():
    for rule, words in ((Wide(), "return shapes"), (Broken(), r"raises KeyError: 'stop'\.")):
        with pytest.raises(ValueError, match=words):
            audit(rule)
    assert "probabilities that are not finite" in audit(Nan()).verdict


def test_a_rule_with_noise_is_sent_elsewhere():
    with pytest.raises(ValueError, match="check_rule"):
        audit(rules.Gumbel())


# --- Slots --------------------------------------------------------------------------------------

BY_SLOT = {
    "fixed": policies.fixed(2),
    "early_stop": policies.early_stop(
        Costs(0.05, [1.0, 1.1, 1.9, 2.0, 4.0], positions=[2, 3, 4, 6, 12])
    ),
    "threshold": policies.threshold(0.4),
}


@jax.jit
def lengths_by(policy, probs, live, gamma):
    """How many of `gamma` tokens of each row a policy keeps, by the functions that the loop calls.

    `probs` (B, γ_max, V) are the draft's distributions; `live` (B,) marks the rows in use.
    """
    rows, most, _ = probs.shape
    state = policy.init(jax.random.split(jax.random.key(0), rows), most)
    begun, worth = policy.begin(state, live, most)
    state, drafts = begun, Drafts.empty(jnp.full(rows, worth), most, probs[:, 0], by_slot=True)
    for slot, logs in enumerate(jnp.moveaxis(jnp.log(probs), 1, 0)):
        seen = Observation(jnp.int32(slot), live, logs, logs, logs)
        state, _ = policy.keep_drafting(state, seen)
        drafts = rated(policy, state, drafts, seen.slot)
    drafts = drafts._replace(length=jnp.minimum(drafts.allowed, gamma))
    return allocate(policy, begun, drafts, live, jnp.int32([2, 3, 4, 6, 12])).length


def keeps_by(policy, *, own: bool):
    """A length rule by a policy; with `own` its chances read the drafted token itself."""

    known = {}  # most runs differ in what follows the lengths

    def lengths(drafts, draft_probs, rng):
        if own:
            draft_probs = draft_probs * (np.arange(draft_probs.shape[2]) == drafts[:, :, None])
        rows, gamma, size = draft_probs.shape
        probs = np.zeros((3, 3, 3))  # one shape for all tables, so that it compiles once
        probs[:rows, :gamma, :size] = draft_probs
        key = probs.tobytes(), rows, gamma
        if key not in known:
            live = np.arange(3) < rows
            known[key] = np.asarray(lengths_by(policy, probs, live, np.int32(gamma)))
        return known[key][:rows]

    return lengths


@pytest.mark.parametrize("name", BY_SLOT)
def test_allocation(name):
    """Handed out as in the loop: exact, and biased once a chance reads its own token."""

    found = audit(keeps_by(BY_SLOT[name], own=False), "lengths")
    assert (found.fault, found.total_variation < 1e-12) == ("", True)
    assert audit(keeps_by(BY_SLOT[name], own=True), "lengths").total_variation > 0.05
