"""Drafters that read more of the target than its last hidden state, and those that look further
ahead than the text."""

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from specjax.drafters.base import Drafter
from specjax.types import Model


@runtime_checkable
class Sees(Protocol):
    """A drafter whose `observe` needs states of more layers, as EAGLE-3 does.

    `sees` wraps the target so that its hidden states hold them. Its distributions stay the same.
    """

    @abstractmethod
    def sees(self, target: Model) -> Model: ...


def seen_by(drafter: Drafter, target: Model) -> Model:
    """The target whose hidden states `observe` is given; as it is unless the drafter `Sees`."""
    return drafter.sees(target) if isinstance(drafter, Sees) else target


def guesses(drafter: Drafter) -> bool:
    """Whether a drafter's distribution depends on where the round began, and not on the text alone.

    A class declares `guesses = True`: behind drafted tokens EAGLE reads its own guesses, and Medusa
    looks further ahead. Replay then records a rollout from each beginning.
    """
    return getattr(drafter, "guesses", False)
