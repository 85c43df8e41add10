"""The leaderboard of policies: one small race from the command line, and what it says."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import command_line
import test_loops
from experiments.adaptive import board, pictures
from experiments.adaptive.race import Counting
from pairs import TEXTS
from specjax import tasks
from specjax.policies import Policy, constant, head
from specjax.pytrees import pytree
from specjax.sampling import sampling
from specjax.trace import TracedRound
from table_models import inputs_of, random_table


@pytree
class Hasty(Policy):
    """Drafts one token, and calls the drafter for one more before it stops."""

    def keep_drafting(self, state, seen):
        return state, seen.drafting & (seen.slot == 0)


@pytest.mark.parametrize(("policy", "drafted"), [(constant(2), 2), (Hasty(), 1)])
def test_counting_calls(policy, drafted):
    """Two calls a round, whether the second token is drafted or not; the output stays the same."""
    tables = (random_table(seed, dtype=jnp.float32) for seed in (1, 2))
    method = test_loops.method_of(*tables, policy=policy, chosen=sampling(1.0))
    counting = dataclasses.replace(method, drafter=Counting(method.drafter))
    inputs = inputs_of([[1, 0]])
    plain, counted = (test_loops.run(m, inputs, 30) for m in (method, counting))
    assert counted.tokens.tolist() == plain.tokens.tolist()
    rounds = int(counted.stats.target_calls[0])
    # With two tokens left there is room for one, with one left for none.
    assert 2 * rounds - 3 <= int(counted.drafter[1]) <= 2 * rounds
    assert drafted * rounds - 3 <= int(counted.stats.drafted[0]) <= drafted * rounds


@pytest.fixture
def config_file(pair, tmp_path):
    """configs/adaptive.py, shrunk: the pair, 2 inputs, γ of 1 or 2, three policies."""
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import adaptive\n\n"
        "def get_config(seed='0'):\n"
        "    config = adaptive.get_config()\n"
        f"    config.target = {pair.target.name!r}\n"
        f"    config.drafts = ({pair.draft.name!r},)\n"
        "    config.static, config.gamma_max, config.widths = (1, 2), 2, (2,)\n"
        "    config.temperatures, config.max_new_tokens = (0.0,), 12\n"
        "    config.policies = {'svip': {'threshold': 0.1}, 'goodput': {}, 'head': {}}\n"
        "    config.timed_inputs = config.alpha_inputs = 2\n"
        "    config.repeats = 1\n"
        "    config.seed = int(seed)\n"
        "    return config\n"
    )
    return file


@pytest.mark.slow
def test_a_race(pair, config_file, tmp_path, monkeypatch, capsys):
    """Rows, report and figures; an interrupted race runs again; without a head there is none."""
    examples = [tasks.Example(f"{text} $[b]$", text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, files=(): examples)
    work = tmp_path / "work"
    flags = f"--config={config_file}", f"--workdir={work}"
    command = functools.partial(command_line.run, monkeypatch, capsys, "experiments.adaptive")
    width = pair.draft.config.d_model
    params = head.init(jax.random.key(0), width)
    file = tmp_path / "head.npz"
    head.save(file, params)
    monkeypatch.setattr("experiments.adaptive.race.head_file", lambda on, draft: file)
    outcome = command(*flags)
    assert outcome.status == 0, outcome.stderr
    lines = (work / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["method"] for row in rows] == ["γ=1", "γ=2", "goodput", "head", "svip"]
    for row in rows:
        assert row["identical"] is True
        assert row["tau"] == row["tokens"] / row["target_calls"]
        assert row["draft_calls"] >= row["drafted"] >= row["accepted"]
        assert row["gain_decode_low"] <= row["gain_decode"] <= row["gain_decode_high"]
        assert row["replayed_gain"] > 0
        assert row["predicted"] == pytest.approx(row["replayed_gain"])  # all inputs are timed
        assert len(row["timings"]["rounds"]) == 3
    by = {row["method"]: row for row in rows}
    assert by["γ=1"]["draft_calls"] == by["γ=1"]["drafted"]
    assert by[by["γ=1"]["best_static"]]["of_best"] == 1
    report = (work / "report.md").read_text()
    for name in re.findall(r"\]\(([\w/.]+)\)", report):
        assert (work / name).stat().st_size > 0, name
    assert {path.name for path in work.iterdir()} == {
        "results.jsonl", "report.md", "alpha.png", "lengths.png",
    }  # fmt: skip

    file.unlink()  # now nothing is missing, and nothing is measured
    (work / "report.md").unlink()
    assert command(*flags).status == 0
    assert (work / "results.jsonl").read_text().splitlines() == lines
    assert (work / "report.md").exists()
    (work / "results.jsonl").write_text("".join(f"{line}\n" for line in lines[:2]))
    assert command(*flags).status == 0
    again = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in again] == ["γ=1", "γ=2", "goodput", "svip"]
    other = command(f"--config={config_file}:1", flags[1])
    assert (other.status, other.stderr.count("rows of another config")) == (1, 1)


def row_of(method, gain, of_best, closed=None, **changes):
    """A row of a race in which γ=3 is the best static length."""
    spread = {"gain_decode": gain, "of_best": of_best}
    return {
        "draft": "families/x/draft", "temperature": 0.0, "method": method, "alpha": 0.8,
        "static": method.startswith("γ"), "best_static": "γ=3", "closed": closed,
        "replayed_gain": gain, "predicted": gain, "oracle_gain": 2.0, "identical": True,
        "tokens": 30, "timed_inputs": 2, "timings": {"c": 0.1},
        **spread, **{f"{name}_{end}": value + by for name, value in spread.items()
                     for end, by in (("low", -0.02), ("high", 0.02))},
        **changes,
    }  # fmt: skip


def test_words():
    """A policy ahead, one level within the quartiles, and one behind: each is said."""
    still = row_of("γ=3", 1.2, 1.0, 0.0)
    ahead, behind = row_of("svip", 1.3, 1.08, 0.4), row_of("ucb", 1.0, 0.9, -0.2)
    slow = {"temperature": 1.0}
    other = [row_of("γ=3", 0.9, 1.0, 0.0, **slow), row_of("ucb", 0.89, 0.99, -0.1, **slow)]
    first, *rest = board.sections([still, ahead, behind, *other])
    assert first.words == (
        "The best policy is at least level with the best static γ everywhere, within the quartiles "
        "of repeats. It is ahead by more than the quartiles for draft, T=0. The largest share of "
        "the gap to the oracle that is closed in replay: svip: 40% (draft, T=0). No static γ is "
        "worth its time for draft, T=1. The clock is within 10% of what replay predicts for 3 of 3 "
        "policies; the farthest is svip with draft, T=0: +0%."
    )
    assert [section.title for section in rest] == ["draft, T=0", "draft, T=1"]
    assert [row["method"] for row in rest[0].rows] == ["svip", "γ=3", "ucb"]
    assert "Slower than γ=3, by more than the quartiles: ucb." in rest[0].words
    lost = board.sections([still, behind])[0].words
    assert lost.startswith("The best policy is behind the best static γ for draft, T=0.")
    missed = board.sections([still, {**ahead, "predicted": 1.5}, behind])[0].words
    assert missed.endswith("for 1 of 2 policies; the farthest is svip with draft, T=0: -13%.")
    wrong = board.sections([still, {**ahead, "identical": False}])[1].words
    assert "DIFFER from plain decoding: svip" in wrong


def test_lengths_are_drawn_where_rounds_begin():
    """Rounds of 2 + 1 and 1 + 1 tokens begin at 0 and 3; what was drafted stands in two parts."""
    rounds = [TracedRound([4, 5], [6], [7]), TracedRound([8], [], [9])]
    figure = pictures.draw_lengths({"svip": rounds}, 4)
    bars = [(b.get_x(), b.get_y(), b.get_height()) for b in figure.axes[0].patches]
    assert bars == [(0, 0, 2), (3, 0, 1), (0, 2, 1), (3, 1, 0)]
    assert figure.axes[0].get_title(loc="left") == "svip: 2 target calls"
