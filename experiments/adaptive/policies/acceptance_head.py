"""A learned head on the drafter's hidden states that predicts acceptance, as in SpecDec++."""

import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Key

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.support import files, npz
from specjax.support.ranges import number


class HeadParams(NamedTuple):
    """Parameters of residual blocks h + silu(W h + b), then one logit."""

    weights: Float[Array, "L E E"]
    biases: Float[Array, "L E"]
    out: Float[Array, " E"]
    bias: Float[Array, ""]


def init(key: Key[Array, ""], width: int, layers: int = 3) -> HeadParams:
    """Make fresh float32 parameters for hidden states of `width` E; consumes the key."""
    weights = jax.random.normal(key, (layers, width, width), jnp.float32) / jnp.sqrt(width)
    return HeadParams(
        weights, *(jnp.zeros(shape, jnp.float32) for shape in ((layers, width), (width,), ()))
    )


def logit(params: HeadParams, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch"]:
    """Log-odds that the drafter's last token is accepted; float32."""
    state = hidden.astype(jnp.float32)
    for weight, bias in zip(params.weights, params.biases, strict=True):
        inner = jnp.einsum("...e,fe->...f", state, weight) + jnp.broadcast_to(bias, state.shape)
        state = state + jax.nn.silu(inner)
    return jnp.einsum("...e,e->...", state, params.out) + params.bias


def loss(
    params: HeadParams,
    hidden: Float[Array, "*batch E"],
    ratio: Float[Array, "*batch"],
    valid: Float[Array, "*batch"],
    reject_weight: float = 6.0,
) -> Float[Array, ""]:
    """Mean weighted cross-entropy: −ratio·log â − reject_weight·(1 − ratio)·log(1 − â).

    Args:
      hidden: the drafter's states after each token x.
      ratio: min(1, target(x)/draft(x)), the chance that x is accepted.
      valid: the weight of each token, 0 to leave it out.
    """
    odds = logit(params, hidden)
    each = -ratio * jax.nn.log_sigmoid(odds)
    each -= reject_weight * (1 - ratio) * jax.nn.log_sigmoid(-odds)
    return jnp.sum(each * valid) / jnp.maximum(jnp.sum(valid), 1)


def save(path: str | os.PathLike, params: HeadParams) -> None:
    """Write parameters to one npz file, in half precision."""
    arrays = {name: np.asarray(x, np.float16) for name, x in params._asdict().items()}
    with files.replacing(pathlib.Path(path)) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load(path: str | os.PathLike) -> HeadParams:
    """Load the parameters that `save` wrote, in float32.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file holds no head.
    """
    ranks = {"weights": 3, "biases": 2, "out": 1, "bias": 0}
    found = npz.read_npz(path, ranks, "the parameters of a head", "Make it by experiments.train.")
    layers, width = found["biases"].shape
    if found["weights"].shape != (layers, width, width) or found["out"].shape != (width,):
        raise ValueError(f"{path}: its arrays do not fit together. Make it by experiments.train.")
    return HeadParams(**{name: jnp.asarray(x, jnp.float32) for name, x in found.items()})


@pytree
class Head(Policy):
    """Drafts while P(one of the drafted tokens is rejected) = 1 − Πâ is at most `threshold`.

    â of a token is read from the hidden state after it. The state is log Πâ.
    """

    params: HeadParams
    threshold: Float[Array, ""]

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.float32)

    def keep_drafting(self, state, seen):
        # Before the first token there is none to judge.
        accepted = jax.nn.log_sigmoid(logit(self.params, seen.hidden))
        state = state + jnp.where((seen.slot > 0) & seen.drafting, accepted, 0.0)
        return state, seen.drafting & (-jnp.expm1(state) <= self.threshold)

    def update(self, state, round_):
        return jnp.zeros_like(state)


def head(params: HeadParams, threshold: float = 0.7) -> Head:
    """Make a SpecDec++ policy with a head from `training.train_head` or `load`."""
    if not isinstance(params, HeadParams):
        raise ValueError(f"params={params!r} must be a head, as acceptance_head.load reads it.")
    threshold = number("threshold", threshold, "[0, 1]", "it is a probability")
    return Head(params, jnp.float32(threshold))
