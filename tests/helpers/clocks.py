"""A clock on which only calls of loops take time."""

import time

from specjax import loop
from specjax.measure import doubts


def of_rounds(monkeypatch, step=0.0, rest=1.0, decides=0.0, call=0.05):
    """Let a token of plain decoding take 1, a draft step `step`, and all else in a round `rest`.

    Args:
      decides: what a round takes besides where a policy decides.
      call: the fixed time of a call.
    """
    now, decode = [0.0], loop.decode

    def clocked(method, context, state):
        after = decode(method, context, state)
        rounds, steps = int(after.stats.target_calls.max()), int(after.stats.draft_calls.max())
        each = 1.0
        if method.drafter is not None:
            each = rest + (0.0 if method.policy.fixed else decides)
        now[0] += call + rounds * each + steps * step
        return after

    monkeypatch.setattr(loop, "decode", clocked)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(doubts, "load_average", lambda: 0.0)
