"""The leaderboard of policies: one small race from the command line, and what it says."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import command_line
import test_loops
from configs import adaptive
from experiments import tasks
from experiments.adaptive import board, pictures, race
from experiments.adaptive.policies import acceptance_head
from experiments.adaptive.race import Counting, choose, closed, interval
from pairs import TEXTS
from specjax import Row
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.measure.costing import static
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN, Comparison
from specjax.policies import Costs, Policy, constant, parse
from specjax.policies.costs import mean
from specjax.pytrees import pytree
from specjax.sampling import Sampling
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
    method = test_loops.method_of(*tables, policy=policy, chosen=Sampling(1.0))
    counting = dataclasses.replace(method, drafter=Counting(method.drafter))
    inputs = inputs_of([[1, 0]])
    plain, counted = (test_loops.run(m, inputs, 30) for m in (method, counting))
    assert counted.tokens.tolist() == plain.tokens.tolist()
    rounds = int(counted.stats.target_calls[0])
    # With two tokens left there is room for one, with one left for none.
    assert 2 * rounds - 3 <= int(counted.drafter[1]) <= 2 * rounds
    assert drafted * rounds - 3 <= int(counted.stats.verified[0]) <= drafted * rounds


def test_some_of_the_policies(monkeypatch):
    """`only` has their order; without it all race; a name that there is not is refused."""
    monkeypatch.setattr(race, "head_file", lambda on, draft: pathlib.Path("none"))
    config = adaptive.get_config("prose")
    on = types.SimpleNamespace(config=config)
    config.only = ("goodput", "lookahead")
    assert race.policies(on, "draft") == {"goodput": {}, "lookahead": {}}
    config.only = ()
    assert list(race.policies(on, "draft")) == [n for n in config.policies if n != "head"]
    config.only = ("goodput", "godput")
    with pytest.raises(ValueError, match="only: 'godput' is none of the policies"):
        race.policies(on, "draft")


def test_drafts_of_one_length_in_a_race(pair, monkeypatch):
    """The last inputs choose, which are none of the race. What wins races and is
    replayed, at its own costs; plain decoding races, and is replayed as its policy says."""
    seen = []

    def raced(watch, ways, texts):
        seen.append((list(ways), texts))
        fast = static(2) if "lookahead" in ways else PLAIN
        took = {name: np.full((2, 2), 1.0 - 0.1 * (name == fast)) for name in ways}
        rows = {name: [[types.SimpleNamespace(emitted=1)]] * 2 for name in ways}
        return Comparison(took, {}, rows, dict.fromkeys(ways, [None] * 2))

    monkeypatch.setattr(Stopwatch, "race", raced)
    monkeypatch.setattr(race.speedups, "ids", lambda on, count: [[i] for i in range(count)])
    config = types.SimpleNamespace(
        alpha_inputs=20, timed_inputs=2, max_new_tokens=8, seed=0, static=(1, 2)
    )
    on = types.SimpleNamespace(config=config, target=pair.target)
    known = {
        "lookahead": Costs(0.1, [1.2] * 4, token=1.0), "dear": Costs(9.0, [1.0] * 4, token=1.0),
        "γ=1": Costs(0.1, [1.0] * 2), "γ=3": Costs(0.1, [1.4] * 4),
    }  # fmt: skip
    built = building.build(pair.target, pair.draft, gamma=3, sampling=Sampling(0.0))
    made = {
        name: dataclasses.replace(built, policy=parse("lookahead", costs=known[name]))
        for name in ("lookahead", "dear")
    }
    racing, decide = race.prefer(on, made)
    own = race.costs_of(decide, made, known)
    ways = ["γ=1", "γ=2", PLAIN]
    assert [names for names, _ in seen] == [[*ways, "lookahead"], ways]
    assert [texts for _, texts in seen] == [[[i] for i in range(4, 20)]] * 2
    assert racing["lookahead"] is decide["lookahead"]
    assert racing["lookahead"].gamma_max == own["lookahead"].gamma_max == 2
    assert isinstance(racing["dear"], Autoregressive)
    assert race.drafts_nothing(decide["dear"])
    assert own["dear"].round_times(3).tolist() == [1.0] * 4
    config.timed_inputs = 15  # none of these is tried
    race.prefer(on, made)
    assert seen[-1][1] == [[i] for i in range(15, 20)]


def test_costs_over_a_race():
    """Their mean, by which replay predicts; and how much dearer the longest round became, in plain
    tokens, of a method's own loop or of the shared one."""
    before = {"policies": Costs(0.5, [1.0, 1.5], token=1.0), "γ=1": Costs(0.5, [1.0, 1.5])}
    after = {"policies": Costs(0.5, [1.0, 2.5], token=2.0), "γ=1": Costs(1.0, [1.0, 2.0])}
    between = mean(before["policies"], after["policies"])
    assert (between.verify.tolist(), between.token.item()) == ([1.0, 2.0], 1.5)
    assert race.drift(before, after, "γ=1") == pytest.approx(0.5)
    assert race.drift(before, after, "svip") == pytest.approx(-0.25)


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
        "    config.repeats, config.cost_repeats = 2, 1\n"
        "    config.cost_error = 1e-6 if seed == 'strict' else 1e6\n"
        "    config.seed = int(seed.replace('strict', '0'))\n"
        "    return config\n"
    )
    return file


