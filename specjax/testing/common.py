"""Parts of all three checks: a method on tables, and a comparison of outputs with the target's."""

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
ROWS = 64  # rows of a batch that decodes with the real dice
GAMMA = 2


# Compilation takes nearly all of a check's time.
quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytree
class Varying(Policy):
    """Allows 0 to 3 tokens, by a number modulo 11 that depends on all past rounds."""

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
    """Make a key for each row."""
    index = jnp.arange(rows, dtype=jnp.int32)
    return row_keys(jax.random.key(seed), 0 * index, index)


def layout(state: Any) -> list[str]:
    """The paths of a state's arrays, with dtype and shape."""
    return [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}".strip()
        for path, leaf in jax.tree.leaves_with_path(state)
    ]


def check_output(name: str, method: speculative.Speculative, inputs: Inputs | None = None) -> None:
    """Compare the enumerated distribution of outputs with the target's."""
    inputs = inputs_of([PROMPT]) if inputs is None else inputs
    expected = sequence_distribution(method.target, inputs, method.sampling, {EOS}, BUDGET)
    require_equal(name, output_distribution(method, inputs, BUDGET), expected)


def require_equal(name: str, found: dict[tuple, float], expected: dict[tuple, float]) -> None:
    """Raise AssertionError with the worst output if two distributions of outputs differ."""
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
