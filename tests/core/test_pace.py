"""Measurements within some minutes: the forecast, what is lowered, and what is not timed at all."""

import random
import re
import time

import numpy as np
import pytest

import specjax
from pairs import TEXTS
from specjax.decoding import building
from specjax.measure import metrics, timing
from specjax.support import command_line
from specjax.tuning.pace import Pace, reduced
from specjax.tuning.recommendation import Candidate, cannot_win, recommend

RUN = {"max_new_tokens": 12, "gammas": (1, 2, 3), "timed_inputs": 2, "repeats": 4}


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (np.inf, {"tokens": 128, "repeats": 5}),
        (640, {"tokens": 128, "repeats": 5}),
        (639, {"tokens": 64, "repeats": 5}),  # 4 times its least is more than 2.5 times
        (319, {"tokens": 64, "repeats": 2}),
        (127, {"tokens": 32, "repeats": 2}),
        (0, {"tokens": 32, "repeats": 2}),
    ],
)
def test_what_is_lowered(seconds, left):
    assert reduced({"tokens": (128, 32), "repeats": (5, 2)}, seconds) == left
    assert reduced({"tokens": (8, 32)}, 0) == {"tokens": 8}


@pytest.mark.parametrize(("until", "turns"), [(np.inf, 4), (0.0, timing.MIN_REPEATS)])
def test_repeats_end_with_the_time(until, turns):
    """But two are always taken, and the missing ones are named."""
    said: list[str] = []
    run = {"a": lambda batch: (1.0, 1.0, [], None)}
    found = timing.in_turns(run, [0, 1], 4, order=random.Random(0), until=until, say=said.append)
    assert found.decode["a"].shape == (turns, 2)
    assert said[-1] == ("timing a, turn 4 of 4" if turns == 4 else "no time for turn 3 of 4")


@pytest.mark.parametrize(
    ("beta", "gamma", "tokens"),
    [
        ([1] * 8, 3, 4.0),
        ([0] * 8, 3, 1.0),
        ([1, 0] * 4, 3, 2.0),
        # 0, 1 and 2 or one token more: 1 + .5 + .5 rounds for three tokens.
        ([0.5] * 2, 5, 2 / 1.5),
        # A run of four counts for more than its share of half of the tokens.
        ([1, 1, 1, 1, 0, 0, 0, 0], 7, 8 / 4),
    ],
)
def test_tokens_along_an_output(beta, gamma, tokens):
    assert metrics.tokens_along([np.array(beta, float)], gamma) == pytest.approx(tokens)


def test_tokens_along_outputs_are_those_of_the_loop(pair):
    """At temperature 0, where a token is accepted or not: the loop's own tokens per call."""
    plain = specjax.generate(pair.target, None, TEXTS, max_new_tokens=24)
    loop = building.build(pair.target, pair.draft, sampling=specjax.sampling.Greedy())
    alpha = metrics.alpha_of(loop, pair.target, TEXTS, plain.tokens)
    for gamma in (1, 3):
        run = specjax.generate(pair.target, pair.draft, TEXTS, gamma=gamma, max_new_tokens=24)
        assert metrics.tokens_along(alpha.overlaps, gamma) == pytest.approx(
            run.summary.tokens / run.summary.iterations
        )


def candidate(speedup: float = 0.0, **fields) -> Candidate:
    measured = dict.fromkeys(("speedup", "speedup_low", "speedup_end_to_end"), speedup)
    timed = {"gamma": 2, "steps": {"2": 3.0}, "c": 0.9, "alpha": 0.6, "v": 1.2, "predicted": 0.8}
    return Candidate(**{"name": "small", **measured, **timed, **fields})


@pytest.mark.parametrize(
    ("most", "best", "words"),
    [
        (0.9, None, "it is at most 0.99 times as fast by its costs and acceptance"),
        (0.92, None, ""),
        (1.2, candidate(1.3), ""),
        (1.2, candidate(1.5, name="best"), "it is at most 1.32 times as fast by its costs and "
         "acceptance, and best at least 1.50 times"),
        (1.2, candidate(1.5, choosing=1.3), ""),  # by its slowest half
    ],
)  # fmt: skip
def test_what_cannot_win(most, best, words):
    assert cannot_win(most, best) == words


