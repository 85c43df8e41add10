"""The output's distribution is the target's: enumerated in float64, then sampled through the real
loops."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from reference import chi_square, sequence_distribution, total_variation
from specjax import autoregressive, loop, speculative
from specjax import sampling as smp
from specjax.dice import Dice
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.policies.constant import Constant
from specjax.pytrees import pytree
from specjax.rules import Block, Gumbel, Token, at_tokens
from specjax.sampling import Purpose, Sampling
from specjax.state import unfinished
from specjax.testing.enumeration import STATES, output_distribution
from table_models import hopeless, inputs_of, one_hot, random_table, repeat
from tiny_models import covering, quick, slow
from toy_policies import Erratic, TailReader

EOS = 2
PROMPT = [1, 0]
BUDGET = 6

# What the loop can be built from. A new rule, policy or drafter is one more line.

RULES = {"token": Token(), "block": Block()}

SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "plain": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "all": {"temperature": 0.5, "top_k": 2, "top_p": 0.8},
    "min-p": {"filters": ["user_sampling:min_p(0.4)"]},  # a user's file
}

DRAFTERS = {
    "other": lambda target: random_table(2),
    "same": lambda target: target,
    "hopeless": hopeless,
    "one-hot": lambda target: one_hot(3),
}


POLICIES = {  # and γ_max
    "constant 1 of 1": (constant(1), 1),
    "constant 1 of 3": (constant(1), 3),
    "constant 2 of 3": (constant(2), 3),
    "constant 3 of 3": (constant(3), 3),
    "erratic of 3": (Erratic(), 3),
}


def method_of(target, drafter, distribution, rule, policy, gamma_max) -> speculative.Speculative:
    eos = jnp.int32([EOS])
    drafter = ModelDrafter(drafter)
    return speculative.Speculative(target, drafter, rule, policy, distribution, eos, gamma_max)


def biases(
    distribution, rule, policy, gamma_max, drafters=DRAFTERS, budget=BUDGET, **fault
) -> dict[str, float]:
    """Total variation between the loop's distribution and the target's, for each drafter."""
    target, inputs = random_table(1), inputs_of([PROMPT])
    expected = sequence_distribution(target, inputs, distribution, {EOS}, budget)
    found = {}
    for name, make in drafters.items():
        method = method_of(target, make(target), distribution, rule, policy, gamma_max)
        found[name] = total_variation(
            output_distribution(method, inputs, budget, **fault), expected
        )
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rule", "distribution", "policy"), covering(RULES, SAMPLINGS, POLICIES, count=14)
)
def test_enumerated_distribution_is_the_targets(rule, distribution, policy, double):
    """All outputs of up to 6 tokens over 3, EOS and the length limit included: TV < 1e-12."""
    found = biases(Sampling(**SAMPLINGS[distribution]), RULES[rule], *POLICIES[policy])
    assert max(found.values()) < 1e-12, found


@pytest.mark.sweep
@pytest.mark.parametrize("distribution", quick(["greedy", "warm"], "warm"))
@pytest.mark.parametrize("rule", RULES)
def test_narrower_passes(rule, distribution, double):
    """Drafts of 0 to 3 tokens, γ_max = 3, with passes of 1 and 2 positions too: TV < 1e-12."""
    target, inputs = random_table(1), inputs_of([PROMPT])
    chosen = Sampling(**SAMPLINGS[distribution])
    expected = sequence_distribution(target, inputs, chosen, {EOS}, 4)
    for policy in (constant(1), Erratic()):
        method = method_of(target, random_table(2), chosen, RULES[rule], policy, 3)
        rows = STATES * 3**4 * 4  # every outcome of a round, side by side
        method = dataclasses.replace(method, passes=(rows, 2 * rows))
        assert total_variation(output_distribution(method, inputs, 4), expected) < 1e-12


@pytest.mark.sweep
def test_draft_longer_than_the_budget(double):
    """γ = 4 with 3 tokens to give, a prompt of one token and a source: TV < 1e-12."""
    target, inputs = random_table(4), inputs_of([[0]], [[2, 1, 1]])
    method = method_of(target, random_table(5), Sampling(), Token(), constant(4), 4)
    expected = sequence_distribution(target, inputs, Sampling(), {EOS}, 3)
    assert total_variation(output_distribution(method, inputs, 3), expected) < 1e-12


# Draws of the Gumbel rule are not fresh in each round, so there is more to say than a distribution.


@pytest.mark.sweep
@pytest.mark.parametrize("policy", POLICIES)
def test_gumbel_tokens_are_those_of_plain_decoding(policy, double):
    """1,000 rows of up to 6 tokens, for each drafter: the same tokens by the same keys; of the
    target's own drafts none is rejected.
    """
    rows, distribution = 1000, Sampling(**SAMPLINGS["top-p"])
    policy, gamma_max = POLICIES[policy]
    target, inputs = random_table(1), repeat(inputs_of([PROMPT]), rows)
    zeros, sample = jnp.zeros((rows,), jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    start = inputs, smp.row_keys(jax.random.key(0), zeros, sample), zeros + BUDGET
    room = {"buffer_len": len(PROMPT) + BUDGET + gamma_max + 1}
    plain = autoregressive.Autoregressive(target, distribution, jnp.int32([EOS]), Gumbel())
    state = loop.decode(plain, *loop.start(plain, *start, **room))
    expected = outputs_of(state)
    for name, make in DRAFTERS.items():
        method = method_of(target, make(target), distribution, Gumbel(), policy, gamma_max)
        state = loop.decode(method, *loop.start(method, *start, **room))
        np.testing.assert_array_equal(outputs_of(state), expected, name)
        stats = state.stats
        if name != "hopeless":
            assert np.sum(stats.accepted) > 0
        if name == "same":  # what was drafted is kept, but for what an EOS cuts off
            lost = np.asarray(stats.verified - stats.accepted)
            assert np.all(lost[np.asarray(stats.emitted) == BUDGET] == 0)


def outputs_of(state) -> np.ndarray:
    """(B, BUDGET) new tokens, −1 past a row's end."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    known = np.arange(tokens.shape[1])[None, :] < length[:, None]
    return np.where(known, tokens, -1)[:, len(PROMPT) : len(PROMPT) + BUDGET]


