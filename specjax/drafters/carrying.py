"""Drafters that start a batch from the last batch's state: `generate(carry=True)`."""

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool

from specjax.drafters.base import Drafter


@runtime_checkable
class Carries(Protocol):
    """A drafter that may start a batch from a part of its last state.

    `carries` is True if it does so. `carry_over` takes that part, without caches, from the state at
    the end of a batch of A rows. `resume` puts it into a fresh state; `rows` marks those of the A
    rows that were no padding.
    """

    @property
    def carries(self) -> bool: ...

    @abstractmethod
    def carry_over(self, state: Any) -> Any: ...

    @abstractmethod
    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any: ...


def carries(drafter: Drafter) -> bool:
    """Whether the drafter may start a batch from its last state."""
    return isinstance(drafter, Carries) and drafter.carries


def carry_over(drafter: Drafter, state: Any) -> Any:
    """The part of a drafter's state that the next batch begins with; () unless it `Carries`."""
    return drafter.carry_over(state) if isinstance(drafter, Carries) else ()


def resume(drafter: Drafter, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
    """Put the part that `carry_over` took from the last batch, of A rows, into a fresh state."""
    return drafter.resume(fresh, past, rows) if isinstance(drafter, Carries) else fresh
