"""Drafters by name, for settings such as `draft`.

load("google-t5/t5-small", target), load("lookup(max_ngram=2)", target),
load("switch(drafts=('lookup', 'google-t5/t5-small'), choice='recent')", target),
load("my_module:my_drafter(sharpness=3.0)", target)
"""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax import checkpoints
from specjax.checkpoints.tensors import float_dtype
from specjax.drafters import attached, ngram
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.support import named
from specjax.support.ranges import has

NAMES = {
    "unigram": "specjax.drafters.ngram:unigram",
    "bigram": "specjax.drafters.ngram:bigram",
    "lookup": "specjax.drafters.ngram:PromptLookup",
    "early_exit": "specjax.drafters.views:early_exit",
    "frequent": "specjax.drafters.frequent:by_counts",
    "first_ids": "specjax.drafters.frequent:by_order",
    "int8": "specjax.drafters.loading:in_int8",
    "switch": "specjax.drafters.switch:switch",
}


def load(
    draft: str,
    target: Checkpoint,
    *,
    dtype: Any = None,
    counts: Callable[[], ngram.Counts] | None = None,
    replicate: bool = True,
) -> Checkpoint | Drafter:
    """Load the model or drafter of a name, onto its target's mesh.

    Args:
      draft: one of `NAMES`, or "module:attribute" of a function or class that makes a drafter,
        either with settings, "lookup(max_ngram=2)"; or the directory or hub name of a model, or the
        directory of a drafter that belongs to the target (`attached`). An import path is code, and
        runs. A directory with a drafter's name is "./lookup".
      target: the target whose ids are drafted. A drafter's function gets `target`, `vocab_size`,
        `counts`, `load` (which loads another drafter by name), `dtype` and `replicate`, if it has
        parameters of these names.
      dtype: of a model, see `specjax.load`; of an attached drafter, by default the target's.
      counts: returns counts of n-grams; default: ngram.npz beside the target's directory.
      replicate: on a mesh, whether each device has the whole of a drafting model, or a part as of
        the target. Other parameters of a drafter are always replicated.

    Raises:
      ValueError, FileNotFoundError: there is no such drafter or model, it does not take these
        settings or this dtype, n-grams have no counts, or it belongs to another target.
    """
    has("target", target, ("model", "config"), "a checkpoint, as specjax.load gives it")
    if dtype is not None:
        float_dtype(dtype)  # a drafter without parameters would take any
    make, placement = maker(draft), sharding.placement_of(target.model)
    if make is None:
        if attached.is_attached(draft):
            return sharding.join(attached.load(draft, target, dtype=dtype), placement)
        return _model(draft, target, dtype=dtype, replicate=replicate)
    offered: dict[str, Callable[[], Any]] = {
        "target": lambda: target,
        "vocab_size": lambda: target.model.vocab_size,
        "counts": counts or (lambda: beside(target)),
        "load": lambda: partial(
            load, target=target, dtype=dtype, counts=counts, replicate=replicate
        ),
        "dtype": lambda: dtype,
        "replicate": lambda: replicate,
    }
    takes = inspect.signature(make).parameters
    given = {name: value() for name, value in offered.items() if name in takes}
    made = named.make("drafter", NAMES, draft, **given)
    if not isinstance(made, Checkpoint):
        named.check("drafter", draft, made, Drafter)
    return made


def _model(draft: str, target: Checkpoint, *, replicate: bool, **options: Any) -> Checkpoint:
    """Load a model with the options of `checkpoints.load`, onto its target's mesh."""
    placement = sharding.placement_of(target.model)
    if placement is not None:
        options |= {"mesh": placement.mesh, "replicate": replicate}
    return checkpoints.load(draft, **options)