# Faults that enumeration must see, each one of the traps that implementations fall into.


def peeking_step(method, contexts, state, dice):
    """Drops a drafted token that its own distribution thinks unlikely, after having seen it."""
    drafts, state = speculative.draft(method, contexts.drafter, state, dice)
    doubtful = at_tokens(drafts.logprobs, drafts.tokens) < np.log(0.4)
    first = jnp.argmax(doubtful, axis=1).astype(jnp.int32)
    kept = jnp.where(jnp.any(doubtful, axis=1), first, drafts.length)
    kept = jnp.minimum(kept, drafts.length)
    return _finish(method, contexts, state, drafts._replace(length=kept), dice)


def raw_draft_step(method, contexts, state, dice):
    """Reports the draft's unfiltered distributions; `drawn_from` says that tokens come from
    others."""
    raw = dataclasses.replace(method, sampling=Sampling())
    drafts, state = speculative.draft(raw, contexts.drafter, state, dice)
    return _finish(method, contexts, state, drafts, dice)


def _finish(method, contexts, state, drafts, dice):
    verdict, state = speculative.judge(method, contexts, dice, state, drafts)
    return speculative.conclude(method, contexts.drafter, state, drafts, verdict)


def filtered_distributions(logprobs):
    return smp.standardize(logprobs, Sampling(**SAMPLINGS["top-k"]))


def likeliest_token(logprobs):
    """The draft takes its argmax, while its softmax is reported."""
    return smp.standardize(logprobs, Sampling(0.0))


