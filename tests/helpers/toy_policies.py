"""Draft-length policies that a test can predict, or that try to break the loop within the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.adaptive import policies as leaderboard
from experiments.adaptive.policies.acceptance_head import HeadParams
from specjax import policies
from specjax.policies import Costs, Policy
from specjax.pytrees import pytree
from specjax.testing.common import Varying as Erratic

FOR_TREES = {"nodes", "cut"}
BY_SLOT = {"fixed", "threshold", "by_batch_size", "early_stop"}  # in `test_slots.py`
LIVE = jnp.ones(1, bool)  # for policies that do not read which rows have not ended


@pytree
class EntropyStop(Erratic):
    """Drafts while the draft's next distribution is sharp."""

    def begin(self, state, live, gamma_max):
        return state, jnp.full(state.shape, 3, jnp.int32)

    def keep_drafting(self, state, seen):
        probs = jnp.exp(seen.draft_logprobs)
        surprise = jnp.where(probs > 0, -seen.draft_logprobs, 0.0)
        return state, jnp.sum(probs * surprise, axis=-1) < 0.8

    def update(self, state, round_):
        return state


@pytree
class ConfidenceStop(EntropyStop):
    """Drafts while the token before was likely: draw, keep, then stop."""

    def keep_drafting(self, state, seen):
        return state, seen.drafting

    def go_on(self, state, drafting, logprob):
        return state, drafting & (logprob > float(np.log(0.5)))


@pytree
class Scripted(Policy):
    """Caps written down for each round and row, from the first again after the last."""

    caps: Array  # (R, B) int32

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live, gamma_max):
        row = jnp.arange(state.shape[0], dtype=jnp.int32)
        return state + 1, self.caps[state % self.caps.shape[0], row]


@pytree
class Gossip(Erratic):
    """Caps from 0 to 3 for each row, by the past rounds of all rows, also of those that ended."""

    reads_batch = True

    def begin(self, state, live, gamma_max):
        row = jnp.arange(len(state), dtype=jnp.int32)
        return state, (jnp.sum(state * (row + 1), dtype=jnp.int32) * 7 + row) % 4


@pytree
class TailReader(Policy):
    """Drafts nothing after a round whose last drafted token came out badly, be it behind a
    rejection or not, else as many as it can."""

    def init(self, keys, gamma_max):
        return jnp.full(keys.shape, gamma_max, jnp.int32)

    def begin(self, state, live, gamma_max):
        return state, state

    def update(self, state, round_):
        last = jnp.maximum(round_.verified - 1, 0)[:, None]
        ratio = jnp.take_along_axis(round_.ratio, last, axis=1)[:, 0]
        bad = (round_.verified > 0) & (ratio < 0.9)
        return jnp.where(bad, 0, round_.gamma_max).astype(jnp.int32)


@pytree
class OneOf(Policy):
    """One of several policies by its number, which is data: what they all do compiles once."""

    policies: tuple[Policy, ...]
    which: Array  # () int32

    def init(self, keys, gamma_max):
        return tuple(policy.init(keys, gamma_max) for policy in self.policies)

    def begin(self, state, live, gamma_max):
        return self._ask(state, lambda policy, own: policy.begin(own, live, gamma_max))

    def keep_drafting(self, state, seen):
        return self._ask(state, lambda policy, own: policy.keep_drafting(own, seen))

    def go_on(self, state, drafting, logprob):
        return self._ask(state, lambda policy, own: policy.go_on(own, drafting, logprob))

    def update(self, state, round_):
        return self._ask(state, lambda policy, own: (policy.update(own, round_), jnp.int32(0)))[0]

    def _ask(self, states, question):
        """The answer of the one; the states of the others stay, so that rows can be merged."""
        found, answers = [], []
        for i, (policy, own) in enumerate(zip(self.policies, states, strict=True)):
            new, answer = question(policy, own)
            found.append(jax.tree.map(functools.partial(jnp.where, self.which == i), new, own))
            answers.append(answer)
        shape = np.broadcast_shapes(*map(jnp.shape, answers))
        answers = jnp.stack([jnp.broadcast_to(answer, shape) for answer in answers])
        return tuple(found), answers[self.which]


def linear_head(width: int) -> HeadParams:
    """No blocks: one logit from hidden states of that width."""
    rng = np.random.default_rng(0)
    return HeadParams(
        jnp.zeros((0, width, width), jnp.float32),
        jnp.zeros((0, width), jnp.float32),
        jnp.asarray(rng.normal(size=width), jnp.float32),
        jnp.float32(0.5),
    )


def library(gamma_max: int, width: int, board: bool = False) -> dict[str, Policy]:
    """Every policy of rows for chains, for that γ_max and hidden states of that width.

    The settings make each of them vary its lengths on the tables of the tests. A policy without
    settings here has its defaults.

    Args:
      board: whether those of the leaderboard alone come too.
    """
    names = [*policies.NAMES, *(leaderboard.__all__ if board else ())]
    names = [name for name in names if name != "learned"]  # which is fitted to a trace
    # No two lengths are equally good.
    known = {"costs": Costs(0.217, [1.0] * (gamma_max + 1)), "params": linear_head(width)}
    rates = {"prior": 0.6, "weight": 1.0, "memory": 0.5}
    settings: dict[str, dict] = {
        "constant": {"gamma": gamma_max},
        "heuristic": {"gamma": 1},
        "confidence": {"threshold": 0.5},
        "svip": {"threshold": 0.35},
        "adaedl": {"bar": 0.6},
        "gammatune": {"gamma": 2},
        "given": {"lengths": (0, gamma_max, 1), "reads": "entropy"},
        "average": {"tiers": (0, 1, 2), "first": 1, "memory": 0.3, "every": 1},
        "goodput": rates,
        "first_descent": rates,
        "lookahead": rates | {"prior": 0.7},
        "together": rates,
        "exp3": {"rate": 3.0},
        "hedge": {"rate": 3.0},
        # Two, so that some rounds of a few tokens follow what was learned.
        "tapout": {"arms": ("svip(threshold=0.35)", "heuristic(gamma=1)")},
        "head": {"threshold": 0.4},
    }
    return {
        name: policies.parse(
            leaderboard.path(name),
            **settings.get(name, {}),
            **{
                key: value
                for key, value in known.items()
                if policies.loading.takes(leaderboard.path(name), key)
            },
        )
        for name in names
        if name not in FOR_TREES | BY_SLOT
    }
