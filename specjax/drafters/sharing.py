"""Drafters that read the source as their target has encoded it.

The target's encoder runs once for both. Keys and values of decoder layers that are the target's own
exist once, in the target's context: `FromTarget` stands for them in the drafter's, and `joined`
puts them in. The encoder's output itself is not kept: only `started` reads it.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from specjax.models.language_model import LanguageModel
from specjax.pytrees import pytree
from specjax.types import Cache, Context, Encoding, Inputs, Params

if TYPE_CHECKING:
    from specjax.drafters.base import Drafter


@pytree
class FromTarget:
    """The place of a part of the target's context in a drafter's; it holds no array."""

    path: tuple[str | int, ...] = dataclasses.field(metadata={"static": True})


def joined(own: Context, target: Context) -> Context:
    """Put the parts of the target's context in their places in a drafter's."""

    def found(x: Any) -> Any:
        if not isinstance(x, FromTarget):
            return x
        part = target
        for key in x.path:
            part = part[key] if isinstance(key, int) else getattr(part, key)
        return part

    return jax.tree.map(found, own, is_leaf=lambda x: isinstance(x, FromTarget))


def shares(drafter: Any) -> bool:
    """Whether a drafter reads `Inputs.encoding`, the target's, if there is one.

    A class declares `shares = True`. The encoding's `bias` is a `FromTarget`.
    """
    return getattr(drafter, "shares", False)


def inputs_for(drafter: Any, inputs: Inputs) -> Inputs:
    """The inputs of a drafter: without the target's encoding unless it `shares` it."""
    return inputs if shares(drafter) else inputs._replace(encoding=None)


class Contexts(NamedTuple):
    """The read-only contexts of both models."""

    target: Context
    own: Context  # the drafter's, without what it shares with the target's

    @property
    def drafter(self) -> Context:
        """The drafter's context."""
        return joined(self.own, self.target)


def started(
    target: Any, drafter: "Drafter", inputs: Inputs, buffer_len: int
) -> tuple[Contexts, Cache, Any]:
    """Start a target and its drafter: contexts, the target's cache and the drafter's state.

    The encoder runs once if the drafter `shares` it.

    Args:
      target: a `Model`; one that is no `EncodingModel` shares nothing.
    """
    shared = shares(drafter) and hasattr(target, "encoding")
    encoding = target.encoding(inputs) if shared else None
    context, cache = target.start(inputs._replace(encoding=encoding), buffer_len)
    if encoding is not None:
        encoding = Encoding(encoding.output, FromTarget(("cross_bias",)), context=context)
    own, state = drafter.start(inputs._replace(encoding=encoding), buffer_len)
    return Contexts(context, own), cache, state


def for_layers(encoding: Encoding, layers: Sequence[int | None]) -> Encoding:
    """The target's encoding for a model whose layers read keys and values of these layers of the
    target; None: its own."""
    places = (None if i is None else FromTarget(("cross", i)) for i in layers)
    return encoding._replace(cross=tuple(places))


def shared_layers(draft: Any, target: Any) -> tuple[int | None, ...] | None:
    """For each decoder layer of a draft model, the layer of its target with the same arrays.

    None stands for a layer of its own. The result is None if the draft's encoder is not the
    target's, array by array: then it encodes the source itself.
    """
    inner = getattr(draft, "model", draft)  # that of a head over frequent ids
    if not (isinstance(inner, LanguageModel) and isinstance(target, LanguageModel)):
        return None
    module = target.module()
    if type(inner.module()) is not type(module) or not hasattr(module, "encoder_params"):
        return None
    (mine, own), (encoder, layers) = (module.encoder_params(x.params) for x in (inner, target))
    if not _same(mine, encoder):
        return None
    return tuple(next((i for i, kv in enumerate(layers) if _same(kv, one)), None) for one in own)


def _same(one: Params, other: Params) -> bool:
    """Whether two pytrees hold the same arrays, not only equal ones."""
    mine, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (one, other))
    return mine.keys() == theirs.keys() and all(theirs[path] is x for path, x in mine.items())