def test_what_was_not_timed_is_named_with_its_reason():
    slow = candidate(dropped="it is at most 0.88 times as fast")
    said = recommend([slow]).words
    assert said.startswith("Use plain decoding: no draft here makes outputs come sooner")
    assert "small was not timed: it is at most 0.88 times as fast: the draft is too slow" in said
    second = candidate(name="second", predicted=1.2, dropped="the best is faster")
    chosen = recommend([candidate(1.5, name="best"), second])
    assert chosen.draft == "best"
    assert chosen.words.endswith("second was not timed: the best is faster.")


@pytest.mark.parametrize("minutes", [1e-4, 2.5])
def test_a_forecast_comes_before_measurements(pair, minutes):
    """Then each step of each candidate; and as few turns as there is time for."""
    said: list[str] = []
    chosen = specjax.select(pair.target, ["lookup"], TEXTS, minutes=minutes, say=said.append, **RUN)
    assert said[0] == "loading lookup"
    assert said[1].startswith("compiling plain decoding, for a forecast; the limit is ")
    kept = "" if minutes > 1 else ", fewer than usual to keep within 0.0001 minutes"
    assert re.fullmatch(
        r"about [\d.]+ minutes from here: \d+ loops to compile, [\d.]+ s each, then timed calls at "
        rf"[\d.]+ ms a token of plain decoding{kept}", said[2]
    )  # fmt: skip
    short = minutes < 1
    assert said[3] == f"decoding {4 if short else len(TEXTS)} inputs for α"
    assert said[4] == "measuring α, while loops of a few lengths compile"
    assert "turn 1 of 3" in said[6]
    assert ("no time for turn 3 of 3" in said) == short
    (lookup,) = chosen.candidates
    assert set(lookup.steps) == {"1", "2", "3"}
    if lookup.dropped:
        assert said[-1] == f"not timed: {lookup.dropped}"
    else:
        # Where time is short, the loop is compiled already.
        assert ("compiling plain decoding and speculative" in said) != short
        assert ("no time for turn 3 of 4" in said) == short


def test_without_a_limit_everything_is_timed(pair):
    said: list[str] = []
    chosen = specjax.select(pair.target, ["lookup"], TEXTS[:2], minutes=0, say=said.append, **RUN)
    (found,) = chosen.candidates
    assert not found.dropped
    assert found.speedup > 0
    assert "timing plain decoding and speculative, turn 4 of 4" in said
    with pytest.raises(ValueError, match="minutes=-1"):
        Pace(-1)


def test_tune_says_its_forecast_first(pair):
    """Where time is short the loop that has all lengths also races: no other one compiles."""
    said: list[str] = []
    options = {"gamma": 6, "max_new_tokens": 8, "minutes": 1e-4}
    found = specjax.tune(pair.target, pair.draft, TEXTS[:2], say=said.append, **options)
    assert said[0].startswith("compiling plain decoding, for a forecast; the limit is ")
    assert said[1].startswith("about ")
    assert said[2] == "decoding 2 inputs for α"
    assert [line for line in said[4:] if line.startswith("compiling")] == ["compiling 5 loops"]
    assert "Drafts of more than 4 tokens were not tried, for lack of minutes." in found.words
    assert found.gamma <= 4


def test_silence_is_broken():
    """Lines begin with the time, and the last one is repeated."""
    lines: list[str] = []
    with command_line.clocked(lines.append, quiet=0.05) as say:
        say("compiling a loop")
        time.sleep(0.2)
    assert lines[0] == "[0:00] compiling a loop"
    assert lines[1] == "[0:00] still compiling a loop"
    ended = len(lines)
    time.sleep(0.1)
    assert len(lines) == ended
