"""Drafters without a network: unigram and bigram counts, and copying from the input.

Their cost c is close to 0. A row of logits that is −inf throughout proposes no token, and the
row's draft ends there.

    counts = ngram.count(sequences, vocab_size=2048, start_id=0)
    specjax.generate(target, ngram.bigram(counts), texts)
    specjax.generate(target, ngram.PromptLookup(target.model.vocab_size), texts)
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.drafters.base import Drafter
from specjax.pytrees import pytree
from specjax.support.files import replacing
from specjax.support.npz import read_npz
from specjax.support.ranges import number, whole

MAX_IDS = 1 << 21  # eight times those of the largest vocabularies in use


class Counts(NamedTuple):
    """Counts of each id, and of each pair of consecutive ids, stored by rows.

    Successors of id y are `ids[offsets[y] : offsets[y+1]]`, ascending, and `times` has
    their counts at the same places; the N pairs take 8 bytes each, whatever V is.
    """

    unigram: Int[np.ndarray, " V"]  # int64
    offsets: Int[np.ndarray, " V+1"]  # int32
    ids: Int[np.ndarray, " N"]  # int32
    times: Int[np.ndarray, " N"]  # int32

    @property
    def vocab_size(self) -> int:
        """V: ids 0 … V−1 were counted."""
        return len(self.unigram)


def count(sequences: Iterable[Sequence[int]], vocab_size: int, start_id: int) -> Counts:
    """Count ids and pairs over sequences of ids, each with its EOS.

    The first token of a sequence follows `start_id`, which is not counted itself.

    Raises:
      ValueError: no tokens at all, or an id outside 0 … vocab_size−1.
    """
    rows = [np.asarray(row, np.int64) for row in sequences if len(row)]
    if not rows:
        raise ValueError("There is nothing to count: every sequence is empty.")
    after = np.concatenate(rows)
    lengths = np.array([len(row) for row in rows])
    before = np.roll(after, 1)
    before[np.cumsum(lengths) - lengths] = start_id
    for ids in (before, after):
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"Id {wrong} is outside 0 … {vocab_size - 1}; vocab_size={vocab_size} must be that "
                "of the tokenizer which made the sequences."
            )
    pairs, times = np.unique(before * vocab_size + after, return_counts=True)
    starts = np.searchsorted(pairs, np.arange(vocab_size + 1) * vocab_size)
    return Counts(
        unigram=np.bincount(after, minlength=vocab_size),
        offsets=starts.astype(np.int32),
        ids=(pairs % vocab_size).astype(np.int32),
        times=times.astype(np.int32),
    )


def save(path: str | os.PathLike, counts: Counts) -> None:
    """Write counts to one compressed .npz file, in the smallest integers that hold them.

    The same counts give the same bytes.
    """
    gaps = np.diff(counts.ids, prepend=0)  # within a row ids ascend: gaps compress better
    heads = counts.offsets[:-1][np.diff(counts.offsets) > 0]
    gaps[heads] = counts.ids[heads]
    arrays = {
        "unigram": counts.unigram,
        "successors": np.diff(counts.offsets),
        "gaps": gaps,
        "times": counts.times,
    }
    # An open file, because numpy adds .npz to a name without it.
    with replacing(pathlib.Path(path)) as part, part.open("wb") as file:
        np.savez_compressed(file, **{name: _smallest(x) for name, x in arrays.items()})  # type: ignore[arg-type]


def _smallest(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def load(path: str | os.PathLike) -> Counts:
    """Load counts that `save` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file holds no counts, its parts do not fit together, or it has more ids than
        `MAX_IDS`, or more pairs than bits.
    """
    names = ("unigram", "successors", "gaps", "times")
    found = read_npz(path, dict.fromkeys(names, 1), "n-gram counts", "Write it again.")
    unigram, successors, gaps, times = (found[name] for name in names)
    if len(unigram) > MAX_IDS or len(gaps) > 8 * os.path.getsize(path):
        raise ValueError(
            f"{path} says that it has {len(unigram):,} ids and {len(gaps):,} pairs; at most "
            f"{MAX_IDS:,} ids and a pair for each of its bits are read."
        )
    fits = len(successors) == len(unigram) and len(gaps) == len(times)
    counted = min(x.min(initial=0) for x in (unigram, successors, times)) >= 0 < len(unigram)
    if not (fits and counted and successors.sum(dtype=np.float64) == len(gaps)):
        raise ValueError(f"{path}: its tables do not fit together; write it again.")
    unigram, successors, gaps = (x.astype(np.int64) for x in (unigram, successors, gaps))
    offsets = np.concatenate([[0], np.cumsum(successors)])
    total = np.concatenate([[0], np.cumsum(gaps)])
    ids = total[1:] - np.repeat(total[offsets[:-1]], successors)
    if len(ids) and (ids.min() < 0 or ids.max() >= len(unigram)):
        raise ValueError(f"{path}: an id is outside its vocabulary; write it again.")
    return Counts(unigram, offsets.astype(np.int32), ids.astype(np.int32), times.astype(np.int32))


def _smoothed(counts: Counts, add_k: float) -> Float[np.ndarray, " V"]:
    """Add-k probabilities (c(x) + k) / (N + kV), in float64."""
    weights = counts.unigram + number("add_k", add_k, "(0, ∞)", "every id can be drafted then")
    return weights / weights.sum()


class ByLast(Drafter):
    """Base of drafters whose distribution depends on the last token at most."""

    free: ClassVar[bool] = True

    def start(self, inputs, buffer_len):
        return (), ()

    def begin(self, tokens, length, context, state, *, lags=True):
        return self._after(jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]), state

    def extend(self, token, position, context, state):
        return self._after(token), state

    def logits(self, hidden):
        return hidden

    def _after(self, last: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Logits after `last`."""
        raise NotImplementedError


