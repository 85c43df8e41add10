"""Drafting as a game on recorded outputs, for policies that learn by reinforcement.

Before each token an agent drafts it or ends the draft, as in Learning to Draft (2603.01639). The
methods are those of a gymnasium environment.
"""

from typing import Any

import numpy as np

from specjax.policies import Costs
from specjax.replay.rollouts import Rollouts


class Drafting:
    """Recorded outputs, each an episode.

    The reward of a round is its tokens less `rate` times its time. At the largest rate at which an
    agent's mean return is no less than 0, that rate is its tokens per time.

    Seen before each decision, float32 (4,): of the draft's newest token the largest probability
    that the drafter saw, and its entropy in nats, both 0 before the first; the tokens of the draft;
    and the accepted share of the output's tested tokens so far.
    """

    def __init__(self, found: Rollouts, costs: Costs, rate: float = 1.0):
        """Keep what a game needs; costs in target steps make `rate` a speedup.

        Raises:
          ValueError: rollouts without beliefs, or of a drafter whose drafts depend on their round.
        """
        if found.top1.shape[-1] == 0 or np.any(np.asarray(found.accepted)[:, 0] >= 0):
            raise ValueError("Drafting needs a trace of a draft model, or of prompt lookup.")
        self.found, self.costs, self.rate = found, costs, rate
        self.chances, self.length = np.asarray(found.acceptance), np.asarray(found.length)
        self.top1, self.entropy = np.asarray(found.top1), np.asarray(found.entropy)
        self.times = np.asarray(costs.round_times(found.gamma_max), float)
        self.random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, output: int | None = None) -> tuple[Any, dict]:
        """Begin an output, a random one if none is named, with fresh draws of what is accepted."""
        self.random = self.random if seed is None else np.random.default_rng(seed)
        every = len(self.chances)
        self.output = int(self.random.integers(every)) if output is None else output
        self.accepts = self.random.random(self.chances.shape[1]) < self.chances[self.output]
        self.end = int(self.found.emitted[self.output])
        self.begin = self.drafted = self.kept = self.tested = 0
        return self._seen(), {}

    def step(self, draft: bool) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Draft a token, or verify the draft, as happens too where there is no next token."""
        spent, room = 0.0, int(self.found.budget[self.output]) - self.begin - 1
        if draft and self.drafted < min(self.found.gamma_max, room):
            at, slot = self._place(self.drafted)
            if slot < self.length[self.output, at]:
                self.drafted += 1
                return self._seen(), 0.0, False, False, {}
            spent = float(self.costs.draft)  # the drafter was asked, and is silent
        kept, spent = 0, spent + self.times[self.drafted]
        while kept < self.drafted and self.accepts[self.begin + kept]:
            kept += 1
        tokens = min(kept + 1, self.end - self.begin)
        self.kept, self.tested = self.kept + kept, self.tested + min(kept + 1, self.drafted)
        self.begin, self.drafted = self.begin + tokens, 0
        over, info = self.begin >= self.end, {"tokens": tokens, "time": spent}
        return self._seen(), tokens - self.rate * spent, over, False, info

    def _place(self, token: int) -> tuple[int, int]:
        """Where a round's token was recorded: along the output, or behind its first rejection."""
        rejected = np.flatnonzero(~self.accepts[self.begin : self.begin + token])
        at = int(rejected[0]) if len(rejected) else token
        return self.begin + at, token - at

    def _seen(self) -> np.ndarray:
        past, at = self.kept / max(self.tested, 1), (self.output, *self._place(self.drafted - 1))
        belief = [self.top1[at], self.entropy[at]] if self.drafted else [0.0, 0.0]
        return np.array([*belief, self.drafted, past], np.float32)
