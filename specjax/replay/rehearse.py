"""The real loop with the draws of a replay: at temperatures above 0 too, every method then decodes
the same outputs, and meets the same rejections at the same places.

What a method takes depends on the text that it happens to draw. Methods that are some percent apart
cannot be told apart on other texts. Given an output, a draft follows it up to the first token that
is rejected, and then what was recorded there (`rollouts.py`): that is a draw from the distribution
of the real run, given its output. The loop makes its own draws all the same, for their time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key, UInt32

from specjax import speculative
from specjax.pytrees import pytree
from specjax.replay.replay import first_rejections
from specjax.replay.rollouts import Rollouts
from specjax.sampling import row_keys
from specjax.speculative import Dice, Speculative, dice_for
from specjax.state import State


class Script(NamedTuple):
    """What is drawn along N outputs."""

    keys: UInt32[Array, "N D"]  # of the rows that decode them, by which a row finds its own
    tokens: Int[Array, "N T"]
    rejections: Int[Array, "N T"]  # the first position from there on with a rejected token
    drafts: Int[Array, "N T G"]


def script(rollouts: Rollouts, key: Key[Array, ""]) -> Script:
    """The draws of `replay` with this key and one draw.

    Args:
      key: that the outputs were decoded with, and that the loop is to be run with.
    """
    keys = row_keys(key, rollouts.input_index, jnp.zeros_like(rollouts.input_index))
    rejections = first_rejections(rollouts, keys)
    return Script(jax.random.key_data(keys), rollouts.tokens, rejections, rollouts.drafts)


@pytree
class Rehearsed:
    """A `loop.Method` that decodes as the script says; rows that it does not have, arbitrarily."""

    inner: Speculative
    script: Script

    @property
    def target(self):
        return self.inner.target

    @property
    def rule(self):
        return self.inner.rule

    @property
    def sampling(self):
        return self.inner.sampling

    @property
    def eos_ids(self):
        return self.inner.eos_ids

    @property
    def gamma_max(self) -> int:
        """See `Method.gamma_max`."""
        return self.inner.gamma_max

    @property
    def slots(self) -> int:
        """See `Method.slots`."""
        return self.inner.slots

    def start(self, inputs, keys, budget, buffer_len):
        return self.inner.start(inputs, keys, budget, buffer_len)

    def step(self, context, state):
        dice = Prompted(dice_for(self.inner), self.script)
        return speculative.step(self.inner, context, state, dice)


class Prompted(Dice):
    """Draws as the loop does, and says what the script says."""

    def __init__(self, own: Dice, script: Script):
        self.own, self.script = own, script
        self.kept: Any = None

    def draft(self, state, slot, logprobs, best):
        row, at = self._stands(state)
        position, rejected = at + slot, self.script.rejections[row, at]
        behind = jnp.clip(position - rejected, 0, self.script.drafts.shape[2] - 1)
        recorded = self.script.drafts[row, rejected, behind]
        token = jnp.where(position < rejected, self._output(row, position), recorded)
        return _after(self.own.draft(state, slot, logprobs, best), token)

    def accepted(self, state, stop):
        row, at = self._stands(state)
        slots = jnp.arange(stop.shape[1], dtype=jnp.int32)[None, :]
        # Nothing ends behind the end of a draft, as the rule knows.
        end = jnp.max(jnp.where(stop > 0, slots, 0), axis=1)
        kept = jnp.minimum(self.script.rejections[row, at] - at, end)
        self.kept = _after(self.own.accepted(state, stop), kept)
        return self.kept

    def next(self, state, probs):
        row, at = self._stands(state)
        return _after(self.own.next(state, probs), self._output(row, at + self.kept))

    def _stands(self, state: State) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """The output of each row, and how much of it is there."""
        mine = jax.random.key_data(state.keys)[:, None] == self.script.keys[None]
        row = jnp.argmax(jnp.all(mine, axis=2), axis=1).astype(jnp.int32)
        return row, jnp.minimum(state.stats.emitted, self.script.tokens.shape[1] - 1)

    def _output(self, row, position) -> Int[Array, " B"]:
        last = self.script.tokens.shape[1] - 1
        return self.script.tokens[row, jnp.minimum(position, last)]


def _after(drawn: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, " B"]:
    """The token, which the compiler cannot know without the draw: none is below 0."""
    return jnp.where(drawn < 0, drawn, token)