@pytree
class Unigram(ByLast):
    """Drafts from one distribution for every prefix."""

    logprobs: Float[Array, " V"]

    @property
    def vocab_size(self) -> int:
        return self.logprobs.shape[0]

    def _after(self, last):
        return jnp.broadcast_to(self.logprobs[None, :], (last.shape[0], self.vocab_size))


def unigram(counts: Counts, add_k: float = 1.0) -> Unigram:
    """Make a unigram drafter with add-k smoothing: P(x) = (c(x) + k) / (N + kV), N = Σ c.

    Raises:
      ValueError: add_k ≤ 0.
    """
    return Unigram(jnp.asarray(np.log(_smoothed(counts, add_k)).astype(np.float32)))


@pytree
class Bigram(ByLast):
    """Drafts from a distribution that depends on the last token.

    A row of the table is computed on reading, from the pairs that were seen, so memory does not
    grow with V². Logits are the logs of unnormalised weights.
    """

    prior: Float[Array, " V"]  # weight of each id after any other, > 0
    offsets: Int[Array, " V+1"]  # as in `Counts`
    ids: Int[Array, " N+W"]  # W more than there are pairs, so that a row can be read W wide
    times: Float[Array, " N+W"]
    most: int = dataclasses.field(metadata={"static": True})  # W: the most successors of one id

    @property
    def vocab_size(self) -> int:
        return self.prior.shape[0]

    def _after(self, last):
        """Logits after `last`: log(prior + count)."""
        first, past = self.offsets[last][:, None], self.offsets[last + 1][:, None]
        at = first + jnp.arange(self.most, dtype=jnp.int32)[None, :]
        ids = jnp.where(at < past, self.ids[at], self.vocab_size)  # past the row: dropped
        weights = jnp.broadcast_to(self.prior[None, :], (last.shape[0], self.vocab_size))
        rows = jnp.arange(last.shape[0], dtype=jnp.int32)[:, None]
        return jnp.log(weights.at[rows, ids].add(self.times[at], mode="drop"))


def bigram(counts: Counts, add_k: float = 1.0, strength: float = 1.0) -> Bigram:
    """Make a bigram drafter, interpolated with the add-k unigram P₁ (a Dirichlet prior).

        P(x | y) = (c(y, x) + m·P₁(x)) / (c(y) + m) = λ·c(y, x)/c(y) + (1 − λ)·P₁(x)

    with λ = c(y) / (c(y) + m). Frequent ids depend little on the unigram distribution, ids that
    were never seen follow it, and every id has positive probability.

    Args:
      strength: m > 0, the weight of the unigram distribution in pairs.

    Raises:
      ValueError: add_k or strength ≤ 0.
    """
    strength = number("strength", strength, "(0, ∞)", "every id can be drafted then")
    most = int(np.diff(counts.offsets).max())
    return Bigram(
        prior=jnp.asarray((strength * _smoothed(counts, add_k)).astype(np.float32)),
        offsets=jnp.asarray(counts.offsets),
        ids=jnp.asarray(np.pad(counts.ids, (0, most))),
        times=jnp.asarray(np.pad(counts.times, (0, most)).astype(np.float32)),
        most=most,
    )


