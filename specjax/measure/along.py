"""Both models' distributions at every position of known outputs.

The target reads all tokens in one call. The drafter may have a state and read the target's hidden
states. So it steps through the tokens as in the loop, with a round at every position that keeps one
token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specjax.batching import bucket
from specjax.decoding import starting
from specjax.decoding.texts import common_width, tokenize
from specjax.drafters.base import block_at
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.sampling import as_key
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.types import Text


def along(
    method: Speculative,
    contexts: Contexts,
    state: State,
    outputs: Int[Array, "B T"],
    emitted: Int[Array, " B"],
    visit: Callable[[State, Float[Array, "B T E"]], tuple[State, Any]],
) -> tuple[State, Any]:
    """Visit the positions of each row's output one after the other, and the one behind it.

    With prompt [a b] and output [c d], three visits know a b, a b c and a b c d. Before the first
    the drafter has observed the target's hidden state after a; after each it observes the one after
    the last known token, as in rounds whose drafts are all rejected. A row at its end stays there,
    as a finished row does in the loop.

    Args:
      contexts, state: from `loop.start`, with room for prompt, output and what visits draft.
      outputs: without the prompt; arbitrary beyond `emitted` < T.
      visit: takes the state with `length` known tokens, and the target's hidden states after each
        token of prompt and output; `last` selects the one after the known tokens. It runs the
        drafter, by `begin` or in a whole draft. It returns the state, whose drafter, cache and
        flags are kept, and arrays of B rows.

    Returns:
      The state behind the outputs, and what the T visits returned, (B, T, …).
    """
    first, one = state.length, jnp.ones_like(state.length)
    slots = jnp.arange(outputs.shape[1], dtype=jnp.int32)
    there = slots[None, :] < emitted[:, None]
    at = jnp.where(there, first[:, None] + slots[None, :], state.tokens.shape[1])
    rows = jnp.arange(outputs.shape[0])[:, None]
    tokens = state.tokens.at[rows, at].set(outputs, mode="drop")
    hidden, cache = method.target(tokens, one - 1, contexts.target, state.cache)

    def at_slot(state, slot):
        state = state.replace(length=first + jnp.minimum(slot, emitted))
        after, found = visit(state, hidden)
        newest = state.length - 1
        here = block_at(tokens, newest, 1), newest, block_at(hidden, newest, 1), one
        state = state.replace(
            cache=after.cache,
            drafter=method.drafter.observe(*here, contexts.drafter, after.drafter),
            target_finite=after.target_finite,
            draft_finite=after.draft_finite,
        )
        return state, found

    state, found = jax.lax.scan(at_slot, state.replace(tokens=tokens, cache=cache), slots)
    return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


def last(state: State, hidden: Float[Array, "B T E"]) -> Float[Array, "B E"]:
    """Select the target's hidden state after the last known token, for a visit."""
    return block_at(hidden, state.length - 1, 1)[:, 0]


def reread(
    method: Speculative, contexts: Contexts, state: State, drafts: Int[Array, "B G"]
) -> Float[Array, "B G E"]:
    """Compute the drafter's hidden state after each token of a round's draft, the last included.

    Args:
      state: before the round, since the draft did not depend on what the round showed.
    """

    def read(drafter, slot):
        position = state.length + slot
        return method.drafter.extend(drafts[:, slot], position, contexts.drafter, drafter)[::-1]

    known = state.tokens, state.length, contexts.drafter, state.drafter
    _, drafter = method.drafter.begin(*known, lags=not method.policy.fixed)
    slots = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    return jnp.moveaxis(jax.lax.scan(read, drafter, slots)[1], 0, 1)


class Batch(NamedTuple):
    """Inputs with the target's outputs for them, as `along` takes them."""

    live: int  # rows from there on are padding
    contexts: Contexts
    state: State
    input_index: Int[Array, " B"]
    outputs: Int[Array, "B T"]
    emitted: Int[Array, " B"]


def batches(
    method: Speculative,
    target: Checkpoint,
    texts: Sequence[Text],
    outputs: Sequence[Sequence[int]],
    batch_size: int,
    max_source_len: int | None = None,
    *,
    rounds: bool = False,
    max_new_tokens: int = 0,
    key: Key[Array, ""] | None = None,
) -> Iterator[Batch]:
    """Batch outputs of the target, one for each text, without those whose text or output is empty.

    All batches have one shape: a program takes longer to compile than padding takes to compute.

    Args:
      rounds: whether visits draft rounds, also behind the last token. False: no tokens are drafted,
        and the last one is left out, since no visit reads it.
      max_new_tokens: the budget that the outputs had, for rounds; or that sizes the buffer as in
        a run, whose program starts both then. Default: the longest output.
      key: key of the randomness in visits, folded with the input's index.

    Raises:
      ValueError: every input or output is empty.
    """
    sources = tokenize(target, texts, max_source_len)
    pairs = enumerate(zip(sources, outputs, strict=True))
    chosen = [i for i, (source, output) in pairs if source and output]
    if not chosen:
        raise ValueError("Nothing to measure: every input or output is empty.")
    known = {i: outputs[i] if rounds else outputs[i][:-1] for i in chosen}
    width = common_width([sources[i] for i in chosen])
    most = max(map(len, known.values()))
    count = bucket(most + 1, smallest=32)
    for at in range(0, len(chosen), batch_size):
        live = chosen[at : at + batch_size]
        contexts, state = starting.prepare(
            method,
            target,
            [sources[i] for i in live],
            [(i, 0) for i in live],
            max_new_tokens=max_new_tokens or max(most, 1),
            key=as_key(key),
            rows=bucket(min(batch_size, len(chosen))),
            width=width,
        )
        rows = len(state.done)
        index = jnp.asarray(live + [0] * (rows - len(live)), jnp.int32)
        read = padded([known[i] for i in live], rows, count)
        yield Batch(len(live), contexts, state, index, *read)


def by_prefix(
    visit: Callable[..., Float[Array, "B T *more"]],
    method: Speculative,
    target: Checkpoint,
    texts: Sequence[Text],
    outputs: Sequence[Sequence[int]],
    batch_size: int,
    max_source_len: int | None,
    max_new_tokens: int = 0,
) -> list[Float[np.ndarray, "n *more"]]:
    """Visit each prefix of an output, from the empty one on, and collect the results by output.

    Args:
      visit: takes the method and a batch's contexts, state, outputs and emitted.
      others: see `batches`.
    """
    found: list[np.ndarray] = []
    run = method, target, texts, outputs, batch_size, max_source_len
    for batch in batches(*run, max_new_tokens=max_new_tokens):
        read = batch.contexts, batch.state, batch.outputs, batch.emitted
        rows, behind = sharding.fetch(visit(method, *read)), np.asarray(batch.emitted) + 1
        found += [rows[row, : behind[row]] for row in range(batch.live)]
    return found


def padded(
    outputs: Sequence[Sequence[int]], rows: int, count: int
) -> tuple[Int[Array, "rows count"], Int[Array, " rows"]]:
    """Pad outputs as `along` takes them, and count the tokens of each, less than `count`."""
    ids, emitted = np.zeros((rows, count), np.int32), np.zeros((rows,), np.int32)
    for row, output in enumerate(outputs):
        ids[row, : len(output)] = output
        emitted[row] = len(output)
    return jnp.asarray(ids), jnp.asarray(emitted)
