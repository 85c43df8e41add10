"""Early exit: some layers of the target draft for it, through its own final norm and head.

The draft's arrays are the target's. The first layers alone (LayerSkip, Elhoushi et al. 2024,
2404.16710) work best in a model that was trained with a loss at its exits (`training.exits`). For
other models the layers to skip can be searched (Draft & Verify, Zhang et al. 2023, 2309.08168).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from specjax.drafters import loading
from specjax.models.checkpoint import Checkpoint
from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel
from specjax.support.ranges import listed, whole
from specjax.types import Params


def early_exit(target: Checkpoint, layers: int | Sequence[int]) -> Checkpoint:
    """Make a draft of some of the target's layers, its final norm and its head.

    The draft shares the target's arrays: no weight is copied, and jitted functions get the same
    buffers twice. Its cache is its own. In a T5 these are layers of the decoder. Beside its target
    the draft reads the target's encoding, and its layers' keys and values of the source.

    Args:
      target: a T5, a GPT-2 or a model of the Llama layout.
      layers: how many, from the first; or which, in ascending order from 0.

    Raises:
      ValueError: missing layers, none or all of them, or a model of another family.
    """
    module = decoder_of(target, "early_exit")
    module.keep(chosen(layers, module.cache_shape()[0]))
    graphdef, params = nnx.split(module)
    return dataclasses.replace(
        target,
        name=f"early_exit(layers={layers})",
        model=dataclasses.replace(target.model, graphdef=graphdef, params=nnx.to_pure_dict(params)),
        config=module.config,
    )


def decoder_of(checkpoint: Any, purpose: str) -> Decoder:
    """The checkpoint's module; ValueError with the purpose if its family is unknown."""
    model = getattr(checkpoint, "model", None)
    module = model.module() if isinstance(model, LanguageModel) else None
    if not isinstance(module, Decoder):
        raise ValueError(
            f"{loading.name_of(checkpoint)} has no layers and head that {purpose} knows: it must "
            "be a T5, a GPT-2 or a model of the Llama layout, as specjax.load gives it. Take "
            "another draft, or this one as it is."
        )
    return module


def chosen(layers: int | Sequence[int], count: int) -> list[int]:
    """The layers that run, of `count`; ValueError as in `early_exit`."""
    if count < 2:
        raise ValueError(f"layers={layers!r}: a model of {count} layer has none to leave out.")
    if np.ndim(layers) == 0:
        return list(range(whole("layers", layers, f"[1, {count - 1}]", _some(count))))
    kept = [whole("layers", i, f"[0, {count - 1}]", _some(count)) for i in listed("layers", layers)]
    if kept != sorted(set(kept)) or len(kept) == count:
        raise ValueError(
            f"layers={layers!r} must name some of the layers 0 … {count - 1}, each once and in "
            "ascending order."
        )
    return kept


def places(params: Params) -> tuple[str, str]:
    """The names of the decoder's layers and of the norm after them, in a family's parameters."""
    return ("decoder", "decoder_norm") if "decoder" in params else ("layers", "norm")


def _some(count: int) -> str:
    return f"the model has {count} layers, and the draft leaves some of them out"