LONGEST = 16  # n-gram, and matches: both loops are unrolled, and compile the longer for it
_NOTHING = -1  # the place of a missing token; no id equals it


@pytree
class PromptLookup(Drafter):
    """Proposes what followed the last n-gram when it occurred before (prompt lookup decoding).

    It searches the source of an encoder-decoder, then the prompt and the output so far, drafted
    tokens included. The longest n-gram that occurs wins, from `max_ngram` down to `min_ngram` last
    tokens; of equals, the most recent. With known tokens a b c a b and n = 2, it proposes c, then
    a, b and c again. Its distribution is one-hot; without a match it proposes nothing.

    With `matches` > 1, for trees, the best matches with different next tokens propose one each,
    every next one with half the probability.

    All decisions depend on the prefix alone, so the output's distribution stays the target's.

    Raises:
      ValueError: not 1 ≤ min_ngram ≤ max_ngram ≤ `LONGEST`, or not 1 ≤ matches ≤ `LONGEST`.
    """

    free: ClassVar[bool] = True

    vocab_size: int = dataclasses.field(metadata={"static": True})
    max_ngram: int = dataclasses.field(default=3, metadata={"static": True})
    min_ngram: int = dataclasses.field(default=1, metadata={"static": True})
    matches: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def branches(self) -> bool:
        """Whether drafts can be trees: only with several matches."""
        return self.matches > 1

    def __post_init__(self):
        for name in ("max_ngram", "min_ngram", "matches"):
            whole(name, getattr(self, name), f"[1, {LONGEST}]")
        whole("vocab_size", self.vocab_size, "[1, ∞)")
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} and max_ngram={self.max_ngram} must satisfy "
                "1 ≤ min_ngram ≤ max_ngram."
            )

    def start(self, inputs, buffer_len):
        """Make the context, the source (B, S+1), and the state, the known tokens (B, T)."""
        batch = inputs.source.shape[0]
        source = _up_to(inputs.source, inputs.source_len)
        # An n-gram does not reach from the source into the output.
        source = jnp.pad(source, ((0, 0), (0, 1)), constant_values=_NOTHING)
        return source, jnp.full((batch, buffer_len), _NOTHING, jnp.int32)

    def begin(self, tokens, length, context, state, *, lags=True):
        known = _up_to(tokens, length)
        return self._look_up(context, known, length), known

    def extend(self, token, position, context, state):
        rows = jnp.arange(token.shape[0], dtype=jnp.int32)
        known = state.at[rows, position].set(token, mode="drop")
        return self._look_up(context, known, position + 1), known

    def logits(self, hidden):
        return hidden

    def _look_up(
        self, source: Int[Array, "B S"], known: Int[Array, "B T"], length: Int[Array, " B"]
    ) -> Float[Array, "B V"]:
        """Logits: −n·log 2 for the n-th best id, from 0, and −inf for the rest."""
        text = jnp.concatenate([source, known], axis=1)
        here = jnp.arange(text.shape[1], dtype=jnp.int32)[None, :]
        last = source.shape[1] + length[:, None] - 1
        matched = jnp.zeros(text.shape, jnp.int32)  # how many tokens up to here agree with the last
        agree = here < last  # the end of the text would agree with itself
        for back in range(self.max_ngram):
            wanted = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
            there = jnp.roll(text, back, axis=1)  # what comes round the end fails the next test
            agree &= (there == wanted) & (wanted != _NOTHING) & (here >= back)
            matched += agree.astype(jnp.int32)
        following = jnp.roll(text, -1, axis=1)
        found = (matched >= self.min_ngram) & (following != _NOTHING)
        rank = jnp.where(found, matched * text.shape[1] + here, -1)
        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)[None, :]
        logits = jnp.full((text.shape[0], self.vocab_size), -jnp.inf)
        for place in range(self.matches):
            best = jnp.max(rank, axis=1, keepdims=True)
            at = jnp.maximum(best, 0) % text.shape[1]
            proposed = jnp.where(
                best >= 0, jnp.take_along_axis(following, at, axis=1), jnp.int32(_NOTHING)
            )
            logits = jnp.where(ids == proposed, -place * math.log(2.0), logits)
            rank = jnp.where(following == proposed, -1, rank)
        return logits


def _up_to(ids: Int[Array, "B T"], length: Int[Array, " B"]) -> Int[Array, "B T"]:
    """The ids before `length`, and `_NOTHING` from there on."""
    known = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < length[:, None]
    return jnp.where(known, ids, _NOTHING)
