"""The conditions that settings are tuned for, and are used under."""

from typing import Any

import jax
import numpy as np

from specjax import drafters
from specjax.devices import device_of
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import dtype_of
from specjax.sampling import Sampling
from specjax.support.named import short


def conditions(
    method: Method,
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    batch_size: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Describe what times and α depend on, in plain values that JSON can hold.

    A model is its name without directories, and the number of its parameters, so it may be moved.

    Args:
      method: the loop of the pair; without a drafter the draft is left out.
      batch_size: rows that are decoded at once.
    """
    found = {
        "target": _model(target.name, target.model),
        "dtype": dtype_of(target.model).name,
        "device": device_of(target.model).device_kind,
        "sampling": _sampling(method.sampling),
        "batch_size": int(batch_size),
        "max_new_tokens": int(max_new_tokens),
    }
    drafter = getattr(method.drafter, "inner", method.drafter)
    if isinstance(drafter, ModelDrafter) and draft is not None:
        found["draft"] = _model(drafters.name_of(draft), drafter)
    elif drafter is not None:
        found["draft"] = type(drafter).__name__
    return found


def _model(name: str, parameters: Any) -> str:
    count = sum(np.size(leaf) for leaf in jax.tree.leaves(parameters))
    return f"{short(name)} with {count:,} numbers"


def _sampling(sampling: Sampling) -> str:
    if sampling.greedy:
        return "temperature=0"
    numbers = {
        f"{type(one).__name__}({', '.join(f'{np.asarray(x):.6g}' for x in jax.tree.leaves(one))})"
        for one in sampling.filters
    }
    return ", ".join([f"temperature={float(sampling.temperature):.6g}", *sorted(numbers)])
