"""Methods side by side on the same inputs, at batch 1, compilation excluded."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import decoding
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.models.hub import Checkpoint
from specjax.speculative import Speculative
from specjax.state import State

Method = Autoregressive | Speculative


class Timed:
    """Seconds of one method, by repeat, summed over inputs; and the rows of the last repeat."""

    def __init__(self):
        self.decode: list[float] = []  # the loop alone
        self.end_to_end: list[float] = []  # with the encoder and prefill
        self.rows: list[decoding.Row] = []
        self.notes: list[Any] = []  # of the last repeat too

    def start_repeat(self) -> None:
        """Begin a new pass over the inputs."""
        self.decode.append(0.0)
        self.end_to_end.append(0.0)
        self.rows, self.notes = [], []

    def add(self, decode: float, end_to_end: float, row: decoding.Row, note: Any) -> None:
        """One input."""
        self.decode[-1] += decode
        self.end_to_end[-1] += end_to_end
        self.rows.append(row)
        self.notes.append(note)

    def per_token(self, seconds: list[float]) -> np.ndarray:
        """Seconds per emitted token, for each repeat."""
        return np.array(seconds) / sum(row.emitted for row in self.rows)


def side_by_side(
    methods: Mapping[str, Method],
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    repeats: int,
    names: tuple[str, str] = ("target", "draft"),
    between: Callable[[], None] = lambda: None,
    note: Callable[[State], Any] = lambda state: None,
) -> dict[str, Timed]:
    """Decode every text by every method, one at a time, methods taking turns at each text.

    Args:
      texts: ids from `decoding.tokenize`.
      names: of target and draft, for errors.
      between: is called after each text; what is timed there meets the same machine.
      note: what to keep of each final state.
    """
    width = common_width(texts)

    def once(timed: Timed, method: Method, index: int) -> None:
        begin = time.perf_counter()
        context, state = jax.block_until_ready(
            decoding.prepare(
                method,
                target,
                [texts[index]],
                [(index, 0)],
                max_new_tokens=max_new_tokens,
                key=key,
                rows=1,
                width=width,
            )
        )
        middle = time.perf_counter()
        state = jax.block_until_ready(decoding.run(method, context, state))
        end = time.perf_counter()
        decoding.check_finite(state, names)
        (row,) = decoding.read_rows(state, [(index, 0)], target)
        timed.add(end - middle, end - begin, row, note(state))

    for method in methods.values():  # compilation
        compiled = Timed()
        compiled.start_repeat()
        once(compiled, method, 0)
    timed = {name: Timed() for name in methods}
    for _ in range(repeats):
        for name in methods:
            timed[name].start_repeat()
        for index in range(len(texts)):
            for name, method in methods.items():
                once(timed[name], method, index)
            between()
    return timed


def common_width(texts: Sequence[Sequence[int]]) -> int:
    """One width for all texts, so that they share their compilations."""
    longest = max(map(len, texts))
    return bucket(longest, smallest=16 if longest > 1 else 1)


def gain(plain: Timed, other: Timed) -> dict[str, float]:
    """How many times faster per token: medians over repeats of the ratio within one repeat.

    `gain_decode` is that of the loops alone, with its quartiles as the noise.
    """
    decode_only = plain.per_token(plain.decode) / other.per_token(other.decode)
    whole = plain.per_token(plain.end_to_end) / other.per_token(other.end_to_end)
    low, median, high = np.quantile(decode_only, [0.25, 0.5, 0.75])
    return {
        "gain_decode": float(median),
        "gain_decode_low": float(low),
        "gain_decode_high": float(high),
        "gain_end_to_end": float(np.median(whole)),
    }


def identical(plain: Timed, other: Timed) -> bool:
    """Whether both gave the same tokens for every input."""
    both = zip(plain.rows, other.rows, strict=True)
    return all(one.tokens == another.tokens for one, another in both)
