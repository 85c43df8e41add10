"""Training a model to exit early, as LayerSkip does (Elhoushi et al. 2024, 2404.16710).

Each step adds the loss of some of the model's exits to its own, and leaves layers out at random,
later ones more often and all of them more often towards the end. An exit is the model without its
last layers: it shares the norm, the head and everything else, so it drafts without weights of its
own (`specjax.early_exit`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.views import chosen
from specjax.support.ranges import number

Loss = Callable[[nnx.GraphDef, nnx.State], tuple[Array, Array]]  # sum over tokens, their number


@dataclasses.dataclass(frozen=True)
class Exits:
    """What to train besides the whole model. The default is nothing.

    With L the model's own loss and Lₑ those at the exits, a step's loss is
    (L + weight · mean Lₑ) / (1 + weight).

    Raises:
      ValueError: a weight < 0 or a dropout outside [0, 1).
    """

    layers: tuple[int, ...] = ()  # how many layers run at each exit
    weight: float = 1.0
    dropout: float = 0.0  # with which chance the last layer is left out of the last step

    def __post_init__(self):
        number("exit_weight", self.weight, "[0, ∞)")
        number("layer_dropout", self.dropout, "[0, 1)", "0 leaves no layer out")

    def check(self, count: int) -> None:
        """ValueError unless a model of `count` layers has these exits."""
        for layers in self.layers:
            chosen(layers, count)

    def __call__(
        self, loss: Loss, graphdef: nnx.GraphDef, params: nnx.State, progress: Array
    ) -> tuple[Array, Array]:
        """The step's loss, as `loss` gives it.

        Args:
          progress: () float32, the share of all steps that is done. The layers that are left out
            follow from it alone: a run that goes on leaves out the same.
        """
        if self.dropout:
            params = without(params, left_out(params, self.dropout, progress))
        total, count = loss(graphdef, params)
        if not self.layers:
            return total, count
        # XLA computes what the exits and the model share once; only gradients go back twice.
        others = [loss(*exit_of(graphdef, params, layers))[0] for layers in self.layers]
        mean = sum(others) / len(others)
        return (total + self.weight * mean) / (1 + self.weight), count


def exit_of(
    graphdef: nnx.GraphDef, params: nnx.State, layers: int
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's first layers, with its other parameters."""
    module = nnx.merge(graphdef, params)
    module.keep(range(layers))
    return nnx.split(module)


def left_out(params: nnx.State, dropout: float, progress: Array) -> Float[Array, " L"]:
    """1 for each layer that is left out of this step, else 0.

    Layer l of L is left out with probability dropout · (2^(l/(L−1)) − 1) · (2^progress − 1).
    """
    count = len({path[1] for path, _ in nnx.to_flat_state(params) if _is_output(path)})
    depth = jnp.exp2(jnp.arange(count) / max(count - 1, 1)) - 1
    chances = dropout * depth * (jnp.exp2(progress) - 1)
    bits = jax.lax.bitcast_convert_type(progress, jnp.int32)
    key = jax.random.fold_in(jax.random.key(0), bits)
    return (jax.random.uniform(key, (count,)) < chances).astype(jnp.float32)


def without(params: nnx.State, left_out: Float[Array, " L"]) -> nnx.State:
    """Parameters with which these layers add nothing: 0 in what their sublayers end with."""
    kept = 1 - left_out
    return nnx.from_flat_state(
        (path, x.replace(x[...] * kept[path[1]].astype(x.dtype)) if _is_output(path) else x)
        for path, x in nnx.to_flat_state(params)
    )


def _is_output(path: tuple) -> bool:
    """Whether a decoder's sublayer ends here: ("decoder", 3, "attention", "output", "weight")."""
    return path[0] in ("decoder", "layers") and path[-2] == "output"
