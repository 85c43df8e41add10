"""Measure drafts side by side on one's own inputs, and choose one, or none.

chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
print(chosen.words)
specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)
"""

from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax.checkpoints import Checkpoint
from specjax.defaults import BATCH_SIZE, GAMMAS, MINUTES, NEW_TOKENS, REPEATS, TIMED_INPUTS
from specjax.drafters.base import Drafter
from specjax.measure import timing
from specjax.sampling import Sampling
from specjax.tuning.candidates import Trial
from specjax.tuning.members import smaller_members
from specjax.tuning.recommendation import (
    Selection,
    recommend,
)
from specjax.types import Text


def select(
    target: Checkpoint,
    drafts: Sequence[str | Checkpoint | Drafter],
    texts: Sequence[Text],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    max_source_len: int | None = None,
    batch_size: int = BATCH_SIZE,
    gammas: Sequence[int] = GAMMAS,
    nodes: Sequence[int] = (),
    timed_inputs: int = TIMED_INPUTS,
    repeats: int = REPEATS,
    minutes: float = MINUTES,
    dtype: Any = None,
    check_tokens: bool = True,
    say: timing.Say = timing.silent,
) -> Selection:
    """Measure each candidate on these inputs, and choose one, or plain decoding.

        chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
        print(chosen.words)
        specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)

    Args:
      target: the model whose outputs are to come sooner.
      drafts: what `generate` takes as its draft, names included ("unigram" and "bigram" are counted
        here). Named models are loaded one at a time and freed. None given: the members of the
        target's family that are smaller, see `smaller_members`. Plain decoding is compared with
        all of them.
      texts: inputs of the kind that will be decoded, texts or lists of token ids; some 50 are
        enough.
      sampling, max_new_tokens, key, max_source_len, batch_size, check_tokens: as in `generate`,
        with the values of later use. Timings are at batch 1 all the same.
      gammas: draft lengths to choose from.
      nodes: sizes of trees to try too, such as (8, 16, 32).
      timed_inputs: how many of the texts are timed.
      repeats: repeats of each timing.
      minutes: time for all of it; 0: no limit. Where it is short, fewer inputs, tokens and repeats
        are timed, and a draft that cannot win is not timed at all. Compiling may take longer.
      dtype: dtype of named drafts, as `specjax.load` takes it.
      say: is called with a forecast and with each next step, such as "timing … turn 2 of 5".

    Raises:
      ValueError: `drafts` is no list, none is known for this target, a number out of range, too
        few texts, or no key where tokens are drawn.
    """
    if isinstance(drafts, str) or not isinstance(drafts, Sequence):
        raise ValueError(f"drafts={drafts!r} should be a list, such as [{drafts!r}].")
    drafts = list(drafts) or smaller_members(target.name)
    trial = Trial(
        target,
        texts,
        drafts,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        key=key,
        max_source_len=max_source_len,
        batch_size=batch_size,
        gammas=gammas,
        nodes=nodes,
        timed_inputs=timed_inputs,
        repeats=repeats,
        minutes=minutes,
        dtype=dtype,
        check_tokens=check_tokens,
        say=say,
    )
    tried = [(draft, tree) for draft in drafts for tree in trial.shapes]
    candidates = [trial.measure(draft, tree) for draft, tree in tried]
    return trial.ready(recommend(candidates, [draft for draft, _ in tried]))
