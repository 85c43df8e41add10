"""Pairs of ids, cut into batches of similar length, in an order set by seed and step alone.

A bucket (S, T) holds the pairs whose source fits in S and whose target fits in T tokens; each pair
goes to the first bucket that holds it. A batch comes from one bucket and has as many rows as give
about the same number of target tokens, so a training step costs the same everywhere, there is
little padding, and only as many shapes are compiled as there are buckets.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.tasks.examples import Example
from specjax.checkpoints import tokenizers
from specjax.decoding.texts import cut

FILLER = 0  # the id after the end of a row; a tokenizer may use it for a token
PART = 5000  # pairs that are encoded at once: a tokenizer keeps much more than ids of each


class Batch(NamedTuple):
    """A batch of padded rows; an end id is the last id of each target.

    Only the lengths say what is padding: the id that fills the rest of a row may be a token.
    """

    source: np.ndarray  # (B, S) int32; S = 0 for a decoder-only model
    source_len: np.ndarray  # (B,) int32
    target: np.ndarray  # (B, T) int32
    target_len: np.ndarray  # (B,) int32; 0 for a row that only fills the batch

    @property
    def real(self) -> np.ndarray:
        """(B, T) bool: where a target id is part of the text, not padding."""
        return np.arange(self.target.shape[1], dtype=np.int32)[None] < self.target_len[:, None]


class Pair(NamedTuple):
    """Ids of one example, its end id included; for a decoder-only model the source is empty."""

    source: np.ndarray
    target: np.ndarray


def encode(
    examples: Sequence[Example],
    tokenizer,
    *,
    decoder_only: bool = False,
    eos_ids: Sequence[int] = (),
) -> list[Pair]:
    """The ids of examples. A target ends with the model's end id once, whatever the tokenizer adds.

    For a decoder-only model input and target are one text, all of which is to be learned.

    Args:
      tokenizer: of transformers.
      eos_ids: of the model; none: it ends with the tokenizer's EOS.

    Raises:
      ValueError: neither the tokenizer nor the model has an end id.
    """
    end = tokenizers.end_id(tokenizer, eos_ids)
    ends = {end, *eos_ids}
    parts = tqdm(
        range(0, len(examples), PART), "encoding", unit="pair", unit_scale=PART, delay=2,
        mininterval=1, leave=False,
    )  # fmt: skip
    pairs: list[Pair] = []
    for at in parts:
        part = examples[at : at + PART]
        texts = [e.input + e.target if decoder_only else e.target for e in part]
        sources = [()] * len(part) if decoder_only else _ids(tokenizer, [e.input for e in part])
        for source, ids in zip(sources, _ids(tokenizer, texts, marks=False), strict=True):
            # Training puts the start token before every target; a chat template has written it.
            begun = ids[ids[:1] == [tokenizer.bos_token_id] :]
            # A chat template may write space, or a second end, behind the end of the last turn.
            while begun[-2:-1] and begun[-2] in ends and _is_rest(tokenizer, begun[-1], ends):
                begun.pop()
            if not begun or begun[-1] not in ends:  # a chat template may have written it
                begun.append(end)
            pairs.append(Pair(np.array(source, np.int32), np.array(begun, np.int32)))
    return pairs


def _is_rest(tokenizer, last: int, ends: Collection[int]) -> bool:
    return last in ends or not tokenizer.decode([last]).strip()


def _ids(tokenizer, texts: list[str], *, marks: bool = True) -> list[list[int]]:
    # Not verbose: buckets decide what is too long, and need no warning.
    return tokenizer(texts, add_special_tokens=marks, verbose=False)["input_ids"]


@dataclasses.dataclass(frozen=True)
class Order:
    """The batches of a run, as a function of the step.

    Args:
      lengths: (N, 2) numbers of source and target ids; pairs that no bucket holds are left out.
      buckets: (S, T), smallest first.
      target_tokens: of one batch, padding included; a batch has target_tokens // T rows.
      seed: of the order. Each epoch has its own, and all of them the same number of batches.
    """

    lengths: np.ndarray
    buckets: tuple[tuple[int, int], ...]
    target_tokens: int
    seed: int

    def __post_init__(self):
        if not self.batches_per_epoch:
            raise ValueError(
                f"{len(self.lengths)} pairs do not fill one batch of {self.target_tokens} target "
                f"tokens in any bucket of {self.buckets}: use more pairs, or a smaller batch"
            )

    @functools.cached_property
    def members(self) -> list[np.ndarray]:
        """The pairs of each bucket, by index."""
        sources, targets = self.lengths.T
        fits = np.stack([(sources <= s) & (targets <= t) for s, t in self.buckets])
        return [np.flatnonzero(row & ~fits[:i].any(0)) for i, row in enumerate(fits)]

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        return sum(len(pairs) // self._rows(i) for i, pairs in enumerate(self.members))

    def _rows(self, bucket: int) -> int:
        return max(1, self.target_tokens // self.buckets[bucket][1])

    def epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(bucket, indices of pairs) of each batch. What does not fill a batch waits an epoch."""
        rng = np.random.default_rng((self.seed, epoch))
        batches = []
        for bucket, pairs in enumerate(self.members):
            rows, shuffled = self._rows(bucket), rng.permutation(pairs)
            full = len(pairs) // rows
            batches += [(bucket, part) for part in shuffled[: full * rows].reshape(full, rows)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def from_step(self, step: int) -> Iterator[tuple[int, np.ndarray]]:
        """The batches of steps step, step + 1, …, without end."""
        epoch, skipped = divmod(step, self.batches_per_epoch)
        while True:
            yield from self.epoch(epoch)[skipped:]
            epoch, skipped = epoch + 1, 0


def left_out(pairs: Sequence[Pair], buckets: Sequence[tuple[int, int]]) -> int:
    """The number of pairs that are longer than every bucket."""
    fits = (lengths(pairs)[:, None] <= np.array(buckets)).all(-1).any(-1)
    return len(pairs) - int(fits.sum())


def truncated(pairs: Sequence[Pair], longest: int, mark: Sequence[int] = ()) -> list[Pair]:
    """The pairs with sources of at most so many ids, as `decoding.texts.tokenize` cuts them.

    Args:
      mark: ids that the tokenizer puts behind every text, which stay.
    """
    return [
        pair
        if len(pair.source) <= longest
        else Pair(np.array(cut(pair.source.tolist(), longest, mark), np.int32), pair.target)
        for pair in pairs
    ]


def lengths(pairs: Sequence[Pair]) -> np.ndarray:
    """(N, 2) numbers of source and target ids."""
    return np.array([(len(p.source), len(p.target)) for p in pairs], np.int64).reshape(-1, 2)


def collate(pairs: Sequence[Pair], shape: tuple[int, int]) -> Batch:
    """Pairs as one padded batch of (S, T) = shape, into which they must fit."""
    source = np.full((len(pairs), shape[0]), FILLER, np.int32)
    target = np.full((len(pairs), shape[1]), FILLER, np.int32)
    for row, pair in enumerate(pairs):
        source[row, : len(pair.source)] = pair.source
        target[row, : len(pair.target)] = pair.target
    source_len, target_len = lengths(pairs).astype(np.int32).T
    return Batch(source, source_len, target, target_len)


def in_order(
    pairs: Sequence[Pair], buckets: tuple[tuple[int, int], ...], target_tokens: int
) -> list[Batch]:
    """All pairs once, for evaluation: no shuffling, the last batch of a bucket filled with padding.

    A padding row is one id in and nothing out, so it counts for no token of the loss.
    """
    order = Order(lengths(pairs), buckets, target_tokens=buckets[0][1], seed=0)
    batches = []
    for shape, members in zip(buckets, order.members, strict=True):
        empty = Pair(np.ones(min(1, shape[0]), np.int32), np.zeros(0, np.int32))
        rows = max(1, target_tokens // shape[1])
        for at in range(0, len(members), rows):
            chosen = [pairs[i] for i in members[at : at + rows]]
            batches.append(collate(chosen + [empty] * (rows - len(chosen)), shape))
    return batches
