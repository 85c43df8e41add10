"""Kinds of functions that can be audited: how each is called, and on which tables.

A kind draws drafts, calls the function and reads its result: one run, on one problem. The same run
serves the enumeration and draws of numpy's `Generator`.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.audit import tables
from specjax.audit.randomness import WAY_OUT, Refused
from specjax.audit.tables import Prefix, Table

Function = Callable[..., Any]
Rows = tuple[Prefix, ...]
TEMPERATURES = 0.0, 0.5, 1.0
MASKED = -np.inf
TREES: dict[str, tuple[int, ...]] = {
    "two children": (-1, -1),
    "three children": (-1, -1, -1),
    "a child with a child": (-1, -1, 0),
    "two chains of two": (-1, -1, 0, 1),
    "two children twice": (-1, -1, 0, 0),
}


class Fault(Exception):
    """A result that is no output: an exception, no token, an id outside the vocabulary."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a function is called with.

    Attributes:
      kind: the line of the report that it counts for.
      tables: one for each row.
      more: further arguments, such as a temperature or a tree's parents.
    """

    kind: str
    tables: tuple[Table, ...]
    more: tuple[Any, ...] = ()

    @property
    def expected(self) -> np.ndarray:
        """The target's distribution of the first γ + 1 tokens of all rows."""
        return self.law(((),) * len(self.tables))

    def law(self, rows: Rows) -> np.ndarray:
        """The distribution of γ + 1 tokens of each row that begin with some."""
        laws = [table.completed(row) for table, row in zip(self.tables, rows, strict=True)]
        return functools.reduce(np.multiply.outer, laws)

    @property
    def size(self) -> tuple[Any, ...]:
        """γ, V, the number of rows, and a tree's parents."""
        table = self.tables[0]
        return table.gamma, table.size, len(self.tables), *self.more[: len(self.more) == 1]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How functions of a kind are called.

    Attributes:
      signature: names of the arguments, the random numbers last.
      returns: what the function has to return, in words.
      problems: makes the problems from a seed.
      run: calls the function once: (function, problem, rng, dtype, branch) → tokens of each row.
        `branch` draws the index of a probability, for drafts.
    """

    signature: str
    returns: str
    problems: Callable[[int], list[Problem]]
    run: Callable[..., Rows]

    def check_signature(self, function: Any) -> None:
        """Raise ValueError unless the function takes these arguments."""
        words = self.signature.split(", ")
        if not callable(function):
            raise ValueError(f"{reprlib.repr(function)} is no function.")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*words)
        except TypeError as error:
            raise ValueError(
                f"It takes {signature}, and is called with ({self.signature}): {error}. Another "
                f"kind may fit: {', '.join(KINDS)}."
            ) from None


# --- Results --------------------------------------------------------------------------------------


def called(function: Function, *arguments: Any) -> Any:
    """Call the function; an exception becomes a fault."""
    try:
        with np.errstate(all="ignore"):
            return function(*arguments)
    except (Refused, Fault):
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        if any(name in first for name in ("Uniform", "Gumbel", "Exponential")):
            raise Refused(f"It uses a random number as a plain one ({first}). {WAY_OUT}") from error
        words = f"raises {type(error).__name__}" + f": {first}" * bool(first)
        if re.search(r"\bkeys?\b", first):
            words += "; a function that takes a key of jax needs rng='key'"
        raise Fault(words) from error


def emitted(result: Any, size: int, most: int) -> Prefix:
    """Read the tokens that a function returned.

    Raises:
      Fault: they are no 1 to `most` ids of a vocabulary.
    """
    try:
        values = np.asarray(result).ravel().tolist()
        numbers = [float(value + 0) for value in values]  # a text is no number
    except Refused:
        raise
    except Exception:
        raise Fault(f"returns {reprlib.repr(result)}, which are no ids") from None
    for number in numbers:
        if not number.is_integer():
            raise Fault(f"emits {number}, which is no id")
        if not 0 <= number < size:
            raise Fault(f"emits id {number:.0f}, outside the vocabulary of {size} ids")
    if not 1 <= len(numbers) <= most:
        count = f"{len(numbers)} tokens" if numbers else "no token"
        raise Fault(f"emits {count}; a round has 1 to {most}")
    return tuple(int(number) for number in numbers)


def _of_rows(result: Any, problem: Problem) -> list[Any]:
    rows = called(list, result) if hasattr(result, "__iter__") else []
    if len(rows) != len(problem.tables):
        count = len(problem.tables)
        raise Fault(f"returns {reprlib.repr(result)}, not one entry for each of {count} rows")
    return rows


# --- Runs -----------------------------------------------------------------------------------------


def _draft(table: Table, branch: Callable) -> Prefix:
    drafts: Prefix = ()
    for _ in range(table.gamma):
        drafts = (*drafts, branch(table.draft[drafts]))
    return drafts


def along(table: Table, drafts: Prefix, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafts (γ,), their distributions (γ, V) and the target's (γ+1, V)."""
    prefixes = [drafts[:n] for n in range(len(drafts) + 1)]
    draft = np.array([table.draft[prefix] for prefix in prefixes[:-1]], dtype)
    return np.array(drafts), draft, np.array([table.target[prefix] for prefix in prefixes], dtype)


