"""What rows hold, read from the device: tokens, texts and counts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from specjax.models import sharding
from specjax.models.hub import Checkpoint
from specjax.policies.logged import Log, lines_of
from specjax.results import Progress, Row
from specjax.state import State, Stats


def check_finite(state: State, names: tuple[str, str]) -> None:
    """Raise FloatingPointError if a model's logits were not finite."""
    for finite, role, name in zip(
        (state.target_finite, state.draft_finite), ("target", "draft"), names, strict=True
    ):
        if not bool(finite):
            raise FloatingPointError(
                f"The {role} model ({name}) gave logits that are not finite. Check its weights, or "
                "use a wider dtype: T5's activations overflow float16."
            )


class Outputs(NamedTuple):
    """Some rows of a state, on the host."""

    labels: Mapping[int, tuple[int, int]]  # by row: (input index, sample)
    tokens: Int[np.ndarray, "B T"]
    length: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    stats: Stats
    log: Any = None  # what `lines_of` takes

    def emitted(self, row: int) -> list[int]:
        """What follows the prompt."""
        end = self.length[row]
        return self.tokens[row, end - self.stats.emitted[row] : end].tolist()


def read(state: State) -> Outputs:
    """What rows hold, without labels. One transfer; caches and keys need not come back."""
    log = state.policy if isinstance(state.policy, Log) else None
    host = state.tokens, state.length, state.done, state.stats, log and (log.written, log.lines)
    return Outputs({}, *sharding.fetch(host))


def rows_of(outputs: Outputs, target: Checkpoint) -> list[Row]:
    """A row for each label."""
    rows = []
    log = outputs.log
    for b, (index, sample) in outputs.labels.items():
        ids, stats = outputs.emitted(b), outputs.stats
        rows.append(
            Row(
                index=index,
                sample=sample,
                text=_text(target, ids),
                tokens=ids,
                target_calls=int(stats.target_calls[b]),
                drafted=int(stats.drafted[b]),
                levels=int(stats.levels[b]),
                accepted=int(stats.accepted[b]),
                accepted_lengths=stats.accepted_lengths[b].tolist(),
                tested=stats.tested[b].tolist(),
                rounds=tuple(lines_of(log[0], log[1], b)) if log else (),
            )
        )
    return rows


def progress_of(outputs: Outputs, target: Checkpoint) -> list[Progress]:
    """How far each label's row is."""
    found = ((label, outputs.emitted(b)) for b, label in outputs.labels.items())
    return [Progress(*label, _text(target, ids), ids) for label, ids in found]


def read_rows(state: State, labels: Sequence[tuple[int, int]], target: Checkpoint) -> list[Row]:
    """The first rows of a batch, one for each label."""
    return rows_of(read(state)._replace(labels=dict(enumerate(labels))), target)


def _text(target: Checkpoint, ids: Sequence[int]) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True) if target.tokenizer else ""
