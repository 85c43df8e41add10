"""Questions in groups, and a group decoded by all methods in turns.

Every method gets the same prompts. Those of later turns hold plain decoding's answers, so that
methods are compared on the same inputs.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import Key

from experiments.tasks.questions import Question
from specjax.batching import bucket
from specjax.checkpoints.tokenizers import prompt_of
from specjax.decoding.texts import tokenize
from specjax.loop import Method
from specjax.measure import timing
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN
from specjax.models.checkpoint import Checkpoint
from specjax.results import Row

SMALLEST_WIDTH = 128  # tokens of a prompt; each width compiles all methods once
NO_LIMIT = 2**30  # prompts are never cut
Chat = list[dict[str, str]]


class Asked(NamedTuple):
    """A question with its first prompt."""

    question: Question
    ids: list[int]


class Batch(NamedTuple):
    """Questions that decode together. The last `filled` are repeated to fill the batch."""

    questions: tuple[Question, ...]
    filled: int
    number: int  # among all batches of its size, for the noise


class Group(NamedTuple):
    """Batches of one kind: the unit of work, and of continuing."""

    kind: str
    number: int  # within the kind
    batches: tuple[Batch, ...]


def most_tokens(target: Checkpoint, max_new_tokens: int, max_source_len: int = 0) -> int:
    """The longest prompt that leaves room for its answer.

    Args:
      max_source_len: the user's own limit; 0: the target's.
    """
    limit = max_source_len or target.max_source_len
    positions = target.config.max_positions
    if target.config.is_encoder_decoder or positions is None:
        return limit
    return min(limit, positions - max_new_tokens)


def encode(target: Checkpoint, chats: Sequence[Chat]) -> list[list[int]]:
    """Tokenize each chat as a prompt, uncut."""
    prompts = [prompt_of(target.tokenizer, chat, target.name) for chat in chats]
    return tokenize(target, prompts, NO_LIMIT)


def user(turn: str) -> dict[str, str]:
    """A user's turn, as chat templates read it."""
    return {"role": "user", "content": turn}


def choose(
    target: Checkpoint, questions: Sequence[Question], per_kind: int, limit: int, skip: int = 0
) -> tuple[list[Asked], list[Question]]:
    """Choose questions spread over each kind, and leave out those whose first prompt is too long.

    Args:
      per_kind: questions of a kind at most; 0: all.
      limit: tokens of a prompt at most.
      skip: the first so many questions of a kind are left out.

    Returns: the questions that fit, kind by kind, and those that do not.

    Raises:
      ValueError: none fits.
    """
    by_kind: dict[str, list[Question]] = {}
    for question in questions:
        by_kind.setdefault(question.kind, []).append(question)
    if none := [kind for kind, of in by_kind.items() if len(of) <= skip]:
        raise ValueError(f"skip={skip} leaves no question of {', '.join(none)}: lower it.")
    some = [one for of in by_kind.values() for one in timing.spread(of[skip:], per_kind or len(of))]
    pairs = zip(some, encode(target, [[user(one.turns[0])] for one in some]), strict=True)
    asked = [Asked(*pair) for pair in pairs]
    fit = [one for one in asked if len(one.ids) <= limit]
    if not fit:
        shortest = min(len(one.ids) for one in asked)
        raise ValueError(
            f"All {len(asked)} questions are too long: the shortest prompt has {shortest} tokens, "
            f"and {target.name} has room for {limit} before an answer. Lower max_new_tokens, raise "
            "max_source_len, or take other categories."
        )
    return fit, [one.question for one in asked if len(one.ids) > limit]


