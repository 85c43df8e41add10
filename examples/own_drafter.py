"""A drafter of your own, and its check.

    python examples/own_drafter.py

`Habits` drafts what followed the last token elsewhere in the text. Its state is the text with the
tokens drafted since the round began; `begin` starts from the known tokens alone, so nothing of a
rejected draft remains.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters.base import Drafter
from specjax.pytrees import pytree
from specjax.testing import check_drafter


@pytree
class Habits(Drafter):
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def start(self, inputs, buffer_len):
        """No context, and room for the text, (B, T)."""
        return (), jnp.zeros((inputs.prompt.shape[0], buffer_len), jnp.int32)

    def begin(self, tokens, length, context, state, *, lags=True):
        """Logits (B, V) after the first `length` tokens, and the state."""
        return self.after(tokens, length), tokens

    def extend(self, token, position, context, state):
        """Logits (B, V) after `token`, which was drafted at `position`."""
        text = jax.vmap(lambda row, at, new: row.at[at].set(new))(state, position, token)
        return self.after(text, position + 1), text

    def logits(self, hidden):
        """`begin` and `extend` have returned logits in the place of hidden states."""
        return hidden

    def after(self, text, length):
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        known = jnp.arange(1, text.shape[1], dtype=jnp.int32)[None, :] < length[:, None]
        matches = ((text[:, :-1] == last) & known).astype(jnp.float32)
        following = jax.nn.one_hot(text[:, 1:], self.vocab_size)
        return jnp.log(0.1 + jnp.einsum("bt,btv->bv", matches, following))


def main():
    check_drafter(Habits(vocab_size=3))
    print("Habits drafts by the known tokens alone, and the output's distribution is as before.")


if __name__ == "__main__":
    main()
