"""A log of every round of a run, which the loop writes on request."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.rounds import Round


class Log(NamedTuple):
    """The log of R rounds for each row; entries of rounds to come are 0."""

    written: Int[Array, " B"]  # rounds so far
    allowed: Int[Array, "B R"]  # the longest draft that the policy allowed
    verified: Int[Array, "B R"]
    accepted: Int[Array, "B R"]  # drafted tokens in the output
    emitted: Int[Array, "B R"]
    tested: Int[Array, "B R"]  # drafted tokens up to the first rejection, or to the output's end
    belief_logprob: Float[Array, "B R G"]  # of each drafted token, in the drafter's belief
    entropy: Float[Array, "B R G"]  # of the belief that each token was drawn from, in nats


def empty(rows: int, rounds: int, gamma_max: int) -> Log:
    """Return a log of `rounds` rounds for each row; a round emits at least one token."""
    # A separate array for each field, because the loop donates them.
    counts = [jnp.zeros((rows, rounds), jnp.int32) for _ in range(5)]
    slots = [jnp.zeros((rows, rounds, gamma_max), jnp.float32) for _ in range(2)]
    return Log(jnp.zeros((rows,), jnp.int32), *counts, *slots)


def write(log: Log, round_: Round) -> Log:
    """Add a line for each active row. The round is one of a chain."""
    written, *lines = log
    line = (
        round_.drafts.allowed,
        round_.verified,
        round_.in_output,
        round_.emitted,
        # An output that ends inside the draft tests nothing after its last token, as in `commit`.
        jnp.sum(round_.tested, axis=1, dtype=jnp.int32),
        round_.belief_logprob,
        round_.drafts.entropy,
    )
    rows = jnp.arange(len(written), dtype=jnp.int32)
    at = jnp.where(round_.active, written, log.verified.shape[1])  # past the end: dropped
    put = [old.at[rows, at].set(new, mode="drop") for old, new in zip(lines, line, strict=True)]
    return Log(written + round_.active.astype(jnp.int32), *put)


def lines(log: Log, row: int) -> list[dict[str, Any]]:
    """Return the rounds of one row as rows of a table.

    Args:
      log: the log after the loop, on the host.

    Returns:
      For each round: round (from 0), allowed, verified, accepted, emitted, tested, and for each
      drafted token confidence, its probability in the drafter's belief, and entropy, in nats.
      Position i of the draft, from 0, was tested if i < tested, and accepted if i < accepted.
    """
    found = []
    for number in range(int(log.written[row])):
        one = jax.tree.map(lambda field, at=number: np.asarray(field)[row, at], log[1:])
        *counts, logprob, entropy = one
        verified = slice(0, int(counts[1]))
        found.append(
            {
                "round": number,
                **{name: int(count) for name, count in zip(Log._fields[1:-2], counts, strict=True)},
                "confidence": np.exp(logprob[verified]).astype(float).round(6).tolist(),
                "entropy": entropy[verified].astype(float).round(6).tolist(),
            }
        )
    return found
