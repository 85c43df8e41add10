"""Enumeration of the speculative loop's outputs, through the real `step`, outcome by outcome.

A round runs once for every draft, every accepted count and every next token, with prescribed dice.
Its probability follows from the distributions that the `Round` reports. Rows with the same tokens
and the same policy state are merged before the next round.
"""

import functools
import itertools
from collections.abc import Callable, Collection
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax import loop, speculative
from specjax import sampling as smp
from specjax.dice import Dice
from specjax.drafters.base import Fed
from specjax.drafters.switch import Switched
from specjax.rules import at_tokens
from specjax.sampling import Sampling, row_keys
from specjax.testing.tables import logits_after, repeat
from specjax.types import Inputs, Model

# Fields that all rows share.
SHARED = "keys", "target_finite", "draft_finite", "rule_sound", "until"
STATES = 53  # states expanded at a time; a prime, so that no other axis is taken for the batch


def total_variation(left: dict, right: dict) -> float:
    """Total variation distance: half the sum of absolute differences."""
    return sum(abs(left.get(k, 0.0) - right.get(k, 0.0)) for k in left.keys() | right.keys()) / 2


def standardized(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities (V,) that the loop samples from, by its own `standardize`."""
    return np.exp(np.asarray(smp.standardize(jnp.asarray(logits), sampling), np.float64))


def sequence_distribution(
    model: Model,
    inputs: Inputs,
    sampling: Sampling,
    eos_ids: Collection[int],
    budget: int,
    *,
    distribution: Callable[[np.ndarray, Sampling], np.ndarray] = standardized,
) -> dict[tuple, float]:
    """P(output) for every output of a model without speculation, through EOS and the length limit.

    Args:
      inputs: the first row is used.
      distribution: maps logits (V,) to the probabilities of the next token.
    """
    done: dict[tuple, float] = {}
    prompt = tuple(int(t) for t in inputs.prompt[0, : int(inputs.prompt_len[0])])
    unfinished = {(): 1.0}
    for _ in range(budget):
        if not unfinished:
            break
        prefixes = [prompt + output for output in unfinished]
        rows = logits_after(model, inputs, prefixes, len(prompt) + budget)
        grown: dict[tuple, float] = {}
        for (output, weight), logits in zip(unfinished.items(), rows, strict=True):
            for token, prob in enumerate(distribution(logits, sampling)):
                if prob > 0:
                    (done if token in eos_ids else grown)[(*output, token)] = weight * prob
        unfinished = grown
    return done | unfinished


class Forced(Dice):
    """Dice with prescribed outcomes for each row."""

    def __init__(self, drafts, accepted, next_token):
        self.drafts, self.count, self.token = drafts, accepted, next_token

    def draft(self, state, slot, logprobs, best):
        return jax.lax.dynamic_index_in_dim(self.drafts, slot, 1, keepdims=False)

    def accepted(self, state, stop):
        return self.count

    def next(self, state, probs):
        return self.token


def output_distribution(
    method: speculative.Speculative,
    inputs: Inputs,
    budget: int,
    *,
    step=speculative.step,
    drawn_from=None,
    seed: int = 0,
) -> dict[tuple, float]:
    """P(output) for every output of `inputs`' first row.

    Args:
      step: `speculative.step`, or one with a planted fault.
      drawn_from: maps the reported distributions (B, γ, V) to those that drafted tokens come from;
        None: the same, as in a correct loop.
      seed: picks which of the merged rows continues, with its own cache.
    """
    zeros = jnp.zeros((STATES,), jnp.int32)
    contexts, first = loop.start(
        method,
        repeat(inputs, STATES),
        row_keys(jax.random.key(0), zeros, zeros),
        jnp.full((STATES,), budget, jnp.int32),
        buffer_len=inputs.prompt.shape[1] + budget + method.slots,
    )
    shared, expander = _shared(first), _expander(step, drawn_from)

    def expand(state):
        return expander(method, contexts, state.replace(**shared))

    pool = jax.tree.map(lambda x: np.asarray(x)[:1], _batched(first))
    return _enumerated(expand, STATES, pool, np.asarray(inputs.prompt_len)[:1], seed)


def _enumerated(expand, size, pool, starts, seed) -> dict[tuple, float]:
    """Run rounds until all outputs have ended: P(output), or P(outputs of all rows together).

    Args:
      expand: maps `size` states to theirs after each outcome, (size, outcomes, …), with chances.
      pool: the first state; each leaf begins with an axis of states, maybe of rows, and its own.
      starts: tokens of each row's prompt.
    """
    rng, weights = np.random.default_rng(seed), np.ones(1)
    distribution: dict[tuple, float] = {}
    while len(weights):
        grown, chances = [], []
        for at in range(0, len(weights), size):
            index = np.minimum(np.arange(at, at + size), len(weights) - 1)
            states = jax.tree.map(lambda x, index=index: jnp.asarray(x[index]), pool)
            states, chance = jax.device_get(expand(states))
            chance = weights[at : at + size, None] * chance[: len(weights) - at]
            kept = np.nonzero(chance)
            grown.append(jax.tree.map(lambda x, kept=kept: x[kept], states))
            chances.append(chance[kept])
        pool = jax.tree.map(lambda *xs: np.concatenate(xs), *grown)
        weights = np.concatenate(chances)
        ended = pool.done.reshape(len(weights), -1).all(axis=1)
        for world in np.flatnonzero(ended):
            rows = np.atleast_2d(pool.tokens[world]), starts, np.atleast_1d(pool.length[world])
            every = (tuple(row[a:b].tolist()) for row, a, b in zip(*rows, strict=True))
            output = tuple(every) if pool.tokens.ndim == 3 else next(every)
            distribution[output] = distribution.get(output, 0.0) + float(weights[world])
        pool, weights = jax.tree.map(lambda x, on=~ended: x[on], pool), weights[~ended]
        pool, weights = _merge(pool, weights, rng)
    return distribution


def _shared(state) -> dict:
    return {name: getattr(state, name) for name in SHARED}


def _batched(state):
    """The state without the `SHARED` fields: leaves with a row for each state."""
    return state.replace(**dict.fromkeys(SHARED, ()))


@functools.cache
def _expander(step, drawn_from):
    """Make a jitted function from STATES rows to (STATES, outcomes) rows with probabilities."""

    # Compilation takes nearly all of the time.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def expand(method, contexts, state):
        drawn = 0 if getattr(method, "chosen", False) else method.slots - 1
        forced = _outcomes(method.target.vocab_size, drawn, method.slots)
        count = len(forced[1])

        def spread(x):
            rows = x.ndim > 0 and x.shape[0] == STATES
            return jnp.repeat(x, count, axis=0) if rows else x

        dice = Forced(*(jnp.tile(x, (STATES,) + (1,) * (x.ndim - 1)) for x in forced))
        wide_contexts, wide_state = jax.tree.map(spread, (contexts, state))
        new, round_ = step(method, wide_contexts, wide_state, dice)
        found = _batched(new), _chance(round_, drawn_from)
        return jax.tree.map(lambda x: x.reshape(STATES, count, *x.shape[1:]), found)

    return expand


def _outcomes(vocab_size, drawn, ends):
    """All outcomes of the dice in a round: drawn tokens (O, drawn), accepted counts (O,), next
    tokens (O,)."""
    axes = [range(vocab_size)] * drawn + [range(ends), range(vocab_size)]
    table = jnp.asarray(np.array(list(itertools.product(*axes)), np.int32))
    return table[:, :drawn], table[:, drawn], table[:, drawn + 1]


def _chance(round_, drawn_from):
    """The probability of each row's outcome.

    Tokens past the end of a draft are arbitrary, and count as drawn uniformly. Tokens that a policy
    left out were drawn, and decisions may depend on them.
    """
    ending, drafts = round_.accepted, round_.drafts
    if round_.nodes is None:
        slots = jnp.arange(round_.gamma_max, dtype=jnp.int32)
        submitted = slots[None, :] < drafts.drawn[:, None]
    else:
        ending, drafts, submitted = round_.node, round_.nodes, round_.nodes.submitted
    drawn = jnp.ones(len(ending))
    if drafts.logprobs is not None:
        distributions = drafts.logprobs if drawn_from is None else drawn_from(drafts.logprobs)
        each = jnp.exp(at_tokens(distributions, drafts.tokens))
        each = jnp.where(submitted, each, 1 / distributions.shape[2])
        drawn = jnp.prod(each, axis=1)
    stopped = jnp.take_along_axis(round_.stop, ending[:, None], axis=1)[:, 0]
    last = jnp.take_along_axis(round_.next_probs, round_.next_token[:, None], axis=1)[:, 0]
    possible = drawn > 0
    possible &= jnp.where(possible, stopped, 0) != 0
    return jnp.where(possible, drawn * stopped * last, 0.0)


def _merge(pool, weights, rng):
    """Merge states of equal tokens and policy state into one of them, picked at random."""
    if not len(weights):
        return pool, weights
    known = np.arange(pool.tokens.shape[-1]) < pool.length[..., None]
    tokens = np.where(known, pool.tokens, -1)
    leaves = [tokens, *_history(pool.drafter), *jax.tree.leaves(pool.policy)]
    columns = [leaf.reshape(len(weights), -1).astype(np.float64) for leaf in leaves]
    order = rng.permutation(len(weights))
    table = np.concatenate(columns, axis=1)[order]
    _, first, group = np.unique(table, axis=0, return_index=True, return_inverse=True)
    merged = np.zeros(len(first))
    np.add.at(merged, group.ravel(), weights[order])
    return jax.tree.map(lambda x: x[order[first]], pool), merged


def _history(drafter):
    """The leaves of a drafter's state that depend on past rounds beyond the tokens."""
    if isinstance(drafter, Fed):
        return [drafter.end]
    if isinstance(drafter, Switched):
        own = jax.tree.leaves(drafter.choice)
        return [*own, *(leaf for state in drafter.states for leaf in _history(state))]
    return []


def joint_distribution(
    method: speculative.Speculative, inputs: Inputs, budgets: list[int], *, step=speculative.step
) -> dict[tuple, float]:
    """P(outputs of all rows together), for a batch of few rows that may depend on each other.

    Rows draw independently, so a batch's outcomes are all combinations of its rows' outcomes.
    Batches are mapped over, and do not see each other.

    Args:
      budgets: new tokens allowed for each row.
      step: `speculative.step`, or one with a planted fault.
    """
    rows = jnp.arange(len(budgets), dtype=jnp.int32)
    contexts, first = loop.start(
        method, inputs, row_keys(jax.random.key(0), rows, 0 * rows), jnp.int32(budgets),
        buffer_len=inputs.prompt.shape[1] + max(budgets) + method.slots,
    )  # fmt: skip
    expand = partial(_expand_batches, step, method, contexts, _shared(first))
    pool = jax.tree.map(lambda x: np.asarray(x)[None], _batched(first))
    return _enumerated(expand, BATCHES, pool, np.asarray(inputs.prompt_len), 0)


BATCHES = 7  # batches expanded at a time


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _expand_batches(step, method, contexts, rest, states):
    """Expand BATCHES batches to BATCHES × outcomes, with their probabilities."""
    count = len(rest["keys"])
    each = _outcomes(method.target.vocab_size, method.slots - 1, method.slots)
    every = np.indices((len(each[1]),) * count).reshape(count, -1).T

    def one(state, drafts, accepted, token):
        new, round_ = step(method, contexts, state.replace(**rest), Forced(drafts, accepted, token))
        return _batched(new), jnp.prod(_chance(round_, None))

    forced = [x[jnp.asarray(every)] for x in each]
    over_outcomes = jax.vmap(one, in_axes=(None, 0, 0, 0))
    return jax.vmap(lambda state: over_outcomes(state, *forced))(states)