FAULTS = {
    "peek, then drop": ("plain", Token(), {"step": peeking_step}),
    "raw q": ("top-k", Token(), {"step": raw_draft_step, "drawn_from": filtered_distributions}),
    "argmax draft": ("plain", Token(), {"drawn_from": likeliest_token}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_enumeration_sees(fault, double):
    """A planted bias moves the distribution by more than 1e-3."""
    distribution, rule, planted = FAULTS[fault]
    drafters = {"other": DRAFTERS["other"]}
    found = biases(Sampling(**SAMPLINGS[distribution]), rule, constant(2), 3, drafters, **planted)
    assert found["other"] > 1e-3


# Enumeration assumes fresh draws. Faulty keys show only in samples of the real jitted loops.

ROWS = 1 << 14
SAMPLES = 7 * ROWS
LENGTH = 4


def counts_of(decode, method, buffer_len, samples=SAMPLES) -> tuple[collections.Counter, float]:
    """How often each output came, and the share of rows with several rounds."""
    inputs = repeat(inputs_of([PROMPT]), ROWS)
    counts, several = collections.Counter(), 0
    zeros, budget = jnp.zeros((ROWS,), jnp.int32), jnp.full((ROWS,), LENGTH, jnp.int32)
    for first in range(0, samples, ROWS):
        sample = jnp.arange(first, first + ROWS, dtype=jnp.int32)
        keys = smp.row_keys(jax.random.key(0), zeros, sample)
        context, state = loop.start(method, inputs, keys, budget, buffer_len=buffer_len)
        state = jax.device_get(decode(method, context, state).replace(keys=()))
        several += np.sum(state.rounds > 1)
        known = np.arange(state.tokens.shape[1])[None, :] < state.length[:, None]
        outputs = np.where(known, state.tokens, -1)[:, len(PROMPT) :]
        for output, count in zip(*np.unique(outputs, axis=0, return_counts=True), strict=True):
            counts[tuple(int(token) for token in output if token >= 0)] += int(count)
    return counts, several / samples


def p_value(distribution, counts) -> float:
    """Chi-square against the distribution of the target's outputs; printed."""
    target, inputs = random_table(1, dtype=jnp.float32), inputs_of([PROMPT])
    p = chi_square(counts, sequence_distribution(target, inputs, distribution, {EOS}, LENGTH))
    print(f"p = {p:.3g} with n = {counts.total()}")
    return p


def speculative_p_value(
    distribution, policy, decode=loop.decode, samples=SAMPLES, rule=RULES["token"]
) -> float:
    target, draft = (random_table(seed, dtype=jnp.float32) for seed in (1, 2))
    method = method_of(target, draft, distribution, rule, policy, 2)
    buffer_len = len(PROMPT) + LENGTH + method.gamma_max + 1
    counts, several = counts_of(decode, method, buffer_len, samples)
    assert several > 0.3
    return p_value(distribution, counts)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rule", "distribution", "policy"),
    [
        (Token(), "top-k", constant(2)),
        slow((Token(), "warm", Erratic())),
        (Block(), "warm", constant(2)),
        slow((Block(), "top-p", Erratic())),
        slow((Gumbel(), "warm", constant(2))),
        slow((Gumbel(), "plain", TailReader())),
        slow((Token(), "warm", constant(2))),
        slow((Token(), "top-p", constant(2))),
        slow((Block(), "plain", TailReader())),
        slow((Gumbel(), "top-p", Erratic())),
    ],
)
def test_speculative_samples_follow_the_target(rule, distribution, policy):
    """114,688 outputs of up to 4 tokens, a third or more in several rounds: p > 1e-4."""
    assert speculative_p_value(Sampling(**SAMPLINGS[distribution]), policy, rule=rule) > 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("distribution", "rule"),
    [("top-k", Token()), *map(slow, (("warm", Gumbel()), ("warm", Token()), ("top-p", Token())))],
)
def test_autoregressive_samples_follow_the_target(distribution, rule):
    """114,688 outputs of up to 4 tokens: p > 1e-4."""
    distribution = Sampling(**SAMPLINGS[distribution])
    target = random_table(1, dtype=jnp.float32)
    method = autoregressive.Autoregressive(target, distribution, jnp.int32([EOS]), rule)
    counts, _ = counts_of(loop.decode, method, len(PROMPT) + LENGTH + 1)
    assert p_value(distribution, counts) > 1e-4


class NextLikeDraft(Dice):
    """The token after a rejection by the noise of the first drafted token."""

    def next(self, state, probs):
        return smp.draw(smp.fold(state.keys, state.rounds, Purpose.DRAFT, 0), probs)


class EveryRoundAlike(Dice):
    """Keys that know the row, the slot and the purpose, but not the round."""

    def draft(self, state, slot, logprobs, best):
        return super().draft(state.replace(rounds=0 * state.rounds), slot, logprobs, best)

    def accepted(self, state, stop):
        return super().accepted(state.replace(rounds=0 * state.rounds), stop)

    def next(self, state, probs):
        return super().next(state.replace(rounds=0 * state.rounds), probs)


class EverySlotAlike(Dice):
    """All drafted tokens of a round share their noise."""

    def draft(self, state, slot, logprobs, best):
        return super().draft(state, 0 * slot, logprobs, best)


@pytest.mark.sweep
@pytest.mark.parametrize("dice", [NextLikeDraft, *map(slow, (EveryRoundAlike, EverySlotAlike))])
def test_chi_square_sees_a_faulty_key(dice):
    """Each reuse of a key gives p < 1e-4 by the same loop and test, with n = 32,768 already."""

    @jax.jit
    def decode(method, contexts, state):
        def body(state):
            return speculative.step(method, contexts, state, dice())[0]

        return jax.lax.while_loop(unfinished, body, state)

    assert speculative_p_value(Sampling(), constant(2), decode, 2 * ROWS) < 1e-4