def _verify(function, problem, rng, dtype, branch) -> Rows:
    (table,) = problem.tables
    result = called(function, *along(table, _draft(table, branch), dtype), rng)
    return (emitted(result, table.size, table.gamma + 1),)


def _batch(function, problem, rng, dtype, branch) -> Rows:
    rows = [along(table, _draft(table, branch), dtype) for table in problem.tables]
    arrays = [np.stack(each) for each in zip(*rows, strict=True)]
    results = _of_rows(called(function, *arrays, rng), problem)
    return tuple(
        emitted(result, table.size, table.gamma + 1)
        for result, table in zip(results, problem.tables, strict=True)
    )


def _lengths(function, problem, rng, dtype, branch) -> Rows:
    drafts = [_draft(table, branch) for table in problem.tables]
    rows = [along(table, row, dtype) for table, row in zip(problem.tables, drafts, strict=True)]
    arrays = [np.stack(each) for each in zip(*rows, strict=True)]
    lengths = _of_rows(called(function, arrays[0], arrays[1], rng), problem)
    outputs = []
    for table, tokens, length in zip(problem.tables, drafts, lengths, strict=True):
        (count,) = emitted(length, table.gamma + 1, 1)
        outputs.append(_exact_round(table, tokens[:count], branch))
    return tuple(outputs)


def _exact_round(table: Table, drafts: Prefix, branch: Callable) -> Prefix:
    """Verify drafts by the token rule."""
    for i, token in enumerate(drafts):
        p, q = table.target[drafts[:i]], table.draft[drafts[:i]]
        kept = min(1.0, p[token] / q[token])
        if not branch([1 - kept, kept]):
            left = np.maximum(p - q, 0.0)
            return (*drafts[:i], branch(left / left.sum()))
    return (*drafts, branch(table.target[drafts]))


def _round(function, problem, rng, dtype, branch) -> Rows:
    (table,) = problem.tables

    def model(law: tables.Distributions) -> Callable[[Sequence[int]], np.ndarray]:
        def ask(prefix: Sequence[int]) -> np.ndarray:
            tokens = tuple(int(token) for token in prefix)
            if tokens not in law:
                raise Fault(f"asks for the distribution after {tokens}")
            return np.array(law[tokens], dtype)

        return ask

    result = called(function, model(table.target), model(table.draft), [], table.gamma, rng)
    return (emitted(result, table.size, table.gamma + 1),)


def _sampler(function, problem, rng, dtype, branch) -> Rows:
    (table,) = problem.tables
    logits, temperature = problem.more
    result = called(function, np.array(logits, dtype), temperature, rng)
    return (emitted(result, table.size, 1),)


