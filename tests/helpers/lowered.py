"""Which loops and branches of a lowered program only the device can decide, and what it gathers.

XLA counts the turns of a loop whose counter starts at a constant, grows by one and is compared with
a constant; for any other it reads the condition back to the host in every turn.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.interpreters import mlir

Value = mlir.ir.Value


class Found(NamedTuple):
    """Numbers of operations in a program."""

    whiles: int  # of any kind
    open_whiles: int  # of unknown length
    open_branches: int  # whose condition is no constant


def loops(traced: jax.stages.Traced, platform: str) -> Found:
    """The loops of what jax.jit(...).trace(...) gave, lowered for "cpu", "cuda" or "tpu"."""
    every = _all_operations(traced, platform)
    whiles = [op for op in every if op.name == "stablehlo.while"]
    branches = [op for op in every if op.name in ("stablehlo.case", "stablehlo.if")]
    return Found(
        len(whiles),
        sum(not _counts(op) for op in whiles),
        sum(len(op.regions) > 1 and not _is_constant(op.operands[0]) for op in branches),
    )


def gathered(traced: jax.stages.Traced, platform: str) -> list[tuple[int, ...]]:
    """Shapes of the arrays from which entries are gathered at indices; XLA adds none of its own."""
    gathers = ("stablehlo.gather", "stablehlo.dynamic_gather")
    every = _all_operations(traced, platform)
    return [tuple(op.operands[0].type.shape) for op in every if op.name in gathers]


def _all_operations(traced: jax.stages.Traced, platform: str) -> list:
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    return list(_operations(module.operation))


def _operations(op) -> Iterator:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _results(region) -> list[Value]:
    """What a region of one block returns."""
    operations = list(region.blocks[0].operations)
    return [_past_platforms(value) for value in operations[-1].operands]


def _past_platforms(value: Value) -> Value:
    """Through `platform_dependent`, of which one branch is left for one platform."""
    op = _owner(value)
    while op is not None and op.name == "stablehlo.case" and len(op.regions) == 1:
        value = list(op.regions[0].blocks[0].operations)[-1].operands[_number(op, value)]
        op = _owner(value)
    return value


def _owner(value: Value):
    """The operation that makes a value; None: it is an argument."""
    return None if isinstance(value.owner, mlir.ir.Block) else value.owner.operation


def _number(op, value: Value) -> int:
    return next(i for i, result in enumerate(op.results) if result == value)


def _is_constant(value: Value) -> bool:
    """Made from constants alone."""
    op = _owner(_past_platforms(value))
    if op is None or op.name in ("func.call", "stablehlo.while"):
        return False
    if op.name == "stablehlo.case":
        return _is_constant(op.operands[0]) and all(
            _is_constant(result) for region in op.regions for result in _results(region)
        )
    return op.name == "stablehlo.constant" or (
        len(op.operands) > 0 and not op.regions and all(map(_is_constant, op.operands))
    )


def _counts(loop) -> bool:
    """Whether a `while` compares a counter from a constant with a constant."""
    condition, body = loop.regions
    compare = _owner(_results(condition)[0])
    if compare is None or compare.name != "stablehlo.compare" or " LT, " not in str(compare):
        return False
    counter, bound = map(_past_platforms, compare.operands)
    arguments = list(condition.blocks[0].arguments)
    if counter not in arguments or not _is_constant(bound):
        return False
    at = arguments.index(counter)
    step = _owner(_results(body)[at])
    if step is None or step.name != "stablehlo.add" or not _is_constant(loop.operands[at]):
        return False
    one, other = step.operands
    return one == body.blocks[0].arguments[at] and _is_constant(other)
