"""The real loop with the draws of a replay: at temperatures above 0 too, every method then decodes
the same outputs, and meets the same rejections at the same places.

What a method takes depends on the text that it happens to draw. Methods that are some percent apart
cannot be distinguished on other texts. Given an output, a draft follows it up to the first rejected
token, and then what was recorded there (`rollouts.py`): that is a draw from the distribution
of the real run, given its output. The loop makes its own draws all the same, for their time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key, UInt32

from specjax.autoregressive import Autoregressive
from specjax.dice import Dice, dice_for
from specjax.pytrees import pytree
from specjax.replay.recorded import Recording
from specjax.replay.rollouts import Rollouts
from specjax.sampling import row_keys
from specjax.speculative import Speculative
from specjax.state import State


class Script(NamedTuple):
    """What is drawn along N outputs."""

    tokens: Int[Array, "N T"]
    rejections: Int[Array, "N T"]  # the first position from there on with a rejected token
    drafts: Int[Array, "N T G"]  # by where a round begins


class Scripts(NamedTuple):
    """The scripts of N outputs, and the rows that they belong to."""

    keys: UInt32[Array, "N D"]  # of the rows that decode them, by which a row finds its own
    each: Script


def script(rollouts: Rollouts, key: Key[Array, ""]) -> Scripts:
    """The draws of `replay` with this key and one draw.

    Args:
      key: that the outputs were decoded with, and that the loop is to be run with.
    """
    keys = row_keys(key, rollouts.input_index, jnp.zeros_like(rollouts.input_index))
    recording = Recording.settled(rollouts, keys)
    output, begin, slot = (jnp.arange(n, dtype=jnp.int32) for n in rollouts.drafts.shape)
    rows = recording.row(output[:, None], begin[None, :])
    place = jax.tree.map(lambda x: x[..., None], rows).place(slot[None, None, :])
    drafts = recording.look_up("drafts", place)
    each = Script(rollouts.tokens, recording.rejections, drafts)
    return Scripts(jax.random.key_data(keys), each)


@pytree
class Rehearsed:
    """A `loop.Method` that decodes as the script says; rows that it does not have, arbitrarily."""

    inner: Autoregressive | Speculative
    scripts: Scripts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks for these before there is an `inner`
            raise AttributeError(name)
        return getattr(self.inner, name)

    def start(self, inputs, keys, budget, buffer_len):
        """The context holds each row's script: a round has no time to look for it."""
        context, state = self.inner.start(inputs, keys, budget, buffer_len)
        same = jax.random.key_data(keys)[:, None] == self.scripts.keys[None]
        mine = jnp.argmax(jnp.all(same, axis=2), axis=1)
        return (context, jax.tree.map(lambda x: x[mine], self.scripts.each)), state

    def step(self, context, state):
        own, script = context
        return self.inner.step(own, state, Prompted(dice_for(self.inner), script))


class Prompted(Dice):
    """Draws as the loop does, and says what the script says.

    Where it reads the script depends on the draw, which the compiler cannot know: none is below 0.
    So the draw is made, and nothing else of a round waits for the script or goes beside it.
    """

    def __init__(self, own: Dice, script: Script):
        self.own, self.script = own, script
        self.kept: Array | int = 0  # plain decoding has no drafts

    def draft(self, state, slot, logprobs, best):
        at = self._stands(state, self.own.draft(state, slot, logprobs, best))
        return self.script.drafts.at[jnp.arange(len(at)), at, slot].get(mode="clip")

    def accepted(self, state, stop):
        drawn = self.kept = self.own.accepted(state, stop)
        if stop.shape[1] == 1:  # no draft: the compiler is to know that nothing is accepted
            return drawn
        at = self._stands(state, drawn)
        slots = jnp.arange(stop.shape[1], dtype=jnp.int32)[None, :]
        # Nothing ends behind the end of a draft, as the rule knows.
        end = jnp.max(jnp.where(stop > 0, slots, 0), axis=1)
        self.kept = jnp.clip(_at(self.script.rejections, at) - at, 0, end)  # 0: a row that is done
        return self.kept

    def next(self, state, probs):
        return _at(self.script.tokens, self._stands(state, self.own.next(state, probs)) + self.kept)

    def _stands(self, state: State, drawn: Int[Array, " B"]) -> Int[Array, " B"]:
        """How much of each row's output is there, once the draw is made."""
        return state.stats.emitted + jnp.minimum(drawn, 0)


def _at(table: Int[Array, "B T"], position: Int[Array, " B"]) -> Int[Array, " B"]:
    """Each row's entry there, or its last one."""
    return jnp.take_along_axis(table, position[:, None], axis=1, mode="clip")[:, 0]
