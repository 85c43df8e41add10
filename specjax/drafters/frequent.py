"""A head over frequent ids: a model drafts from a part of its vocabulary (FR-Spec, Zhao et al.
2025, 2502.14856).

Most text uses few of the ids, and the head is a large part of what a step of a small model reads.
Other ids have probability 0 in the draft. The target still emits them, through the residual, so
the output's distribution does not change.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.drafters import loading, ngram
from specjax.models.checkpoint import Checkpoint, decoder_of
from specjax.models.language_model import LanguageModel
from specjax.models.sharding import Placement
from specjax.pytrees import pytree
from specjax.support.ranges import listed, number, whole
from specjax.types import Cache, Context, Inputs


@pytree
class FrequentHead:
    """A model whose head has the rows of some ids; the logit of all others is −inf."""

    model: LanguageModel
    rows: Array  # (N, E) of its head, or (E, N) where projections are turned; see `layers.arrange`
    row_of: Int[Array, " V"]  # the row of each id; N where it has none
    vocab_size: int = dataclasses.field(metadata={"static": True})
    scale: Float[Array, " N"] | None = None  # of the rows, if the head is in int8

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """Encode the source and make a cache; see `LanguageModel.start`."""
        return self.model.start(inputs, buffer_len)

    def __call__(
        self, tokens: Int[Array, "B K"], start: Int[Array, " B"], context: Context, cache: Cache
    ) -> tuple[Float[Array, "B K E"], Cache]:
        """Run K tokens per row; see `Model.__call__`."""
        return self.model(tokens, start, context, cache)

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """Logits of the next token; see `Model.logits`. Ids without a row read an entry past the
        last, because a scatter of the N logits is slower on a CPU.
        """
        module = self.model.module()
        module.turned_weight().set_value(self.rows)
        if (scale := module.turned_scale()) is not None:
            scale.set_value(self.scale)
        few = module.logits(hidden)
        room = [(0, 0)] * (few.ndim - 1) + [(0, 1)]
        padded = jnp.pad(few, room, constant_values=-jnp.inf)
        return padded.at[..., self.row_of[: self.vocab_size]].get(mode="promise_in_bounds")


def frequent(draft: Checkpoint, ids: Sequence[int] | np.ndarray) -> Checkpoint:
    """Make a draft with a head over some ids. The other arrays are shared with the given draft.

    The rows are gathered once, here. They always include the ids that end a row.

    Args:
      draft: a T5, a GPT-2 or a model of the Llama layout, whole or an `early_exit`.
      ids: in any order; `most_frequent` picks them by counts.

    Raises:
      ValueError: no ids, an id that is not the draft's, or a model of no such family.
    """
    module, model = decoder_of(draft, "frequent"), draft.model
    size = model.vocab_size
    given = {whole("ids", one, f"[0, {size - 1}]", "the ids of the draft") for one in _list(ids)}
    chosen = np.array(sorted(given | {one for one in draft.eos_ids if one < size}), np.int32)
    row_of = np.full(size, len(chosen), np.int32)
    row_of[chosen] = np.arange(len(chosen))
    head, axis = module.turned_weight().get_value(), int(module.input_first)
    scale, placement = module.turned_scale(), model.placement
    rows = _of_ids(head, chosen, axis, placement)
    scales = None if scale is None else _of_ids(scale.get_value(), chosen, 0, placement)
    return dataclasses.replace(
        draft,
        name=f"frequent({draft.name}, {len(chosen)} ids)",
        model=FrequentHead(model, rows, jnp.asarray(row_of), size, scales),  # type: ignore[arg-type]
    )


def _of_ids(array: Any, ids: np.ndarray, axis: int, placement: Placement | None) -> Any:
    """The rows, or columns, of some ids; on a mesh every device has them."""
    if isinstance(array, jax.Array):
        rows = jnp.take(array, ids, axis=axis)
        return rows if placement is None else jax.device_put(rows, placement.sharding())
    shape = [*array.shape]  # an outline has shapes
    shape[axis] = len(ids)
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _list(ids: Any) -> list[Any]:
    return listed("ids", ids.tolist() if isinstance(ids, np.ndarray) else ids)


def most_frequent(counts: ngram.Counts, share: float) -> list[int]:
    """The most frequent ids, a share of all ids and at least one; of equals the smallest."""
    share = number("share", share, "(0, 1]", "1 keeps all ids")
    order = np.argsort(-counts.unigram, kind="stable")
    return order[: max(1, round(share * len(order)))].tolist()


def by_counts(
    draft: str, target: Checkpoint, counts: ngram.Counts, share: float = 0.25
) -> Checkpoint:
    """Make a `frequent` draft of a named model and the most frequent ids: "frequent" among
    `drafters.NAMES`. The ids that end the target's rows are included.

    Raises:
      ValueError, FileNotFoundError: see `frequent`; share outside (0, 1], or no such model.
    """
    loaded = loading.load(draft, target, counts=lambda: counts)
    made = _for_target(loaded, target, most_frequent(counts, share))
    return dataclasses.replace(made, name=f"frequent(draft={draft!r}, share={share:g})")


def by_order(
    draft: str, target: Checkpoint, load: Callable[[str], Any], share: float = 0.25
) -> Checkpoint:
    """Make a `frequent` draft of a named model and a share of its ids, the smallest: "first_ids"
    among `drafters.NAMES`. It needs no counts: tokenizers number frequent pieces first.

    Raises:
      ValueError, FileNotFoundError: see `by_counts`.
    """
    share, loaded = number("share", share, "(0, 1]", "1 keeps all ids"), load(draft)
    size = loaded.model.vocab_size if isinstance(loaded, Checkpoint) else 0
    made = _for_target(loaded, target, range(max(1, round(share * size))))
    return dataclasses.replace(made, name=f"first_ids(draft={draft!r}, share={share:g})")


def _for_target(loaded: Any, target: Checkpoint, ids: Iterable[int]) -> Checkpoint:
    """Make a `frequent` draft over those of the ids that the model has, and the target's ends."""
    size = loaded.model.vocab_size if isinstance(loaded, Checkpoint) else 0
    few = [one for one in {*ids, *target.eos_ids} if one < size]
    return frequent(loaded, few or [0])
