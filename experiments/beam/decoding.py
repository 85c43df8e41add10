"""Beam search on texts: n-best lists with scores and counts. Everything jitted lies in `beam`."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from experiments.beam import search as beam
from experiments.beam.search import Hypothesis, Stats, n_best
from specjax.batching import bucket
from specjax.checkpoints.compatibility import check_pair
from specjax.decoding.building import A_CHECKPOINT, CHECKPOINT
from specjax.decoding.outputs import check_finite, text_of
from specjax.decoding.texts import check_budget, check_room, pack_for, tokenize
from specjax.defaults import BATCH_SIZE, GAMMA, NEW_TOKENS
from specjax.models.checkpoint import Checkpoint
from specjax.settings import MAX_GAMMA
from specjax.support import memory_maps
from specjax.support.ranges import has, number, whole
from specjax.types import Text

COUNTS = tuple(field.name for field in dataclasses.fields(Stats))


@dataclasses.dataclass(frozen=True)
class BeamRow:
    """The hypotheses of input `index`, best first, and what they took; see `beam.Stats`."""

    index: int
    hypotheses: list[Hypothesis]  # at most w; fewer if no more have a probability above 0
    target_calls: int
    steps: int
    verified: int
    kept: int
    evaluations: int
    kept_lengths: list[int]


def beam_search(
    target: Checkpoint,
    draft: Checkpoint | None,
    texts: Sequence[Text],
    *,
    width: int = 4,
    draft_width: int | None = None,
    gamma: int = GAMMA,
    max_new_tokens: int = NEW_TOKENS,
    length_penalty: float = 0.0,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    check_tokens: bool = True,
) -> list[BeamRow]:
    """The best hypotheses of each text, in order; the same with a draft and without.

    Args:
      target: whose beams they are.
      draft: a small checkpoint with the same vocabulary; None: plain beam search.
      texts: inputs. An empty one gives no hypotheses and a warning.
      width: w, hypotheses for each text.
      draft_width: u ≥ w, beams of the draft; default 2w.
      gamma: γ ≥ 1, drafted steps per target call.
      max_new_tokens: at most this many tokens per hypothesis, EOS included.
      length_penalty: ≥ 0; 0 compares hypotheses by log-probability, 1 by its mean over tokens.
      batch_size: inputs searched at once.
      max_source_len: longer inputs are truncated, with a warning; default: the target's own.
      check_tokens: False takes a draft whose tokens are not the target's: see `specjax.generate`.

    Raises:
      ValueError: a number out of range, or target and draft with different vocabularies.
      FloatingPointError: logits that are not finite; the message names the model.
    """
    for name, given in (("target", target), ("draft", target if draft is None else draft)):
        has(name, given, CHECKPOINT, A_CHECKPOINT)
    whole("batch_size", batch_size, "[1, ∞)")
    whole("gamma", gamma, f"[1, {MAX_GAMMA}]", "a row never drafts past its max_new_tokens")
    check_budget(max_new_tokens)
    whole("width", width, "[1, ∞)")
    if draft_width is not None:
        whole("draft_width", draft_width, "[1, ∞)")
    number("length_penalty", length_penalty, "[0, ∞)", "0 is off")
    eos_ids = jnp.asarray(target.eos_ids, jnp.int32)
    if draft is None:
        method = partial(beam.search, target.model, width=width)
    else:
        check_pair(target, draft, check_tokens=check_tokens)
        method = partial(
            beam.speculative,
            target.model,
            draft.model,
            width=width,
            draft_width=2 * width if draft_width is None else draft_width,
            gamma=gamma,
        )
    sources = tokenize(target, texts, max_source_len)
    check_room(target, sources, max_new_tokens)
    wanted = [index for index, ids in enumerate(sources) if ids]
    rows = {index: BeamRow(index, [], 0, 0, 0, 0, 0, []) for index in range(len(texts))}
    count = bucket(min(batch_size, max(len(wanted), 1)))
    for at in range(0, len(wanted), batch_size):
        chunk = wanted[at : at + batch_size]
        ids = [sources[index] for index in chunk]
        inputs = pack_for(target, ids, rows=count)
        room = inputs.prompt.shape[1] + max_new_tokens + (gamma if draft else 0) + 1
        memory_maps.make_room()
        state = method(
            inputs,
            jnp.where(jnp.arange(count) < len(ids), max_new_tokens, 0).astype(jnp.int32),
            eos_ids,
            length_penalty,
            buffer_len=bucket(room, smallest=32),
        )
        finite = state.replace(
            target_finite=jnp.all(state.target_finite), draft_finite=jnp.all(state.draft_finite)
        )
        check_finite(cast(Any, finite), (target.name, draft.name if draft else ""))
        stats = jax.device_get(state.stats)
        for index, hypotheses, *counts in zip(
            chunk, n_best(state), *(getattr(stats, name) for name in COUNTS), strict=False
        ):
            named = [
                dataclasses.replace(one, text=text_of(target, sources[index], one.tokens))
                for one in hypotheses
            ]
            rows[index] = BeamRow(index, named, *(number.tolist() for number in counts))
    return list(rows.values())
