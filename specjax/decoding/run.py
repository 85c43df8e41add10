"""What a run of decoding needs beside its method, target and texts, as one value."""

import dataclasses
from collections.abc import Sequence

from jax import Array
from jaxtyping import Key

from specjax.defaults import BATCH_SIZE
from specjax.support.ranges import truth, whole


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Lengths, randomness and rows of a run, and how its outputs are handed out.

    Raises:
      ValueError: a number out of range.
    """

    max_new_tokens: int
    """Tokens of an output at most, EOS included."""
    key: Key[Array, ""]
    """Randomness; a row's noise depends on it, the index of its input and its sample number."""
    num_samples: int = 1
    """Outputs drawn for each input."""
    batch_size: int = BATCH_SIZE
    """Rows decoded at once. Further inputs take the places of rows that have ended."""
    max_source_len: int | None = None
    """Tokens of an input at most; None: the target's own limit."""
    log_rounds: bool = False
    """Keep a log of rounds, `Row.rounds`."""
    carry_state: bool = False
    """Begin each batch with what the one before has learned (`check_carry`)."""
    every: int = 0
    """Rounds between two reports of `Progress` of all rows that run; 0: no reports."""
    eager: bool = False
    """Hand out each row as it ends, even if no input can be admitted yet. False: the loop returns
    less often."""
    names: tuple[str, str] = ("target", "draft")
    """Names of target and draft, for errors."""
    only: Sequence[int] | None = None
    """Numbers of the rows to decode, counted over inputs and their samples; None: all. Each is
    decoded once, however often it is named. Their randomness is not shifted, so a run that was cut
    off can continue, or share rows with others. If the policy reads its batch, the batches of
    these rows are decoded again, as they were."""
    width: int | None = None
    """Width of the sources or prompts; None: the bucket of the longest of those that run together
    (`streaming.alike`, or a batch)."""
    budgets: Sequence[int] | None = None
    """New tokens at most of each text, where that is fewer than max_new_tokens."""
    admits: int | None = None
    """Rows that must be free before as many inputs are admitted in one call; None: a quarter. With
    as many as there are rows, whole batches run one after the other."""

    def __post_init__(self):
        for name in ("num_samples", "batch_size"):
            whole(name, getattr(self, name), "[1, ∞)")
        whole("every", self.every, "[0, ∞)")
        for name in ("log_rounds", "carry_state", "eager"):
            truth(name, getattr(self, name))
        if self.admits is not None:
            whole("admits", self.admits, "[1, ∞)")
        for budget in self.budgets or ():
            whole("budgets", budget, "[1, ∞)")
