"""Optional abilities of drafters of trees. A drafter without them drafts trees too."""

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

from specjax.drafters.base import Drafter


@runtime_checkable
class Forks(Protocol):
    """A drafter whose branches share a part of its state, as EAGLE's share features of the text.

    `fork` splits a state into a part that each node copies and a part that all share; `extend`
    neither reads nor changes the shared part. `join` puts the two together again.
    """

    @abstractmethod
    def fork(self, state: Any) -> tuple[Any, Any]: ...

    @abstractmethod
    def join(self, own: Any, shared: Any) -> Any: ...


def fork(drafter: Drafter, state: Any) -> tuple[Any, Any]:
    """Split a drafter's state in two; the first part is all of it unless the drafter `Forks`."""
    return drafter.fork(state) if isinstance(drafter, Forks) else (state, ())


def join(drafter: Drafter, own: Any, shared: Any) -> Any:
    """Join the two parts of a branch's state that `fork` has split."""
    return drafter.join(own, shared) if isinstance(drafter, Forks) else own


def branches(drafter: Drafter) -> bool:
    """Whether drafts can be trees. A class that proposes no more than one token after a text
    declares `branches = False`."""
    return getattr(drafter, "branches", True)
