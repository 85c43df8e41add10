"""A larger T5 that computes what a trained smaller one computes, and goes on learning from there.

A model of any family starts as one of its own shape.

A deep or wide T5 learns to copy much more slowly than a small one (experiments/train/README.md). So
the target of `parse` is trained small first. What is added then counts for nothing yet, as in
Net2Net (Chen et al. 2016): units and heads that nothing reads, and layers that add nothing to what
passes by them.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.models.t5 import T5, T5Config

# What may be larger; all else must be the same.
GROWING = ("d_ff", "num_heads", "num_layers", "num_decoder_layers")


def grow(small: Any, large: Any) -> None:
    """Make `large` compute what `small` computes, up to rounding, in place.

    Heads, feed-forward units and layers that only `large` has keep the parameters that they have,
    but for the projections that read them, which become 0. New layers come last.

    Args:
      small, large: with weights that lie (out, in), as in training; T5s, or of one shape.

    Raises:
      ValueError: `large` has less of something in `GROWING`, or differs in anything else.
    """
    _check(small.config, large.config)
    if vars(small.config) == vars(large.config):
        nnx.update(large, nnx.state(small))
        return
    known, grown = (_parameters(model) for model in (small, large))
    for path, param in grown.items():
        reads_what_is_new = path[-2:] == ("output", "weight")
        whole = jnp.zeros_like(param[...]) if reads_what_is_new else param[...]
        if path in known:
            part = _apart(known[path][...], path, small.config)
            corner = tuple(slice(size) for size in part.shape)
            whole = _apart(whole, path, large.config).at[corner].set(part).reshape(param.shape)
        param.set_value(whole)


def _check(small: Any, large: Any) -> None:
    if type(small) is not type(large):
        raise ValueError(f"A {small.model_type} model cannot become one of {large.model_type}.")
    for name, value in vars(small).items():
        now = getattr(large, name)
        if now < value if name in GROWING else now != value:
            bound = f"at least {value}" if name in GROWING else f"{value!r}"
            raise ValueError(
                f"{name}={now!r} in the settings of the new model must be {bound}, as in the "
                f"model that it starts from: a model grows in {', '.join(GROWING)} alone."
            )


def _parameters(model: T5) -> dict[tuple, nnx.Param]:
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}


def _apart(weight, path: tuple, config: T5Config):
    """A weight with an axis for the projections that are fused in it: (parts · out, in) → (parts,
    out, in). Heads and units are blocks of each part's rows."""
    gated = config.feed_forward_proj.startswith("gated-")
    fused = {"qkv": 3, "kv": 2, "input": 2 if gated else 1}
    parts = fused.get(path[-2], 1) if len(path) > 1 else 1
    return weight.reshape(parts, -1, *weight.shape[1:])