def _tree(distinct: bool):
    def run(function, problem, rng, dtype, branch) -> Rows:
        (table,) = problem.tables
        (parents,) = problem.more
        paths: list[Prefix] = []
        for node, parent in enumerate(parents):
            before = paths[parent] if parent >= 0 else ()
            law = np.array(table.draft[before])
            if distinct:
                law[[paths[n][-1] for n in range(node) if parents[n] == parent]] = 0.0
            paths.append((*before, branch(law / law.sum())))
        rows = [(), *paths]
        draft, target = (
            np.array([law[row] for row in rows], dtype) for law in (table.draft, table.target)
        )
        tokens = np.array([path[-1] for path in paths])
        result = called(function, np.array(parents), tokens, draft, target, rng)
        return (emitted(result, table.size, table.gamma + 1),)

    return run


# --- Problems -------------------------------------------------------------------------------------


def _chains(seed: int) -> list[Problem]:
    return [Problem(table.kind, (table,)) for table in tables.chains(seed)]


def _batches(seed: int) -> list[Problem]:
    return [Problem(rows[0].kind, rows) for rows in tables.batches(seed)]


def _logits(seed: int) -> list[Problem]:
    rng = np.random.default_rng(seed)
    rows = [
        ("random", np.log([0.7, 0.3])),
        *(("random", rng.normal(size=size).round(2)) for size in (2, 3, 4, 5)),
        ("logits of ±1,000", 1000 + np.array([0.0, -2000, 1, 0.5])),
        ("masked ids", np.array([0.5, MASKED, 1.0, MASKED, -0.5])),
        ("masked ids", np.array([MASKED, 1.0])),
    ]
    return [
        Problem(f"{kind}, T = {temperature:g}", (softmax(logits, temperature),), more)
        for (kind, logits), temperature in itertools.product(rows, TEMPERATURES)
        for more in [(logits, temperature)]
    ]


def softmax(logits: np.ndarray, temperature: float) -> Table:
    """The table of a single token at a temperature; at 0 it is one-hot."""
    if temperature:
        law = np.exp((logits - logits.max()) / temperature)
    else:
        law = (logits == logits.max()).astype(float)
    p = law / law.sum()
    return Table("", len(logits), 0, {(): p}, {(): p})


def _trees(distinct: bool) -> Callable[[int], list[Problem]]:
    def make(seed: int) -> list[Problem]:
        chosen = [
            (name, table)
            for table in tables.chains(seed)
            for name, parents in TREES.items()
            if table.gamma == _depth(parents) and table.size <= (3 if len(parents) < 4 else 2)
            # Children without replacement need as many ids of positive probability.
            if not distinct
            or min(np.count_nonzero(law) for law in table.draft.values()) >= _children(parents)
        ]
        return [Problem(table.kind, (table,), (TREES[name],)) for name, table in chosen]

    return make


def _depth(parents: tuple[int, ...]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths)


def _children(parents: tuple[int, ...]) -> int:
    return max(parents.count(parent) for parent in parents)


NODES = "parents, tokens, draft_probs, target_probs, rng"
KINDS = {
    "verify": Kind(
        "drafts, draft_probs, target_probs, rng", "1 to γ+1 token ids", _chains, _verify
    ),
    "batch": Kind(
        "drafts, draft_probs, target_probs, rng", "token ids of each row", _batches, _batch
    ),
    "round": Kind(
        "target, draft, prefix, gamma, rng", "the prefix and 1 to γ+1 token ids", _chains, _round
    ),
    "lengths": Kind("drafts, draft_probs, rng", "a length for each row", _batches, _lengths),
    "sampler": Kind("logits, temperature, rng", "a token id", _logits, _sampler),
    "tree": Kind(NODES, "1 to depth+1 token ids", _trees(False), _tree(False)),
    "distinct_tree": Kind(NODES, "1 to depth+1 token ids", _trees(True), _tree(True)),
}
