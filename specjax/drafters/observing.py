"""Drafters that read more of the target than its last hidden state, or draft from guesses."""

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from specjax.drafters.base import Drafter
from specjax.types import Model


@runtime_checkable
class Sees(Protocol):
    """A drafter whose `observe` needs states of more layers, as EAGLE-3 does.

    `sees` wraps the target so that its hidden states hold them. Distributions do not change.
    """

    @abstractmethod
    def sees(self, target: Model) -> Model: ...


def seen_by(drafter: Drafter, target: Model) -> Model:
    """The target whose hidden states `observe` gets; unchanged unless the drafter `Sees`."""
    return drafter.sees(target) if isinstance(drafter, Sees) else target


def guesses(drafter: Drafter) -> bool:
    """Whether a drafter's distribution depends on where the round began, not on the text alone.

    A class declares `guesses = True`: after drafted tokens EAGLE reads its own guesses, and Medusa
    looks further ahead. Replay then records a rollout from each position.
    """
    return getattr(drafter, "guesses", False)