class DraftByPosition(Dice):
    """Drafted tokens by absolute position: after a rejection their noise comes again."""

    def draft(self, state, slot, logprobs, best):
        keys = smp.fold(state.keys, state.length + slot, Purpose.DRAFT)
        return smp.draw(keys, jnp.exp(logprobs))


@jax.jit
def decode_by_position(method, contexts, state):
    """`loop.decode` with those dice."""

    def body(state):
        return speculative.step(method, contexts, state, DraftByPosition())[0]

    return jax.lax.while_loop(unfinished, body, state)


@pytest.mark.slow
def test_noise_by_position_fails_under_the_block_rule():
    """65,536 outputs: p < 1e-4, for what the block rule keeps depends on the rejected tail. The
    token rule never reads it, and passes: p > 1e-4.
    """
    options = {"decode": decode_by_position, "samples": 4 * ROWS}
    distribution, policy = Sampling(), constant(2)
    assert speculative_p_value(distribution, policy, rule=Block(), **options) < 1e-4
    assert speculative_p_value(distribution, policy, rule=Token(), **options) > 1e-4


VOCABULARY, TAIL = 150_000, 0.02


@pytree
class Unconditional:
    """The same distribution after any prefix."""

    table: Array  # (V,) logits

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    def start(self, inputs, buffer_len):
        return (), ()

    def __call__(self, tokens, start, context, cache):
        return jnp.zeros((*tokens.shape, 1), jnp.float32), cache

    def logits(self, hidden):
        return jnp.broadcast_to(self.table, (*hidden.shape[:-1], self.vocab_size))


def with_tail(mass: float) -> Unconditional:
    """All but `mass` on 100 ids, and that on all others."""
    rare = VOCABULARY - 100
    return Unconditional(jnp.log(jnp.float32([(1 - mass) / 100] * 100 + [mass / rare] * rare)))


BY_POSITION = pytest.param("plain, by position", marks=pytest.mark.slow)


BLOCK = pytest.param("block", marks=pytest.mark.slow)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", BY_POSITION, slow("token"), BLOCK])
def test_the_tail_of_a_large_vocabulary(name):
    """V = 150,000 with 2% of the mass on rare ids, 1.3e-7 each; a draft that gives them 4%. Real
    loops, n = 6,000 tokens: 120 rare ones are due, within 3 deviations. Noise
    of 23 bits gives 78 in the speculative loop.
    """
    rows, budget, distribution = 40, 150, Sampling(1.0)
    never, target = jnp.int32([-1]), with_tail(TAIL)
    inputs, index = repeat(inputs_of([[0]]), rows), jnp.arange(rows, dtype=jnp.int32)
    start = inputs, smp.row_keys(jax.random.key(0), index, 0 * index), 0 * index + budget
    if name in RULES:
        method: loop.Method = method_of(
            target, with_tail(0.04), distribution, RULES[name], constant(2), 2
        )
    else:
        rule = Token() if name == "plain" else Gumbel()
        method = autoregressive.Autoregressive(target, distribution, never, rule)
    method = dataclasses.replace(method, eos_ids=never)
    state = loop.decode(method, *loop.start(method, *start, buffer_len=160))
    tokens = np.asarray(state.tokens)[:, 1 : budget + 1]
    due = TAIL * tokens.size
    z = (np.sum(tokens >= 100) - due) / np.sqrt(due * (1 - TAIL))
    print(f"{np.sum(tokens >= 100)} of {due:.0f}, z = {z:.2f}")
    assert abs(z) < 3


@pytest.mark.sweep
def test_plain_decoding_draws_as_a_round_without_a_draft():
    """The same tokens by the same keys: no speedup comes from a cheaper draw."""
    target, draft = (random_table(seed, dtype=jnp.float32) for seed in (1, 2))
    rows, never = 500, Constant(jnp.int32(0))
    inputs, index = repeat(inputs_of([PROMPT]), rows), jnp.arange(rows, dtype=jnp.int32)
    start = inputs, smp.row_keys(jax.random.key(0), index, 0 * index), 0 * index + BUDGET
    room = {"buffer_len": len(PROMPT) + BUDGET + 2}
    method = method_of(target, draft, Sampling(1.0), Token(), never, 1)
    plain = autoregressive.Autoregressive(target, Sampling(1.0), jnp.int32([EOS]))
    state = loop.decode(plain, *loop.start(plain, *start, **room))
    silent = loop.decode(method, *loop.start(method, *start, **room))
    assert np.sum(silent.stats.verified) == 0
    np.testing.assert_array_equal(outputs_of(silent), outputs_of(state))
