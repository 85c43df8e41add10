"""Parts of all checks: a method on tables, and a comparison of outputs with the target's."""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import loop, speculative
from specjax.audit.of_rules import tolerance
from specjax.contracts import WrongPart
from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.sampling import Sampling, row_keys
from specjax.testing.enumeration import (
    joint_distribution,
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

    def begin(self, state, live, gamma_max):
        return state, (state * 7) % 4

    def update(self, state, round_):
        new = (state * 3 + round_.accepted * 5 + round_.verified + 1) % 11
        return jnp.where(round_.active, new, state)


def method_of(
    target, drafter, rule, policy, sampling: Sampling, gamma_max: int = GAMMA, **options: Any
) -> speculative.Speculative:
    parts = target, drafter, rule, policy, sampling
    return speculative.Speculative(*parts, jnp.int32([EOS]), gamma_max, **options)


def keys_of(rows: int, seed: int = 0) -> Array:
    """Make a key for each row."""
    index = jnp.arange(rows, dtype=jnp.int32)
    return row_keys(jax.random.key(seed), 0 * index, index)


def check_returns(method: speculative.Speculative, inputs: Inputs) -> None:
    """Check shapes and dtypes of what own parts return, without running anything."""
    rows = len(inputs.prompt_len)
    budget = jnp.full((rows,), BUDGET, jnp.int32)
    room = inputs.prompt.shape[1] + BUDGET + method.slots
    try:
        begun = loop.start.eval_shape(method, inputs, keys_of(rows), budget, buffer_len=room)
        loop.decode.eval_shape(method, *begun)
    except WrongPart as error:
        raise AssertionError(error.fault) from None


def check_output(name: str, method: speculative.Speculative, inputs: Inputs | None = None) -> None:
    """Compare the enumerated distribution of outputs with the target's."""
    inputs = inputs_of([PROMPT]) if inputs is None else inputs
    expected = sequence_distribution(method.target, inputs, method.sampling, {EOS}, BUDGET)
    require_equal(name, output_distribution(method, inputs, BUDGET), expected)


def check_joint(
    name: str, method: speculative.Speculative, inputs: Inputs, limits: Sequence[int]
) -> None:
    """Check that outputs of several rows are independent, each with the target's distribution."""
    expected = joint_expected(method, inputs, limits)
    require_equal(name, joint_distribution(method, inputs, list(limits)), expected)


def joint_expected(
    method: speculative.Speculative, inputs: Inputs, limits: Sequence[int]
) -> dict[tuple, float]:
    """P(outputs of all rows) by the target alone.

    Args:
      limits: new tokens of each row at most.
    """
    each = [
        sequence_distribution(
            method.target,
            jax.tree.map(lambda x, row=row: x[row : row + 1], inputs),
            method.sampling,
            set(np.asarray(method.eos_ids).tolist()),
            limit,
        )
        for row, limit in enumerate(limits)
    ]
    return {
        outputs: float(np.prod([one[out] for one, out in zip(each, outputs, strict=True)]))
        for outputs in itertools.product(*each)
    }


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Numbers of tokens that a part chose in the rounds of a check."""

    name: str  # of the part, with its verb: "Patient drafts"
    shares: tuple[float, ...]  # of rounds, by the number of tokens, from 0

    @property
    def mean(self) -> float:
        """Tokens of a row and round on average."""
        return sum(count * share for count, share in enumerate(self.shares))

    def __repr__(self) -> str:
        each = ", ".join(f"{count} in {share:.0%}" for count, share in enumerate(self.shares))
        most = len(self.shares) - 1
        return f"{self.name} {self.mean:.1f} of {most} tokens on average: {each} of rounds"


def report(name: str, lengths: np.ndarray, gamma_max: int) -> Lengths:
    """Print and return the lengths of the rounds of rows that had not ended.

    Args:
      lengths: of each round, −1 after a row's end.
    """
    counts = np.bincount(lengths[lengths >= 0], minlength=gamma_max + 1)
    found = Lengths(name, tuple((counts / counts.sum()).tolist()))
    print(found)
    return found


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
