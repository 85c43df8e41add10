"""The timeline of a run that is stepped phase by phase (Figure 5)."""

import jax
import jax.numpy as jnp
import pytest

from configs import adaptive, embedded
from experiments import figure1
from experiments.reproduce import timelines
from experiments.reproduce.timelines import Event, Timeline, timeline
from experiments.trace import __main__ as experiment
from specjax import loop
from specjax.autoregressive import Autoregressive
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from specjax.speculative import Speculative
from specjax.trees import fixed
from specjax.trees.speculative import TreeSpeculative
from table_models import inputs_of, random_table, repeat
from tiny_models import slow

GAMMA, BUDGET = 4, 24
EOS = jnp.int32([2])
ROWS = 3  # at T=1 an EOS ends one of them early
JITTED = (
    *(getattr(timelines, f"_{phase}") for phase in ("draft", "verify", "accept", "learn")),
    figure1.is_running,
)


@pytest.fixture(scope="module", params=[(0.0, 0), slow(((1.0, 0),)), slow(((1.0, 1),)), (1.0, 2)])
def timed(request):
    """For both loops: a row's timeline, how much was compiled before each run, the loop's state."""
    temperature, row = request.param
    target, draft = (random_table(seed, 6, dtype=jnp.float32) for seed in (1, 2))
    plain = Autoregressive(target, Sampling(temperature), EOS)
    drafter = ModelDrafter(draft)
    both = Speculative(
        target, drafter, Token(), constant(GAMMA), plain.sampling, EOS, gamma_max=GAMMA
    )
    found = {}
    for name, method in (("speculative", both), ("plain", plain)):
        compiled = []

        def prepare(method=method, compiled=compiled):
            compiled.append(sum(phase._cache_size() for phase in JITTED))
            return loop.start(
                method,
                repeat(inputs_of([[0, 1]], [[3, 4, 5]]), ROWS),
                row_keys(jax.random.key(0), jnp.arange(ROWS), jnp.zeros((ROWS,), jnp.int32)),
                jnp.full((ROWS,), BUDGET, jnp.int32),
                buffer_len=2 + BUDGET + GAMMA + 1,
            )

        run = timeline(method, prepare, row=row, repeats=2)
        state = loop.decode(method, *prepare())
        counts = jax.tree.map(lambda x: x[row].tolist(), state.stats)
        output = state.tokens[row, 2 : state.length[row]].tolist()
        found[name] = run, compiled, output, counts
    return found


@pytest.mark.parametrize("name", ["speculative", "plain"])
def test_a_stepped_run_is_the_loops(timed, name):
    run, _, output, counts = timed[name]
    assert run.tokens == output
    assert run.target_calls == counts.target_calls
    assert [event.round for event in run.events if event.phase in ("verify", "step")] == list(
        range(1, counts.target_calls + 1)
    )


def test_phases_and_their_tokens(timed):
    run, _, output, counts = timed["speculative"]
    phases = ["start", *["draft", "verify", "accept", "learn"] * counts.target_calls]
    assert [event.phase for event in run.events] == phases
    tokens = {phase: [e.tokens for e in run.events if e.phase == phase] for phase in phases}
    assert tokens["start"] == [2]
    assert sum(tokens["draft"]) == counts.verified
    assert set(tokens["verify"]) == {GAMMA + 1}
    assert sum(tokens["learn"]) == len(output)
    gained = [accepted + 1 for accepted in tokens["accept"]]
    assert tokens["learn"][:-1] == gained[:-1]
    assert tokens["learn"][-1] <= gained[-1]  # an EOS may cut the last

    run, _, output, _ = timed["plain"]
    assert [event.phase for event in run.events] == ["start", *["step"] * len(output)]


@pytest.mark.parametrize("name", ["speculative", "plain"])
def test_one_phase_at_a_time_and_none_compiled_while_timed(timed, name):
    run, compiled, *_ = timed[name]
    assert run.events[0].begin_ms == 0
    for before, after in zip(run.events, run.events[1:], strict=False):
        assert before.begin_ms < before.end_ms == after.begin_ms
    _, *later = compiled  # before both timed runs, and after
    assert len(later) == 3
    assert len(set(later)) == 1
    assert later[0] > 0


def test_gamma_max_is_the_configs():
    """Unless a flag says otherwise; and where neither does there is a default."""
    with_one = adaptive.get_config()
    assert with_one.gamma_max not in (3, experiment.GAMMA_MAX, None)
    assert experiment.longest(None, with_one) == with_one.gamma_max
    assert experiment.longest(3, with_one) == 3
    assert experiment.longest(None, embedded.get_config()) == experiment.GAMMA_MAX
    assert experiment.longest(0, with_one) == 0  # which is refused


def test_no_repeats():
    method = Autoregressive(random_table(1, dtype=jnp.float32), Sampling(0.0), EOS)
    with pytest.raises(ValueError, match="repeats=0 must be ≥ 1"):
        timeline(method, lambda: None, repeats=0)


def test_a_timeline_is_of_chains():
    target = random_table(1, dtype=jnp.float32)
    drafter, shape = ModelDrafter(target), fixed(2)
    of = Sampling(0.0), EOS, shape
    method = TreeSpeculative(target, drafter, Token(), constant(1), *of)
    with pytest.raises(ValueError, match='tree="chain"'):
        timeline(method, lambda: None)


def test_a_drawn_timeline(tmp_path):
    """A box for each phase, a part of it for each drafted token, and the calls in words."""
    spoken = Timeline(
        [
            Event("start", 0, 0.0, 2.0, 1),
            Event("draft", 1, 2.0, 5.0, 3),
            Event("verify", 1, 5.0, 6.0, 4),
            Event("accept", 1, 6.0, 6.5, 3),
            Event("learn", 1, 6.5, 7.0, 4),
            Event("draft", 2, 7.0, 7.5, 0),
            Event("verify", 2, 7.5, 8.5, 4),
        ],
        [5, 6, 7, 8, 9],
    )
    plain = Timeline([Event("start", 0, 0.0, 1.0, 1), Event("step", 1, 1.0, 3.0, 1)], [5])
    figure = timelines.draw([("γ = 3", spoken), ("plain", plain)])
    figure.savefig(tmp_path / "timeline.png")
    axes = figure.axes[0]
    boxes = [
        [(*path.get_extents().min, *path.get_extents().size) for path in drawn.get_paths()]
        for drawn in axes.collections
    ]
    assert len(boxes) == 9
    assert [box[0] for box in boxes[1]] == pytest.approx([2, 3, 4])
    assert [box[2] for box in boxes[1]] == pytest.approx([1, 1, 1])
    assert [len(parts) for parts in boxes] == [1, 3, 1, 1, 1, 1, 1, 1, 1]
    assert [text.get_text().strip() for text in axes.texts] == [
        "5 tokens, 2 target calls",
        "1 tokens, 1 target calls",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["γ = 3", "plain"]
    assert len(figure.legends[0].get_texts()) == 4
