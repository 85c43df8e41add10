"""What trees ask of a drafter beyond `Drafter`. A drafter that answers nothing drafts trees too."""

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

from specjax.drafters.base import Drafter


@runtime_checkable
class Forks(Protocol):
    """A drafter whose branches share a part of its state, as EAGLE's share features of the text.

    `fork` splits a state into what each node has a copy of, and what all share; `extend` neither
    reads nor changes the shared part. `join` makes a branch's copy whole again.
    """

    @abstractmethod
    def fork(self, state: Any) -> tuple[Any, Any]: ...

    @abstractmethod
    def join(self, own: Any, shared: Any) -> Any: ...


def fork(drafter: Drafter, state: Any) -> tuple[Any, Any]:
    """A drafter's state split in two; the first part is all of it unless the drafter `Forks`."""
    return drafter.fork(state) if isinstance(drafter, Forks) else (state, ())


def join(drafter: Drafter, own: Any, shared: Any) -> Any:
    """The state of a branch that `fork` has split."""
    return drafter.join(own, shared) if isinstance(drafter, Forks) else own


def branches(drafter: Drafter) -> bool:
    """Whether drafts can be trees. A class that proposes no more than one token after a text
    declares `branches = False`."""
    return getattr(drafter, "branches", True)
