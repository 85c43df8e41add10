"""Tokens, texts and counts of rows, read from the device."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from specjax.log import Log, lines
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.results import Progress, Row
from specjax.state import State, Stats

_NO_DISTRIBUTION = "gave no distribution: NaN, a negative number, or a sum other than 1"
RULE_FAULTS = (  # by entry of `State.rule_sound`
    f".stop {_NO_DISTRIBUTION}",
    ".stop accepts tokens behind the end of a draft, which nobody drafted",
    f".next_probs {_NO_DISTRIBUTION}",
)


def check_finite(state: State, names: tuple[str, str], rule: Any = None) -> None:
    """Raise FloatingPointError if a model's logits were not finite, or a user's own rule failed."""
    for finite, role, name in zip(
        (state.target_finite, state.draft_finite), ("target", "draft"), names, strict=True
    ):
        if not bool(finite):
            raise FloatingPointError(
                f"The {role} model ({name}) gave logits that are not finite. Check its weights, or "
                "use a wider dtype: T5's activations overflow float16."
            )
    sound = [True] * len(RULE_FAULTS) if state.rule_sound is None else state.rule_sound
    for fine, fault in zip(sound, RULE_FAULTS, strict=True):
        if not bool(fine):
            raise FloatingPointError(
                f"{'The rule' if rule is None else type(rule).__name__}{fault}. "
                "`specjax.testing.check_rule` tries it alone."
            )


class Outputs(NamedTuple):
    """Some rows of a state, on the host."""

    labels: Mapping[int, tuple[int, int]]  # by row: (input index, sample)
    tokens: Int[np.ndarray, "B T"]
    length: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    stats: Stats
    log: Log | None = None

    def known(self, row: int) -> tuple[list[int], list[int]]:
        """The ids of a row's prompt, and those that follow it."""
        end = self.length[row]
        begin = end - self.stats.emitted[row]
        return self.tokens[row, :begin].tolist(), self.tokens[row, begin:end].tolist()


def read(state: State) -> Outputs:
    """Read rows to the host, without labels. One transfer; caches and keys stay on the device."""
    host = state.tokens, state.length, state.done, state.stats, state.log
    return Outputs({}, *sharding.fetch(host))


def rows_of(outputs: Outputs, target: Checkpoint) -> list[Row]:
    """Build a row for each label."""
    rows, log = [], outputs.log
    for b, (index, sample) in outputs.labels.items():
        (prompt, ids), stats = outputs.known(b), outputs.stats
        rows.append(
            Row(
                index=index,
                sample=sample,
                text=text_of(target, prompt, ids),
                tokens=ids,
                target_calls=int(stats.target_calls[b]),
                verified=int(stats.verified[b]),
                draft_calls=int(stats.draft_calls[b]),
                accepted=int(stats.accepted[b]),
                accepted_lengths=stats.accepted_lengths[b].tolist(),
                tested=stats.tested[b].tolist(),
                rounds=tuple(lines(log, b)) if log else (),
            )
        )
    return rows


def progress_of(
    outputs: Outputs, target: Checkpoint, shown: dict[tuple[int, int], "Shown"]
) -> list[Progress]:
    """Report how far each label's row is.

    Args:
      shown: what has been shown of each row, by label. It is updated.
    """
    found = []
    for b, label in outputs.labels.items():
        prompt, ids = outputs.known(b)
        text, shown[label] = grown(target, prompt, ids, shown.get(label))
        found.append(Progress(*label, text, ids))
    return found


def read_rows(state: State, labels: Sequence[tuple[int, int]], target: Checkpoint) -> list[Row]:
    """Read the first rows of a batch, one for each label."""
    return rows_of(read(state)._replace(labels=dict(enumerate(labels))), target)


# --- texts -------------------------------------------------------------------------------------

UNFINISHED = "\ufffd"  # a character whose bytes are incomplete
UNSETTLED = 8  # characters at the end whose first space the next ids may remove: "  ' ve" is "'ve"


def text_of(
    target: Checkpoint,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Decode the ids behind a prompt: decode(prompt + ids) without decode(prompt).

    Decoded alone, ids would lose their leading space where a tokenizer writes ▁ for it. The ids of
    an encoder-decoder stand alone, and without a tokenizer the text is empty.
    """
    prompt = _read_before(target, prompt)
    decode = partial(_decode, target, skip_special_tokens=skip_special_tokens)
    return _added(decode(prompt), decode([*prompt, *ids]))


class Shown(NamedTuple):
    """The text shown so far of a row that grows, up to its last complete character."""

    text: str
    begin: int  # ids from here on are decoded again: what follows depends on them
    end: int  # ids up to here are in `text`


def grown(
    target: Checkpoint, prompt: Sequence[int], ids: Sequence[int], shown: Shown | None
) -> tuple[str, Shown]:
    """Decode a row that may still grow; return its text, and `shown` for the next call.

    An incomplete character at the end is left out, so that each text begins with the one before.
    So is a space that a tokenizer that cleans up may remove. Bytes that are no UTF-8 may change
    characters that were shown before them.

    Only the ids since the last calls are decoded, unless the tokenizer cleans up.

    Args:
      shown: from the last call; None at the first.
    """
    prompt = _read_before(target, prompt)
    known = [*prompt, *ids]
    shown = shown or Shown("", 0, len(prompt))
    if _cleans_up(target.tokenizer):
        text = text_of(target, prompt, ids).rstrip(UNFINISHED)
        space = text.find(" ", max(0, len(text) - UNSETTLED))
        text = max(shown.text, text[:space] if space >= 0 else text, key=len)
        return text, Shown(text, *shown[1:])
    before = _decode(target, known[shown.begin : shown.end])
    added = _added(before, _decode(target, known[shown.begin :]))
    complete = added.rstrip(UNFINISHED)
    text = shown.text + complete
    if not added or complete != added:
        return text, shown
    # Ids before the last shown are no longer needed, unless they end within a character.
    begin = shown.begin if before.endswith(UNFINISHED) else shown.end
    return text, Shown(text, begin, len(known))


def _cleans_up(tokenizer: Any) -> bool:
    """Whether a tokenizer removes spaces before punctuation. transformers does not for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(getattr(backend, "model", None)).__name__ != "BPE" or getattr(
        tokenizer, forced, False
    )


def _read_before(target: Checkpoint, prompt: Sequence[int]) -> Sequence[int]:
    return () if target.config.is_encoder_decoder else prompt


def _decode(target: Checkpoint, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    if target.tokenizer is None or not ids:
        return ""
    return target.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _added(before: str, whole: str) -> str:
    """The text after `before`, except for its end, which the next ids may have changed."""
    if whole.startswith(before):
        return whole[len(before) :]
    pairs = zip(before, whole, strict=False)
    return whole[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