@pytest.mark.slow
def test_a_race(pair, config_file, tmp_path, monkeypatch, capsys):
    """Rows, report and figures; an interrupted race runs again; without a head there is none."""
    examples = [tasks.Example(f"{text} $[b]$", text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    work = tmp_path / "work"
    flags = f"--config={config_file}", f"--workdir={work}"
    command = functools.partial(command_line.run, monkeypatch, capsys, "experiments.adaptive")
    width = pair.draft.config.d_model
    params = acceptance_head.init(jax.random.key(0), width)
    file = tmp_path / "head.npz"
    acceptance_head.save(file, params)
    monkeypatch.setattr("experiments.adaptive.race.head_file", lambda on, draft: file)
    outcome = command(*flags)
    assert outcome.status == 0, outcome.stderr
    lines = (work / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["method"] for row in rows] == ["γ=1", "γ=2", "goodput", "head", "svip"]
    for row in rows:
        assert row["identical"] is True
        assert row["tau"] == row["tokens"] / row["target_calls"]
        assert row["draft_calls"] >= row["verified"] >= row["accepted"]
        assert row["speedup_decode_low"] <= row["speedup_decode"] <= row["speedup_decode_high"]
        assert row["replayed_speedup"] > 0
        assert row["predicted"] == pytest.approx(row["replayed_speedup"])  # all inputs are timed
        own = row["static"] or row["method"] == "goodput"  # which gets its own
        assert list(row["costs"]) == ["policies", row["method"]][: 1 + own]
        if row["method"] == "goodput":  # the same passes, and decisions besides
            shared, own_times = (Costs(**table).round_times(2) for table in row["costs"].values())
            assert np.all(own_times >= shared)
        assert row["costs"]["policies"]["error"] == row["cost_error"] > 0
        assert row["replayed_speedup"] <= row["oracle_speedup"] * (1 + 1e-6)
    by = {row["method"]: row for row in rows}
    first = by["γ=1"]
    assert first["draft_calls"] == first["verified"]
    was, now = (Costs(**first[when]["γ=1"]) for when in ("costs", "costs_after"))
    between = mean(was, now)  # replay is by
    full = [(table.round_times(1)[1] / table.token).item() for table in (was, now)]
    assert first["cost_drift"] == pytest.approx(full[1] / full[0] - 1, rel=1e-3) != 0
    drafted, outputs = first["verified"], first["timed_inputs"]
    rounds = np.dot(between.round_times(1), [first["target_calls"] - drafted, drafted])
    took = rounds + outputs * between.call
    plain = first["tokens"] * between.token + outputs * between.plain_call
    assert first["predicted"] == pytest.approx(float(plain / took), rel=1e-4)
    assert by[by["γ=1"]["best_static"]]["of_best"] == 1
    report = (work / "report.md").read_text()
    for name in re.findall(r"\]\(([\w/.]+)\)", report):
        assert (work / name).stat().st_size > 0, name
    assert {path.name for path in work.iterdir()} == {
        "results.jsonl", "report.md", "report.tex", "speedups.png", "run.json",
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
    poor = command(f"--config={config_file}:strict", f"--workdir={tmp_path / 'poor'}")
    assert (poor.status, poor.stderr.count("nothing is raced")) == (1, 1)
    assert not (tmp_path / "poor" / "results.jsonl").exists()


def repeats(**seconds):
    """Methods that took so long for their only token, repeat by repeat."""
    took = {name: np.array(each, float)[:, None] for name, each in seconds.items()}
    rows = {name: [[Row(0, 0, "", [1], 1, 0, 0, 0, [], [])]] for name in took}
    return Comparison(took, {name: 2 * each for name, each in took.items()}, rows, {})


def test_the_best_static_length_is_chosen_on_other_repeats():
    """γ=2 is fastest where it is chosen, in repeats 0, 2 and 4, and slower where it is compared:
    the comparison, and all speedups, are of repeats 1, 3 and 5 alone."""
    took = {PLAIN: [10, 12] * 3, "γ=1": [5, 6] * 3, "γ=2": [4, 8] * 3, "svip": [1, 6] * 3}
    timed = repeats(**took)
    best, early, rest = choose(timed, ["γ=1", "γ=2"])
    assert best == "γ=2"
    assert early == {PLAIN: 1, "γ=1": 2, "γ=2": 2.5, "svip": 10}
    assert rest.decode["γ=2"].tolist() == [[8], [8], [8]]
    assert rest.whole["γ=2"].tolist() == [[16], [16], [16]]
    assert rest.speedups("svip") == {
        f"speedup_{kind}": 2 for kind in ("decode", "decode_low", "decode_high", "end_to_end")
    }
    assert interval("of_best", rest, "γ=1", over=best)["of_best"] == pytest.approx(8 / 6)
    # Ratios within a repeat: what slows one repeat down does not count.
    slow = {PLAIN: [10, 12, 100, 12, 10, 12], "γ=1": [5, 6, 50, 6, 5, 6],
            "γ=2": [4, 8, 60, 8, 4, 8]}  # fmt: skip
    assert choose(repeats(**slow), ["γ=1", "γ=2"])[0] == "γ=2"
    with pytest.raises(ValueError, match="repeats must be ≥ 2"):
        choose(timed.part(slice(1)), ["γ=1"])


def test_intervals_are_over_inputs():
    """Four inputs, of which half take twice as long without a draft and half three times. A repeat
    in which the machine was slow changes nothing."""
    plain = np.array([[2, 2, 3, 3], [2, 2, 3, 3], [20, 20, 30, 30]], float)
    ones = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], float)
    timed = Comparison({PLAIN: plain, "a": ones}, {}, {}, {})
    found = interval("speedup", timed, "a", over=PLAIN)
    assert found == {"speedup": 2.5, "speedup_low": 2.0, "speedup_high": 3.0}
    fastest = interval("speedup", timed.part(slice(1, None)), "a", over=PLAIN, typical=np.min)
    assert fastest == {"speedup": 2.5, "speedup_low": 2.0, "speedup_high": 3.0}
    median = interval("speedup", timed.part(slice(1, None)), "a", over=PLAIN)
    assert median["speedup"] == 13.75
    assert interval("same", timed, "a", over="a") == dict.fromkeys(
        ("same", "same_low", "same_high"), 1.0
    )


def test_what_is_closed():
    """Half of 1/1.25 − 1/2 is saved at 1/.65; None where the gap is within the noise."""
    still = {"speedup_decode": 1.25}
    row = {"speedup_decode": 1 / 0.65, "of_best_low": 1.1, "of_best_high": 1.3}
    assert closed(still, row, 2.0) == pytest.approx(0.5)
    assert closed(still, row, 1.25 * 1.09) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma_max": 2}, r"static=\(.*\) has 3, and gamma_max=2 allows 2 at most"),
        ({"widths": (1, 40)}, r"widths=\(1, 40\) has 40, and gamma_max=\d+ allows"),
        ({"timed_inputs": 0}, "timed_inputs=0 must be a whole number ≥ 1"),
        ({"cost_tries": 0}, "cost_tries=0 must be a whole number ≥ 1"),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    """Nothing is loaded or measured before."""
    config = adaptive.get_config("quick")
    race.check(config)
    with config.unlocked():
        config.update(fields)
    with pytest.raises(ValueError, match=message):
        race.check(config)


def row_of(method, speedup, of_best, closed=None, **changes):
    """A row of a race in which γ=3 is the best static length."""
    spread = {"speedup_decode": speedup, "of_best": of_best}
    table = Costs(0.1, [1.0] * 6, error=0.012, largest_error=0.2, drop=0.034)
    return {
        "draft": "families/x/draft", "temperature": 0.0, "method": method, "alpha": 0.8,
        "static": method.startswith("γ"), "best_static": "γ=3", "closed": closed,
        "closed_timed": closed, "oracle_timed": 2.0, "oracle_speedup": 2.0,
        "replayed_speedup": speedup, "predicted": speedup, "identical": True,
        "tokens": 30, "timed_inputs": 2, "c": 0.1, "costs": {"policies": table.as_row()},
        "target_calls": 10, "verified": 30, "accepted": 20, "speedup_choosing": speedup,
        **spread, **{f"{name}_{end}": value + by for name, value in spread.items()
                     for end, by in (("low", -0.02), ("high", 0.02))},
        **changes,
    }  # fmt: skip


def table(section):
    return [[cell(dict(row)) for _, cell in section.columns] for row in section.rows]


def test_a_policy_in_each_race():
    """A line for each race that it was in, with the lengths that raced there, and what decoded in
    its place."""
    first = [row_of("γ=3", 1.2, 1.0), row_of("γ=10", 1.1, 0.9), row_of("svip", 1.3, 1.08, 0.4)]
    plain = {"temperature": 1.0, "plain": True, "closed": None, "closed_timed": None}
    second = [row_of("γ=3", 0.9, 1.0), row_of("svip", 1.0, 1.11)]
    second = [{**row, **plain} for row in second]
    third = [row_of(name, 1.4, 1.0, draft="b", fixed=2) for name in ("γ=3", "svip")]
    without = [row_of("γ=3", 0.9, 1.0, draft="c"), row_of("ucb", 0.9, 1.0, draft="c")]
    rows = [*first, *second, *third, *without]
    found = board.sections(rows, "svip")
    own = next(section for section in found if section.title == "svip in each race")
    assert [(row[0], row[1], *row[3:7], row[9]) for row in table(own)] == [
        ("draft, T=0", "3 10", "3", "1.20", "1.30 (1.28–1.32)", "1.08 (1.06–1.10)", "40%"),
        ("draft, T=1", "3", "3", "0.90", "1.00 (0.98–1.02) †", "1.11 (1.09–1.13)", "–"),
        ("b, T=0", "3", "3", "1.40", "1.40 (1.38–1.42) ‡ 2", "1.00 (0.98–1.02)", "–"),
    ]
    assert "svip in each race" not in [s.title for s in board.sections(without, "svip")]


def test_words():
    """A policy ahead, one level within the interval, and one behind: each is named."""
    still = row_of("γ=3", 1.2, 1.0, 0.0)
    ahead, behind = row_of("svip", 1.3, 1.08, 0.4), row_of("ucb", 1.0, 0.9, -0.2)
    slow = {"temperature": 1.0}
    other = [row_of("γ=3", 0.9, 1.0, 0.0, **slow), row_of("ucb", 0.89, 0.99, -0.1, **slow)]
    first, *rest = board.sections([still, ahead, behind, *other])
    assert len(rest) == 2  # the second race has one policy: there is no table of all
    other.append(row_of("hedge", 0.8, 0.89, -0.2, **slow))
    _, every, *rest = board.sections([still, ahead, behind, *other])
    assert first.words == (
        "The best policy is at least level with the best static γ everywhere, within the "
        "intervals. It is ahead by more than the interval for draft, T=0. The largest share of "
        "the gap to the oracle that is closed in replay: svip: 40% (draft, T=0). No static γ is "
        "worth its time for draft, T=1. The clock is within 10% of what replay predicts for 3 of 3 "
        "policies; the farthest is svip with draft, T=0: +0%."
    )
    assert [section.title for section in rest] == ["draft, T=0", "draft, T=1"]
    assert table(every) == [
        ["ucb", "0.90", "0.99", "0.94", "0.89"],
        ["svip", "1.08", "–", "–", "1.30"],
        ["hedge", "–", "0.89", "–", "0.80"],
    ]
    assert [name for name, _ in every.columns][1:3] == ["draft, T=0", "draft, T=1"]
    assert [row["method"] for row in rest[0].rows] == ["svip", "γ=3", "ucb"]
    assert "Slower than γ=3, by more than the interval: ucb." in rest[0].words
    assert "1.2% from its cost in the middle and at most 20%" in rest[0].words
    words = "in tokens of plain decoding: 1 drafted: 1.10; 3 drafted: 1.30; 5 drafted: 1.50."
    assert words in rest[0].words
    # A policy that was lucky in the figures that are shown is not the best for that.
    lucky = row_of("exp3", 1.5, 1.25, -0.3, speedup_choosing=1.25)
    assert board.best([still, ahead, lucky])["method"] == "svip"
    assert board.still([row_of("γ=5", 1.9, 1.5), still])["method"] == "γ=3"
    lost = board.sections([still, behind])[0].words
    assert lost.startswith("The best policy is behind the best static γ for draft, T=0.")
    # An interval that reaches far below 1 says nothing; costs that fit poorly are named.
    wide = {**ahead, "of_best_low": 0.58, "of_best_high": 1.66, "cost_error": 0.21}
    unknown = board.sections([still, wide])[0].words
    assert unknown.startswith("Too little was measured to compare the best policy with the best")
    assert "draft, T=0 (1.08 (0.58–1.66))" in unknown
    assert "at least level" not in unknown
    assert "off by 21% for a typical call" in unknown
    # Nothing follows from the timings of a busy machine.
    first, second = board.sections([still, {**behind, "load_per_core": 4.5}])
    assert first.words.startswith("The machine was busy: a load average of up to 4.5")
    assert "best policy" not in first.words
    assert "Slower than" not in second.words
    missed = board.sections([still, {**ahead, "predicted": 1.5}, behind])[0].words
    assert missed.endswith("for 1 of 2 policies; the farthest is svip with draft, T=0: -13%.")
    nothing = board.sections([still, {**ahead, "closed": None}])[0].words
    assert "largest share" not in nothing
    less = board.sections([still, {**ahead, "closed": None}, *other[:2]])[0].words
    assert "closed in replay: ucb: -10% (draft, T=1)" in less
    wrong = board.sections([still, {**ahead, "identical": False}])[1].words
    assert "DIFFER from plain decoding: svip" in wrong


def test_a_panel_for_each_race():
    """Policies as rows, the slowest below, each with its interval; lines at 1, the best γ and the
    oracle. A policy that was not in a race has no mark there."""
    races = [
        [row_of("γ=3", 1.2, 1.0), row_of("svip", 1.1, 0.9), row_of("ucb", 1.3, 1.1)],
        [row_of("γ=3", 1.4, 1.0, draft="b"), row_of("svip", 1.5, 1.07, draft="b")],
    ]
    figure = pictures.draw_panels(races)
    first, second = (axes for axes in figure.axes if axes.axison)
    assert [label.get_text() for label in first.get_yticklabels()] == ["svip", "ucb"]
    dots = [line for line in first.lines if line.get_marker() == "o"]
    assert [(d.get_xdata()[0], d.get_ydata()[0]) for d in dots] == [(1.1, 0), (1.3, 1)]
    spans = [line for line in first.lines if len(set(line.get_ydata())) == 1]
    assert [list(line.get_xdata()) for line in spans if len(line.get_xdata()) == 2] == [
        [pytest.approx(1.08), pytest.approx(1.12)], [pytest.approx(1.28), pytest.approx(1.32)],
    ]  # fmt: skip
    upright = [line.get_xdata()[0] for line in first.lines if list(line.get_ydata()) == [0, 1]]
    assert upright == [1, 1.2, 2.0]
    assert len([line for line in second.lines if line.get_marker() == "o"]) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_small_race_fits_its_picture(count):
    """Title, labels and legend lie within the figure, and names of policies below one another."""
    names = ["γ=3", "mypolicy:Ewma", "mypolicy2:LogProduct", *(f"policy{i}" for i in range(9))]
    race = [row_of(name, 1.2, 1.0 - i / 50) for i, name in enumerate(names)]
    figure = pictures.draw_panels([race] * count)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [label for label in figure.axes[0].get_yticklabels() if label.get_text()]
    titles = [axes.title for axes in figure.axes]
    for part in (*figure.texts, *figure.legends, *titles, *labels):
        box = part.get_window_extent(canvas.get_renderer())
        assert box.x0 >= 0, part
        assert box.y0 >= 0, part
        assert box.x1 <= figure.bbox.x1, part
        assert box.y1 <= figure.bbox.y1, part
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
    assert all(low.y1 <= high.y0 + 2 for low, high in itertools.pairwise(boxes))
