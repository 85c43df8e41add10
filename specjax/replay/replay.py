"""Replay of draft-length policies along recorded rollouts, without any model.

At temperature 0 replay is the real run: the same rounds with the same drafts. At other
temperatures it is a draw from the real run's distribution, given the output. The chances of
acceptance are known, and `keys` settle them for all policies alike.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specjax import loop
from specjax import sampling as smp
from specjax.decoding.starting import Past, resume
from specjax.policies import Costs, Policy
from specjax.policies.base import first_state
from specjax.policies.constant import Constant
from specjax.pytrees import pytree
from specjax.replay.recorded import (
    Recorded,
    RecordedDrafter,
    Recording,
    Unknown,
    first_rejections,
    rows_of,
)
from specjax.replay.rollouts import Rollouts
from specjax.support import memory_maps


class Replayed(NamedTuple):
    """Rounds of each output, counted by verified and accepted tokens; sums over draws."""

    verified: Int[Array, "*batch N G+1"]  # rounds that verified 0 … γ_max tokens
    accepted: Int[Array, "*batch N G+1"]  # rounds that kept 0 … γ_max of them
    refused: Int[Array, "*batch N"]  # drafter calls that yielded no token
    vain: Int[Array, "*batch N"]  # of these, first calls of a round, refused by the policy
    runs: Int[Array, "*batch N"]  # number of draws
    trail: Int[Array, "*batch N T"]  # first draw: verified by the round from there, or −1


@pytree
class Counting(RecordedDrafter):
    """Counts rounds as `Replayed` has them, in batches of one row."""

    def counts(self, rows):
        width = self.recording.rollouts.tokens.shape[1]
        zeros = jnp.zeros((rows,), jnp.int32)
        lengths = jnp.zeros((rows, self.recording.rollouts.gamma_max + 1), jnp.int32)
        unmarked = jnp.full((rows, width), -1, jnp.int32)
        return Replayed(lengths, lengths, zeros, zeros, zeros + 1, unmarked)

    def count(self, round_, state):
        found, drafted, row = state.counts, round_.verified, state.row
        room = self.recording.rollouts.budget[row.output] - row.begin - 1
        calls = jnp.where(jnp.minimum(room, round_.drafts.allowed) > 0, state.calls, 0)
        vain = (drafted == 0) & (calls > 0) & ~self.recording.silent(row.place(0))
        return Replayed(
            _count(found.verified, drafted),
            _count(found.accepted, round_.in_output),
            found.refused + calls - drafted,
            found.vain + vain.astype(jnp.int32),
            found.runs,
            found.trail.at[jnp.arange(len(drafted)), row.begin].set(drafted, mode="drop"),
        )


@pytree
class Alone(Recorded):
    """A recording at batch 1, whose rows run side by side under `vmap`."""

    skips = False  # `vmap` would copy the recording for each row to make the choice


def walk(
    policy: Policy,
    recording: Recording,
    key: Key[Array, ""],
    output: Int[Array, ""],
    past: Any = None,
) -> tuple[Replayed, Any]:
    """Decode an output at batch 1; return its rounds and the policy's last state.

    Args:
      key: the row's, as a real run has it.
      past: the policy's state at the end of the output before, with what it learned.
    """
    method = Alone.of(Counting(recording), policy)
    inputs, budget = rows_of(recording, output[None])
    contexts, state = loop.start(method, inputs, key[None], budget, buffer_len=1)
    if past is not None:
        state = resume(method, state, Past(past, None, jnp.ones((1,), bool)))
    state = loop.decode(method, contexts, state)
    return jax.tree.map(lambda x: x[0], state.drafter.counts), state.policy


def walk_in_turn(policy: Policy, recording: Recording, keys: Key[Array, " N"]) -> Replayed:
    """Decode outputs one after the other, each beginning with what the policy learned before."""

    def one(past, row):
        found, state = walk(policy, recording, row[0], row[1], past)
        return state, found

    first = first_state(policy, keys[:1], recording.rollouts.gamma_max)
    return jax.lax.scan(one, first, (keys, jnp.arange(len(keys), dtype=jnp.int32)))[1]


def _count(counts: Int[Array, "B K"], value: Int[Array, " B"]) -> Int[Array, "B K"]:
    """Count one more of this value."""
    hit = value[:, None] == jnp.arange(counts.shape[1], dtype=jnp.int32)[None, :]
    return counts + hit.astype(jnp.int32)


def replay(
    policies: Sequence[Policy],
    rollouts: Rollouts,
    key: Key[Array, ""],
    *,
    draws: int = 1,
    at_once: int = 32,
    carry: bool = False,
) -> Replayed:
    """Replay S policies, (S, N, G+1), summed over draws.

    Policies of one kind that differ in their numbers run side by side and compile once.

    Args:
      key: the real run's key, if its random policies are to be repeated at temperature 0.
      draws: how many times the chances of acceptance are settled for each output. At temperature 0
        they are 0 or 1; for a drafter that `guesses` they were settled in recording.
      at_once: policies side by side, which memory bounds.
      carry: replay outputs one after the other, each beginning with what policies learned before
        it, as `generate(..., batch_size=1, carry_state=True)`.

    Raises:
      ValueError: a policy that reads what was not recorded, or that reads its batch.
    """
    for policy in policies:
        if rollouts.counts_alone and type(policy).go_on is not Policy.go_on:
            Unknown(policy, "logprob").refuse()
        if policy.reads_batch:
            raise ValueError(
                f"{type(policy).__name__} reads its batch, and outputs are replayed as rows of one "
                "that never was: take specjax.replay.batches.serve."
            )
    keys = _draw_keys(rollouts, key, draws)
    kinds: dict[Any, list[int]] = {}
    for i, policy in enumerate(policies):
        leaves, structure = jax.tree.flatten(policy)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        kinds.setdefault((structure, shapes), []).append(i)
    parts = []
    for alike in kinds.values():
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(policies[i] for i in alike))
        each = jnp.arange(len(alike))  # a policy without numbers has nothing to map over
        memory_maps.make_room()
        found = _side_by_side((each, stacked), rollouts, keys, at_once=at_once, carry=carry)
        parts.append(jax.device_get(found))
    back = np.argsort([i for alike in kinds.values() for i in alike])
    return jax.tree.map(lambda *counts: np.concatenate(counts)[back], *parts)


@partial(jax.jit, static_argnames=("at_once", "carry"))
def _side_by_side(numbered, rollouts, keys, *, at_once, carry):
    outputs = jnp.arange(len(rollouts.emitted), dtype=jnp.int32)

    def alone(policy, keys):
        recording = Recording.settled(rollouts, keys)
        if carry:
            return walk_in_turn(policy, recording, keys)
        return jax.vmap(lambda *row: walk(policy, recording, *row)[0])(keys, outputs)

    def one(numbered_policy):
        each = jax.vmap(alone, in_axes=(None, 0))(numbered_policy[1], keys)
        return jax.tree.map(partial(jnp.sum, axis=0), each)._replace(trail=each.trail[0])

    return jax.lax.map(one, numbered, batch_size=at_once)


def _draw_keys(rollouts: Rollouts, key: Key[Array, ""], draws: int) -> Key[Array, "D N"]:
    index = rollouts.input_index
    samples = jnp.broadcast_to(jnp.arange(draws, dtype=jnp.int32)[:, None], (draws, len(index)))
    return jax.vmap(smp.row_keys, in_axes=(None, None, 0))(key, index, samples)


class Score(NamedTuple):
    """Results of S policies, (S,); scalars for the oracle."""

    speedup: Float[np.ndarray, "*S"]  # time of plain decoding over that of the policy
    tau: Float[np.ndarray, "*S"]  # tokens per target call
    verified: Float[np.ndarray, "*S"]  # tokens per round


def score(replayed: Replayed, rollouts: Rollouts, costs: Costs) -> Score:
    """Compute speedups from replayed rounds and costs; drafter calls without a token count too.

    Raises:
      ValueError: drafts longer than those that have a cost.
    """
    spent = times(replayed, costs).sum(axis=-1)
    lengths = np.asarray(replayed.verified, np.float64).sum(axis=-2)
    runs = np.asarray(replayed.runs, np.float64)
    tokens, calls = runs @ np.asarray(rollouts.emitted, np.float64), runs.sum(axis=-1)
    rounds = lengths.sum(axis=-1)
    return Score(
        speedup=(tokens * float(costs.token) + calls * float(costs.plain_call)) / spent,
        tau=tokens / rounds,
        verified=lengths @ np.arange(lengths.shape[-1]) / rounds,
    )


def as_decoded(policy: Policy, rollouts: Rollouts, costs: Costs) -> tuple[Policy, Costs]:
    """Choose what decodes, and its costs: the policy, or plain decoding where it prefers that.

    Plain decoding appears as rounds that draft nothing (`decoding.building.plain_if_preferred`).
    """
    rounds = int(np.max(rollouts.budget))
    if not policy.reads_batch and policy.prefers_plain(rollouts.gamma_max, rounds):
        return Constant(jnp.int32(0)), costs.of_plain()
    return policy, costs


def times(replayed: Replayed, costs: Costs) -> Float[np.ndarray, "*S N"]:
    """Compute the time of each output, summed over draws: rounds, calls and empty drafter calls.

    Raises:
      ValueError: drafts longer than those that have a cost.
    """
    counts = np.asarray(replayed.verified, np.float64)
    lengths, beyond = np.split(counts, [costs.gamma_max + 1], axis=-1)
    if beyond.any():
        raise ValueError(
            f"The costs are for γ_max={costs.gamma_max}, and longer drafts were replayed."
        )
    first = float(costs.draft if np.isnan(costs.refused) else costs.refused)
    fixed = replayed.runs * float(costs.call) + replayed.vain * first
    fixed = fixed + (replayed.refused - replayed.vain) * float(costs.draft)
    return lengths @ _rounds(costs) + fixed


def _rounds(costs: Costs) -> Float[np.ndarray, " K"]:
    return np.asarray(costs.round_times(costs.gamma_max), np.float64)


def oracle(
    rollouts: Rollouts, key: Key[Array, ""], loops: Sequence[Costs], *, draws: int = 1
) -> Score:
    """Compute a bound that no policy exceeds: each output decoded in the least possible time.

    The oracle knows which tokens will be accepted. For each output, and each draw of the chances,
    it takes plain decoding or one of the loops, and in every round the best draft length: with
    a(t) the tokens that would be accepted at position t of an output of n,

        time(t) = min over k ≤ γ_max of  cost(k) + time(min(t + min(k, a(t)) + 1, n)),  time(n) = 0

    for k that the drafter and the budget allow. A replayed run is one of these ways, so its `score`
    at costs among these is never above the oracle's.

    Args:
      key, draws: those of the `replay` to bound.
      loops: costs of each loop to choose from; the first also costs plain decoding.

    Raises:
      ValueError: costs of longer drafts than were recorded.
    """
    plain, ways = oracle_ways(rollouts, key, loops, draws=draws)
    time, rounds, drafted = ways.sum(axis=(0, 1))
    return Score(
        np.asarray(draws * plain.sum() / time),
        np.asarray(draws * np.asarray(rollouts.emitted).sum() / rounds),
        np.asarray(drafted / rounds),
    )


def oracle_ways(
    rollouts: Rollouts, key: Key[Array, ""], loops: Sequence[Costs], *, draws: int = 1
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, "D N 3"]]:
    """Compute each output's time of plain decoding, and the oracle's time, rounds and drafts.

    Arguments and errors: `oracle`.
    """
    if any(loop.gamma_max > rollouts.gamma_max for loop in loops):
        raise ValueError(f"Drafts of at most {rollouts.gamma_max} tokens were recorded.")
    emitted = np.asarray(rollouts.emitted)
    plain = emitted * float(loops[0].token) + float(loops[0].plain_call)
    nothing = np.broadcast_to(
        np.stack([plain, emitted, 0 * plain], axis=-1), (draws, len(plain), 3)
    )
    rejections = np.asarray(_rejections(rollouts, _draw_keys(rollouts, key, draws)))
    table = _not_dominated(loops)
    ways = _ways(rollouts, rejections, table[:, 1:])[:, :, :, 0]
    ways[..., 0] += table[:, 0, None, None]
    each = np.concatenate([nothing[None], ways])
    best = np.argmin(each[..., 0], axis=0)
    return plain, np.take_along_axis(each, best[None, ..., None], axis=0)[0]


_rejections = jax.jit(jax.vmap(first_rejections, (None, 0)))


def _not_dominated(loops: Sequence[Costs]) -> Float[np.ndarray, "L K"]:
    """Tabulate each loop's cost of a call, and of rounds of 0 … γ_max tokens, ∞ where undefined.

    Loops are left out if another one is nowhere more expensive.
    """
    table = np.full((len(loops), 2 + max(loop.gamma_max for loop in loops)), np.inf)
    for row, costs in zip(table, loops, strict=True):
        row[: 2 + costs.gamma_max] = [float(costs.call), *_rounds(costs)]
    kept: list[Float[np.ndarray, " K"]] = []
    for row in sorted(table, key=lambda row: np.isinf(row).sum()):
        if not any(np.all(other <= row) for other in kept):
            kept.append(row)
    return np.stack(kept)


def _ways(
    rollouts: Rollouts, rejections: Int[np.ndarray, "D N T"], cost: Float[np.ndarray, "L K"]
) -> Float[np.ndarray, "L D N T 3"]:
    """Run the recursion of `oracle` from the last token back.

    Each position gets the time, rounds and drafted tokens of the fastest way from there on.

    Args:
      cost: costs of each loop's rounds, by drafted tokens; ∞ beyond its longest draft.
    """
    draws, rows, _ = rejections.shape
    emitted, budget = np.asarray(rollouts.emitted), np.asarray(rollouts.budget)
    length, index = np.asarray(rollouts.length), np.arange(rows)
    settled = np.asarray(rollouts.accepted) >= 0
    last, lengths = int(emitted.max()), np.arange(cost.shape[1])
    ways = np.zeros((len(cost), draws, rows, last + 1, 3))
    # The first position on the output at which the drafter drafts nothing.
    silent = np.where(length > 0, length.shape[1], np.arange(length.shape[1]))
    silent = np.minimum.accumulate(silent[:, ::-1], axis=1)[:, ::-1]
    for t in reversed(range(last)):
        rejected = rejections[:, :, t]
        beyond = rejected + length[index, rejected]  # drafts that follow a rejected one count too
        end = np.where(silent[:, t] < rejected, silent[:, t], beyond)
        end = np.where(settled[:, t], t + length[:, t], end)
        room = np.minimum(end - t, budget - t - 1)[..., None]
        after = np.minimum(t + np.minimum(lengths, (rejected - t)[..., None]) + 1, emitted[:, None])
        rest = np.take_along_axis(ways[..., 0], after[None], axis=3)
        spent = np.where(lengths <= room, cost[:, None, None] + rest, np.inf)
        best = np.argmin(spent, axis=3)[..., None]
        to = np.take_along_axis(np.broadcast_to(after, spent.shape), best, axis=3)
        counted = np.take_along_axis(ways[..., 1:], to[..., None], axis=3)[..., 0, :]
        found = np.concatenate(
            [
                np.take_along_axis(spent, best, axis=3),
                counted + np.concatenate([0 * best + 1, best], 3),
            ],
            axis=3,
        )
        ways[:, :, :, t] = np.where((t < emitted)[:, None], found, 0)
    return ways


def regret(
    trail: Int[np.ndarray, "N T"],
    rollouts: Rollouts,
    key: Key[Array, ""],
    loop: Costs,
    loops: Sequence[Costs],
) -> Float[np.ndarray, "N T"]:
    """Compute the time that a run has irrecoverably lost by each position.

    The loss is the time spent so far, plus the fastest way from there, minus the fastest way of
    all. Calls of the loop are left out, and so are drafter calls without a token.

    Args:
      trail: from `replay` with this key. A loss holds from where a round began until the next.
      loop: costs of the run's loop.
      loops: loops among which the fastest way may choose in every round.
    """
    cheapest = _not_dominated(loops)[:, 1:].min(axis=0, keepdims=True)
    rejections = np.asarray(_rejections(rollouts, _draw_keys(rollouts, key, 1)))
    left = _ways(rollouts, rejections, cheapest)[0, 0, ..., 0]
    began = trail[:, : left.shape[1]] >= 0
    spent = np.where(began, _rounds(loop)[np.maximum(trail[:, : left.shape[1]], 0)], 0.0)
    before = np.cumsum(spent, axis=1) - spent
    lost = np.where(began, before + left - left[:, :1], -np.inf)
    return np.maximum.accumulate(lost, axis=1)
