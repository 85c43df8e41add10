"""Timings that contradict themselves, and a busy machine, by hand."""

import os

import numpy as np
import pytest

from specjax.measure import doubts
from specjax.measure.doubts import used_by_others  # before tests replace it


@pytest.mark.parametrize(
    ("timings", "said"),
    [
        ({}, ()),
        # A draft step of .1 and a pass of 2 steps: a round of 3 steps may take 2.55 at least.
        ({"overhead": -0.44}, ()),
        ({"overhead": -0.46}, ("overhead -0.46: a round takes less than its own phases",)),
        ({"v": 0.91}, ()),
        ({"v": 0.89}, ("v = 0.89: a verify pass takes less",)),
        ({"c": 1.25}, ()),
        ({"c": 1.25, "smaller": True}, ("c = 1.25: a draft with fewer parameters",)),
        ({"c": 0.9, "smaller": True}, ()),
        ({"measured": 1.49, "predicted": 1.0}, ()),
        ({"measured": 1.8, "predicted": 1.0}, ("a speedup of 1.80, where the times",)),
        ({"measured": 1.0, "predicted": 1.8}, ("a speedup of 1.00, where the times",)),
        ({"measured": 9.0, "predicted": None}, ()),
        ({"v": 0.5, "overhead": -1.89}, ("v = 0.50", "overhead -1.89")),
    ],
)
def test_contradictions(timings, said):
    found = doubts.contradictions(10, **{"c": 0.1, "v": 2.0, "overhead": 0.1} | timings)
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_a_machine_is_busy_before_the_measurement():
    said = doubts.busy_before(0.9)
    assert said.startswith("Other programs use this machine: 90% of its processors.")
    assert doubts.busy_before(0.2) == doubts.busy_before(float("nan")) == ""


def test_what_others_use_is_not_the_work_of_this_process(monkeypatch):
    """400 ticks: 200 are idle, 60 of this process, and the rest of others."""
    rows = [[100, 0, 0, 500, 0, 0, 0, 0, 0, 0], [240, 0, 60, 600, 100, 0, 0, 0, 0, 0]]
    texts = iter("cpu  " + " ".join(map(str, row)) + "\ncpu0 1 2" for row in rows)
    own = iter([os.times_result((1.0, 0.0, 0, 0, 0)), os.times_result((1.4, 0.2, 0, 0, 0))])
    monkeypatch.setattr(doubts.pathlib.Path, "read_text", lambda _: next(texts))
    monkeypatch.setattr(os, "times", lambda: next(own))
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    assert used_by_others(0.0) == pytest.approx((200 - 60) / 400)
    monkeypatch.setattr(os, "getloadavg", lambda: (21.0, 1.0, 1.0))
    monkeypatch.setattr(doubts.pathlib.Path, "read_text", lambda _: "")
    assert used_by_others(0.0) == 1.0  # of the load average


def test_a_busy_machine(monkeypatch):
    assert doubts.busy([]) == doubts.busy([None, np.nan, 1.3, 2.0]) == ""
    assert "a load average of up to 5.2 for each processor" in doubts.busy([0.1, 5.2, None])
    monkeypatch.setattr(os, "getloadavg", lambda: (21.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert doubts.load_average() == 5.25
    monkeypatch.delattr(os, "getloadavg")
    assert np.isnan(doubts.load_average())