def in_int8(
    draft: str, target: Checkpoint, dtype: Any = None, replicate: bool = True, cache: bool = False
) -> Checkpoint:
    """Load a model with weights in int8: "int8" among `NAMES`, whatever the target's.

    Args:
      draft: the directory or hub name of a model.
      target: the target, whose mesh the model shares; see `load`.
      cache: whether the cache is in int8 too.

    Raises:
      ValueError, FileNotFoundError: see `specjax.load`; or the name is of a drafter, not a model.
    """
    if maker(draft) is not None or attached.is_attached(draft):
        raise ValueError(
            f"int8(draft={draft!r}): it is no model of its own. Give the directory or hub name of "
            "one; a drafter made of a model takes an int8 one inside, such as "
            "frequent(draft=\"int8(draft='…')\")."
        )
    narrow: dict[str, Any] = {"weights": "int8", "cache": "int8" if cache else None}
    loaded = _model(draft, target, dtype=dtype, replicate=replicate, **narrow)
    full_name = f"int8(draft={draft!r}{', cache=True' if cache else ''})"
    return dataclasses.replace(loaded, name=full_name)


def maker(draft: str) -> Callable[..., Drafter] | None:
    """The function that makes a drafter; None for a model, ValueError if there is none."""
    if not isinstance(draft, str):
        raise ValueError(f"draft={draft!r} must be a text: a name, a directory or a hub name.")
    name = named.name_in(draft)
    if name in NAMES or (":" in name and not pathlib.Path(draft).exists()):
        return named.find("drafter", NAMES, name)
    return None


def fingerprint(draft: str) -> dict[str, str]:
    """Size and hash of each file of the models that a draft is made of, as
    `checkpoints.fingerprint` gives them; empty for a drafter without a model.

    Raises:
      ValueError, FileNotFoundError: there is no such drafter or model.
    """
    if maker(draft) is None:
        return checkpoints.fingerprint(draft)
    given = named.settings("drafter", NAMES, draft)
    inner = given.get("draft", given.get("drafts", ()))
    found: dict[str, str] = {}
    for name in [inner] if isinstance(inner, str) else inner:
        found |= {f"{name}, {file}": mark for file, mark in fingerprint(name).items()}
    return found


def parameters(draft: Checkpoint | Drafter, target: Checkpoint | None = None) -> int:
    """Number of a draft's parameters, without the arrays that it shares with its target.

    For a drafter these are the numbers that it would store, without counts of n-grams.

    Args:
      target: None: a model that shares nothing.
    """
    if hasattr(draft, "drafters"):
        return sum(parameters(one, target) for one in draft.drafters)
    if isinstance(draft, Checkpoint | ModelDrafter) and not hasattr(draft, "tensors"):
        shared = {id(x) for x in jax.tree.leaves(target.model)} if target else set()
        own = [x for x in jax.tree.leaves(draft.model) if id(x) not in shared]
    else:
        own = list(draft.tensors().values()) if hasattr(draft, "tensors") else []
    return sum(x.size for x in own if x.dtype.kind != "i" or x.dtype == np.int8)


def counts_ngrams(draft: str) -> bool:
    """Whether a drafter, or one that it consists of, is made from counts of n-grams."""
    make = maker(draft)
    if make is None:
        return False
    inner = named.settings("drafter", NAMES, draft).get("drafts", ())
    takes = inspect.signature(make).parameters
    return "counts" in takes or any(isinstance(one, str) and counts_ngrams(one) for one in inner)


def beside(target: Checkpoint) -> ngram.Counts:
    """Load the counts beside the target's directory; ValueError if there are none."""
    path = pathlib.Path(target.name).parent / "ngram.npz"
    if not path.is_file():
        raise ValueError(
            f"An n-gram drafter for {target.name} needs counts, and there is no {path}. Write it "
            "by specjax.drafters.ngram.count and ngram.save (docs/drafters.md), or take lookup."
        )
    return ngram.load(path)


def name_of(draft: str | Checkpoint | Drafter) -> str:
    """The draft's name for tables and messages."""
    return draft if isinstance(draft, str) else getattr(draft, "name", type(draft).__name__)
