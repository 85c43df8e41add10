"""Drafters for a target with more or fewer ids."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.drafters import abilities
from specjax.drafters.base import Drafter
from specjax.pytrees import pytree


@pytree
class Resized(Drafter):
    """A drafter for a target with more or fewer ids. Made by `resized`.

    Ids that the drafter lacks are never drafted; where the text has one, the drafter reads its own
    last id in that place. Ids that the target lacks are cut off.
    """

    inner: Drafter
    vocab_size: int = dataclasses.field(metadata={"static": True})

    branches = property(lambda self: abilities.branches(self.inner))
    free = property(lambda self: abilities.is_free(self.inner))
    guesses = property(lambda self: abilities.guesses(self.inner))
    carries = property(lambda self: abilities.carries(self.inner))

    def start(self, inputs, buffer_len):
        source, prompt = self._read(inputs.source), self._read(inputs.prompt)
        read = inputs._replace(source=source, prompt=prompt, encoding=None)
        return self.inner.start(read, buffer_len)

    def sees(self, target):
        return abilities.seen_by(self.inner, target)

    def observe(self, tokens, start, hidden, count, context, state):
        return self.inner.observe(self._read(tokens), start, hidden, count, context, state)

    def fork(self, state):
        return abilities.fork(self.inner, state)

    def join(self, own, shared):
        return abilities.join(self.inner, own, shared)

    def carry_over(self, state):
        return abilities.carry_over(self.inner, state)

    def resume(self, fresh, past, rows):
        return abilities.resume(self.inner, fresh, past, rows)

    def begin(self, tokens, length, context, state, *, lags=True):
        return self.inner.begin(self._read(tokens), length, context, state, lags=lags)

    def extend(self, token, position, context, state):
        return self.inner.extend(self._read(token), position, context, state)

    def logits(self, hidden):
        return cut_or_pad(self.inner.logits(hidden), self.vocab_size)

    def _read(self, ids: Int[Array, "..."]) -> Int[Array, "..."]:
        return readable(ids, self.inner.vocab_size)


@pytree
class ResizedLearner(Resized):
    """A resized drafter that learns."""

    def learn(self, tokens, length, round_, judge, context, state):
        def judged(logits, **options):
            return judge(cut_or_pad(logits, self.vocab_size), **options)

        known = self._read(tokens), length
        return abilities.learn(self.inner, *known, round_, judged, context, state)


def resized(drafter: Drafter, vocab_size: int) -> Drafter:
    """Resize a drafter's logits to `vocab_size` ids; unchanged if it has as many."""
    if drafter.vocab_size == vocab_size:
        return drafter
    kind = ResizedLearner if abilities.learns(drafter) else Resized
    return kind(drafter, vocab_size)


def cut_or_pad(logits: Float[Array, "*batch W"], vocab_size: int) -> Float[Array, "*batch V"]:
    """Cut or pad logits to the first `vocab_size` ids: −inf for those that are missing."""
    room = vocab_size - logits.shape[-1]
    if room <= 0:
        return logits[..., :vocab_size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, room)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def readable(ids: Int[Array, "..."], vocab_size: int) -> Int[Array, "..."]:
    """Clip ids for a model of `vocab_size` ids: those past its last become the last."""
    return jnp.minimum(ids, vocab_size - 1)
