"""Audits of acceptance rules, which return distributions and draw nothing."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.audit.findings import Finding, compared, words
from specjax.audit.kinds import Fault, Problem, along, called
from specjax.rules.base import AcceptanceRule


def tolerance() -> float:
    """The largest total variation that counts as exact, in the precision of jax."""
    return 1e-9 if jax.config.read("jax_enable_x64") else 1e-5


def findings(rule: Any, problems: list[Problem]) -> Iterator[Finding]:
    """Enumerate `stop` and `next_probs` over all drafts of all problems, in one call.

    Raises:
      ValueError: the rule shares noise between target and draft, raises an exception, or returns
        arrays of other shapes.
    """
    noise = getattr(type(rule), "given_noise", AcceptanceRule.given_noise)
    if noise is not AcceptanceRule.given_noise:
        raise ValueError(
            f"{rule!r} draws by noise that target and draft share: specjax.testing.check_rule "
            "compares its tokens with those of plain decoding."
        )
    size = max(problem.tables[0].size for problem in problems)
    gamma = max(problem.tables[0].gamma for problem in problems)
    rows = []
    for index, problem in enumerate(problems):
        (table,) = problem.tables
        for drafts in itertools.product(range(table.size), repeat=table.gamma):
            tokens, draft, target = along(table, drafts, np.float64)
            weight = np.prod([q[token] for q, token in zip(draft, tokens, strict=True)])
            if weight > 0:
                missing, ids = gamma - table.gamma, (0, size - table.size)
                rows.append((
                    index,
                    weight,
                    np.pad(target, ((0, missing), ids), constant_values=0.0),
                    np.pad(draft, ((0, missing), ids), constant_values=0.0),
                    np.pad(tokens, (0, missing)),
                    table.gamma,
                ))  # fmt: skip
    indices, weights, *arrays = (np.array(column) for column in zip(*rows, strict=True))
    try:
        stop, following = called(lambda: jax.device_get(_ask(rule, *_arrays(*arrays))))
    except Fault as error:
        raise ValueError(f"{rule!r} {error}.") from error
    shapes = np.shape(stop), *map(np.shape, following)
    expected = (len(rows), gamma + 1), *[(len(rows), size)] * (gamma + 1)
    if shapes != expected:
        raise ValueError(
            f"{rule!r}: stop and next_probs return shapes {shapes[0]} and {shapes[1]}, not "
            f"{expected[0]} and {expected[1]}."
        )
    laws = [np.zeros_like(problem.expected) for problem in problems]
    faults: dict[int, str] = {}
    for row, (index, weight) in enumerate(zip(indices, weights, strict=True)):
        problem, drafts = problems[index], tuple(arrays[2][row].tolist())
        for count in range(arrays[3][row] + 1):
            if stop[row, count] != 0:
                chance = weight * stop[row, count]
                probs = following[count][row].astype(np.float64)
                for token in range(problem.tables[0].size):
                    output = (*drafts[:count], token)
                    laws[index] += chance * probs[token] * problem.law((output,))
        if not np.isfinite(laws[index]).all():
            faults[index] = f"returns probabilities that are not finite ({words(problem)})"
    for index, problem in enumerate(problems):
        fault = faults.get(index, "")
        yield Finding(problem, fault=fault) if fault else compared(problem, laws[index])


def _arrays(target, draft, drafts, length):
    """Log-probabilities, tokens and lengths for a rule."""
    dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
    with np.errstate(divide="ignore"):
        logs = jnp.asarray(np.log(target), dtype), jnp.asarray(np.log(draft), dtype)
    return *logs, jnp.asarray(drafts, jnp.int32), jnp.asarray(length, jnp.int32)


def _ask(rule, target, draft, drafts, length):
    """`stop`, and `next_probs` for every count."""

    @jax.jit
    def ask(target, draft, drafts, length):
        counts = [jnp.full_like(length, count) for count in range(drafts.shape[1] + 1)]
        following = [rule.next_probs(target, draft, drafts, length, count) for count in counts]
        return rule.stop(target, draft, drafts, length), following

    return ask(target, draft, drafts, length)
