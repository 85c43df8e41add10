"""What the three checks share: a method on tables, and outputs held against the target's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import speculative
from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.sampling import Sampling, row_keys
from specjax.testing.enumeration import (
    output_distribution,
    sequence_distribution,
    total_variation,
)
from specjax.testing.tables import inputs_of
from specjax.types import Inputs

EOS, PROMPT = 2, [1, 0]
BUDGET = 4  # new tokens of an enumerated output
ROWS = 64  # of a batch that decodes with the real dice
GAMMA = 2


# Nearly all of the time of a check goes into compiling.
quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytree
class Varying(Policy):
    """Caps from 0 to 3 that depend on all past rounds through a number modulo 11."""

    def init(self, keys, gamma_max):
        return jnp.full(keys.shape, gamma_max, jnp.int32)

    def begin(self, state, gamma_max):
        return state, (state * 7) % 4

    def update(self, state, round_):
        new = (state * 3 + round_.accepted * 5 + round_.drafted + 1) % 11
        return jnp.where(round_.active, new, state)


def tolerance() -> float:
    """The largest error of a probability that a check allows."""
    return 1e-9 if jax.config.read("jax_enable_x64") else 1e-5


def method_of(
    target, drafter, rule, policy, sampling: Sampling, gamma_max: int = GAMMA
) -> speculative.Speculative:
    return speculative.Speculative(
        target, drafter, rule, policy, sampling, jnp.int32([EOS]), gamma_max
    )


def keys_of(rows: int, seed: int = 0) -> Array:
    """A key for each of so many rows."""
    index = jnp.arange(rows, dtype=jnp.int32)
    return row_keys(jax.random.key(seed), 0 * index, index)


def layout(state: Any) -> list[str]:
    """Where the arrays of a state lie in it, with dtype and shape."""
    return [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}".strip()
        for path, leaf in jax.tree.leaves_with_path(state)
    ]


def check_output(name: str, method: speculative.Speculative, inputs: Inputs | None = None) -> None:
    """Hold the enumerated distribution of outputs against the target's."""
    inputs = inputs_of([PROMPT]) if inputs is None else inputs
    expected = sequence_distribution(method.target, inputs, method.sampling, {EOS}, BUDGET)
    require_equal(name, output_distribution(method, inputs, BUDGET), expected)


def require_equal(name: str, found: dict[tuple, float], expected: dict[tuple, float]) -> None:
    """AssertionError where two distributions of outputs differ; names the worst output."""
    apart = total_variation(found, expected)
    if not apart <= tolerance():
        worst = max(found.keys() | expected.keys(), key=lambda x: abs(_off(x, found, expected)))
        raise AssertionError(
            f"{name}: P({_text(worst)}) is {found.get(worst, 0.0):.4g}, the target's is "
            f"{expected.get(worst, 0.0):.4g}; over all outputs the total variation is {apart:.3g}."
        )


def _off(output, found, expected) -> float:
    off = found.get(output, 0.0) - expected.get(output, 0.0)
    return np.inf if np.isnan(off) else off


def _text(output: Any) -> str:
    return "'" + " ".join(str(x) for x in output) + "'"
