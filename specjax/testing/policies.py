"""The check of policies: lengths depend on the row's past alone, and outputs stay the target's."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import loop, speculative
from specjax.contracts import check_part
from specjax.dice import dice_for
from specjax.drafters.base import ModelDrafter
from specjax.policies.base import Policy, by_slot
from specjax.rules import Block, Token
from specjax.sampling import Sampling
from specjax.testing.common import (
    GAMMA,
    ROWS,
    Lengths,
    check_joint,
    check_output,
    check_returns,
    keys_of,
    method_of,
    quickly,
    report,
)
from specjax.testing.tables import inputs_of, random_table
from specjax.types import Inputs

ROUNDS = 20
NEIGHBOURS = "depends on other rows of the batch: declare `reads_batch = True`, or keep rows apart."


def check_policy(policy: Policy, *, gamma_max: int = GAMMA, seed: int = 0) -> Lengths:
    """Check a policy's decisions in the loop, and that outputs keep the target's distribution.

    Prints and returns how many drafted tokens were verified: a policy that passes may still draft
    too few.

    - The state has a row for each row of the batch, and keeps its shapes and dtypes.
    - Decisions have the shapes and dtypes of docs/policies.md.
    - `begin` allows whole numbers of tokens, 0 or more; the loop cuts them to `gamma_max`.
    - Decisions do not depend on the entries of a draft past its end.
    - Rows do not depend on each other, unless the policy declares `reads_batch`.
    - Every outcome of every round gives the target's distribution: greedily and under the block
      rule; or for two rows together if the policy reads its batch, in passes of all sizes if it
      decides slot by slot.

    Args:
      policy: a policy whose settings, such as costs, fit `gamma_max`. The draft has 3 ids and
        hidden states of width 3.
      gamma_max: the longest draft. Enumeration takes 3^γ_max drafts: keep it at 2 or 3.
      seed: picks the distributions of target and draft.

    Raises:
      ValueError: a class or a name is given.
      AssertionError: the message names the error and its size.
    """
    check_part("policy", policy)
    name = type(policy).__name__

    def method(temperature: float, rule: Any = Token()):  # noqa: B008
        # The draft's logits must be finite: they are its hidden states, which a policy may read.
        draft = ModelDrafter(random_table(seed + 2, forbidden=0))
        sampling = Sampling(temperature)
        return method_of(random_table(seed + 1), draft, rule, policy, sampling, gamma_max)

    check_returns(method(1.0), _inputs(5))
    lengths = _check_decisions(name, method(1.0))
    if policy.reads_batch:  # in `check_output` it would read other states
        sizes = range(len(LIMITS), len(LIMITS) * (gamma_max + 1)) if by_slot(policy) else ()
        pair = pair_of(policy, gamma_max, seed, passes=tuple(sizes))
        check_joint(f"{name}, two rows together", pair, PAIR, LIMITS)
    else:
        check_output(f"{name} at temperature 0", method(0.0))
        check_output(f"{name} at temperature 0.7 under the block rule", method(0.7, Block()))
    return report(f"{name} {'verifies' if by_slot(policy) else 'drafts'}", lengths, gamma_max)


PAIR, LIMITS = inputs_of([[1, 0], [0, 1, 1]]), (3, 3)  # two rows that are enumerated together


def pair_of(policy: Policy, gamma_max: int, seed: int, **options: Any) -> speculative.Speculative:
    """A method over 2 ids, of which none ends an output, for `PAIR`."""
    target, draft = (random_table(seed + i, 2) for i in (1, 2))
    parts = target, ModelDrafter(draft), Token(), policy, Sampling(1.0)
    return method_of(*parts, gamma_max, **options)


def _check_decisions(name: str, method) -> np.ndarray:
    """Compare lengths of 20 rounds of 64 rows with those for other entries and other neighbours."""
    inputs, keys = _inputs(ROWS), keys_of(ROWS)
    lengths, allowed = _lengths(method, inputs, keys, jnp.int32(0))
    if allowed.min() < 0:
        raise AssertionError(f"{name}.begin allows {allowed.min()} tokens: 0 is the fewest.")
    others, _ = _lengths(method, inputs, keys, jnp.int32(1))
    _require_same(
        name,
        lengths,
        others,
        "depends on entries of `round_` behind the end of a draft, which nobody drafted: read "
        "those that `round_.submitted` marks.",
    )
    if not method.policy.reads_batch:
        odd = jnp.arange(ROWS) % 2 == 1
        keys = jnp.where(odd, keys_of(ROWS, seed=1), keys)
        moved = inputs._replace(prompt=(inputs.prompt + odd[:, None].astype(jnp.int32)) % 3)
        others, _ = _lengths(method, moved, keys, jnp.int32(0))
        _require_same(
            name,
            lengths[:, ::2],
            others[:, ::2],
            NEIGHBOURS,
        )
        few = np.array([ROWS - 1, 0])  # a value that most rows share changes in a small batch
        pair = jax.tree.map(lambda x: x[few], inputs)
        others, _ = _lengths(method, pair, keys_of(ROWS)[few], jnp.int32(0))
        _require_same(name, lengths[:, few], others, NEIGHBOURS)
    return lengths


def _require_same(name: str, lengths: np.ndarray, others: np.ndarray, why: str) -> None:
    apart = lengths != others
    if apart.any():
        round_, row = np.argwhere(apart)[0]
        raise AssertionError(
            f"{name} drafts {lengths[round_, row]} tokens in round {round_ + 1} where it drafts "
            f"{others[round_, row]} with the same known tokens and the same rounds before: it {why}"
        )


def _lengths(method, inputs: Inputs, keys: Array, filler: Array) -> tuple[np.ndarray, np.ndarray]:
    """Tokens verified in each round, (ROUNDS, B), −1 after a row's end, and tokens allowed.

    Args:
      filler: () int32, the token past the end of each draft.
    """
    endless = dataclasses.replace(method, eos_ids=jnp.int32([-1]))
    return jax.device_get(_decoded(endless, inputs, keys, filler))


@quickly
def _decoded(method, inputs, keys, filler):
    contexts, state = _started(method, inputs, keys)
    dice = dice_for(method)
    slot = jnp.arange(method.gamma_max, dtype=jnp.int32)[None, :]

    def round_(state, _):
        allowed = jnp.asarray(method.policy.begin(state.policy, ~state.done, method.gamma_max)[1])
        drafts, after = speculative.draft(method, contexts.drafter, state, dice)
        past = slot >= drafts.length[:, None]
        low = jnp.where(filler > 0, -3.0, 0.0)
        filled = drafts._replace(
            tokens=jnp.where(past, filler, drafts.tokens),
            logprobs=_where(past[:, :, None], low, drafts.logprobs),
            belief_logprob=_where(past, low, drafts.belief_logprob),
        )
        verdict, after = speculative.judge(method, contexts, dice, after, filled)
        after, _ = speculative.conclude(method, contexts.drafter, after, filled, verdict)
        lengths = jnp.where(state.done, -1, drafts.length)
        return after, (lengths, jnp.broadcast_to(allowed, lengths.shape))

    return jax.lax.scan(round_, state, length=ROUNDS)[1]


def _where(past: Array, value: Array, otherwise: Array) -> Array:
    return jnp.where(past, value.astype(otherwise.dtype), otherwise)


def _inputs(rows: int) -> Inputs:
    """Make prompts of one to three tokens that differ from row to row."""
    every = [list(ids) for n in (1, 2, 3) for ids in itertools.product((0, 1), repeat=n)]
    return inputs_of([every[i % len(every)] for i in range(rows)])


def _started(method, inputs: Inputs, keys: Array):
    budget = jnp.full((len(keys),), ROUNDS, jnp.int32)
    room = inputs.prompt.shape[1] + ROUNDS + method.slots
    return loop.start(method, inputs, keys, budget, buffer_len=room)
