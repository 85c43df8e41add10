"""Drafters that begin a batch with what the batch before has learned: `generate(carry=True)`."""

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool

from specjax.drafters.base import Drafter


@runtime_checkable
class Carries(Protocol):
    """A drafter that may begin a batch with a part of its last state.

    `carries` says whether it does so. `carry_over` takes that part, without caches, from the state
    at the end of a batch of A rows. `resume` puts it into a fresh state; `rows` are those of the A
    rows that were no padding.
    """

    @property
    def carries(self) -> bool: ...

    @abstractmethod
    def carry_over(self, state: Any) -> Any: ...

    @abstractmethod
    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any: ...


def carries(drafter: Drafter) -> bool:
    """Whether the next batch of a run may begin with what the drafter has learned."""
    return isinstance(drafter, Carries) and drafter.carries


def carry_over(drafter: Drafter, state: Any) -> Any:
    """The part of a drafter's state that the next batch begins with; () unless it `Carries`."""
    return drafter.carry_over(state) if isinstance(drafter, Carries) else ()


def resume(drafter: Drafter, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
    """A fresh state with what `carry_over` took from the batch before, of A rows."""
    return drafter.resume(fresh, past, rows) if isinstance(drafter, Carries) else fresh