def grouped(asked: Sequence[Asked], batch_size: int, size: int) -> list[Group]:
    """Divide questions into groups of batches.

    Prompts of a batch have similar lengths, and its questions the same number of turns.

    Args:
      size: questions of a group, where a batch is not larger.
    """
    groups: list[Group] = []
    kinds = dict.fromkeys(one.question.kind for one in asked)
    number = 0
    for kind in kinds:
        batches: list[Batch] = []
        mine = [one for one in asked if one.question.kind == kind]
        for turns in sorted({len(one.question.turns) for one in mine}):
            same = [one for one in mine if len(one.question.turns) == turns]
            same.sort(key=lambda one: len(one.ids))
            for at in range(0, len(same), batch_size):
                own = [one.question for one in same[at : at + batch_size]]
                filled = batch_size - len(own)
                more = [same[i % len(same)].question for i in range(filled)]
                batches.append(Batch((*own, *more), filled, number))
                number += 1
        count = max(1, size // batch_size)
        groups += [
            Group(kind, i, tuple(batches[at : at + count]))
            for i, at in enumerate(range(0, len(batches), count))
        ]
    return groups


def widths(longest: int) -> list[int]:
    """Widths of prompts: each twice the one before, and the last for the longest prompt."""
    found = [bucket(longest, smallest=SMALLEST_WIDTH)]
    while found[0] // 2 >= SMALLEST_WIDTH:
        found.insert(0, found[0] // 2)
    return found


def width_of(length: int, known: Sequence[int]) -> int:
    """The smallest known width for a prompt; beyond the last one it is doubled until it fits."""
    fitting = [width for width in known if width >= length]
    if fitting:
        return fitting[0]
    width = known[-1]
    while width < length:
        width *= 2
    return width


class Decoder:
    """Decodes groups by methods of one temperature and batch size, each shape compiled once."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        target: Checkpoint,
        known: Sequence[int],
        *,
        max_new_tokens: int,
        limit: int,
        key: Key[Array, ""],
        repeats: int,
        say: timing.Say = timing.silent,
    ):
        """Keep the arguments of all calls.

        Args:
          methods: by name; `PLAIN` answers for later turns.
          known: widths of prompts.
          limit: tokens of a prompt at most.
        """
        self.methods, self.target, self.known = methods, target, known
        self.limit, self.key, self.say = limit, key, say
        self.watch = Stopwatch(target, max_new_tokens, key, repeats=repeats, order=random.Random(0))

    def decode(self, group: Group) -> dict[str, list[dict[str, Any]]]:
        """Decode a group's batches; a list of them for each method, as `tables` reads it."""
        made: dict[str, list[dict[str, Any]]] = {name: [] for name in self.methods}
        for batch in group.batches:
            for name, turns in self._answers(batch).items():
                made[name].append(
                    {
                        "questions": [one.question_id for one in batch.questions],
                        "filled": batch.filled,
                        "unasked": len(batch.questions[0].turns) - len(turns),
                        "turns": turns,
                    }
                )
        return made

    def _answers(self, batch: Batch) -> dict[str, list[dict[str, Any]]]:
        """Decode all turns of a batch; for each method what they took and gave."""
        made: dict[str, list[dict[str, Any]]] = {name: [] for name in self.methods}
        chats: list[Chat] = [[] for _ in batch.questions]
        key = jax.random.fold_in(self.key, batch.number)
        for turn in range(len(batch.questions[0].turns)):
            for chat, question in zip(chats, batch.questions, strict=True):
                chat.append(user(question.turns[turn]))
            ids = encode(self.target, chats)
            if max(map(len, ids)) > self.limit:
                break
            found = self._race(ids, jax.random.fold_in(key, turn))
            plain = found.outputs(PLAIN)
            for name in self.methods:
                outputs = found.outputs(name)
                decode, whole = found.decode[name][:, 0], found.whole[name][:, 0]
                made[name].append(
                    {
                        "decode": decode.tolist(),
                        "prefill": (whole - decode).tolist(),
                        "outputs": [
                            counts(row, other, text=name == PLAIN or row.text != other.text)
                            for row, other in zip(outputs, plain, strict=True)
                        ],
                    }
                )
            for chat, row in zip(chats, plain, strict=True):
                chat.append({"role": "assistant", "content": row.text})
        return made

    def _race(self, ids: Sequence[Sequence[int]], key: Key[Array, ""]) -> timing.Comparison:
        width = width_of(max(map(len, ids)), self.known)
        watch = dataclasses.replace(
            self.watch, key=key, batch_size=len(ids), width=width,
            say=lambda what: self.say(f"{what.partition(' ')[0]}, prompts of {width}"),
        )  # fmt: skip
        return watch.race(self.methods, ids, share=True)


def counts(row: Row, plain: Row, *, text: bool) -> dict[str, Any]:
    """What the tables need of an output: counts, and whether plain decoding's tokens are equal.

    Args:
      text: whether to keep the text too.
    """
    kept = ("target_calls", "verified", "draft_calls", "accepted", "accepted_lengths", "tested")
    found = {"tokens": row.emitted, **{name: getattr(row, name) for name in kept}}
    found["same"] = row.tokens == plain.tokens
    return found | ({"text": row.text} if text else {})
