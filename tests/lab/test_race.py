"""The race: real rounds, real times, and what is shown of them."""

import jax
import pytest
from PIL import Image

import specjax
from experiments.figure1 import TracedRound
from experiments.race import __main__ as command
from experiments.race import recording
from experiments.race.recording import Moment, Side
from pairs import TEXTS
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.sampling import Sampling

BUDGET = 12


@pytest.fixture(scope="module")
def sides(pair):
    methods = {
        "plain": building.plain(pair.target, Sampling(0.0)),
        "speculative": building.build(pair.target, pair.draft, gamma=3, sampling=Sampling(0.0)),
    }
    sources = tokenize(pair.target, TEXTS[:3])
    options = {"max_new_tokens": BUDGET, "key": jax.random.key(0), "repeats": 1}
    return [
        recording.record(name, one, pair.target, sources, **options)
        for name, one in methods.items()
    ]


def test_rounds_are_those_of_generate(sides, pair):
    """As many rounds and tokens as both loops have, and the texts that come out."""
    for side, draft in zip(sides, (None, pair.draft), strict=True):
        result = specjax.generate(pair.target, draft, TEXTS[:3], gamma=3, max_new_tokens=BUDGET)
        rounds = [moment for moment in side.moments if moment.pieces]
        assert [
            sum(m.source == i for m in rounds) for i in range(3)
        ] == result.target_calls.tolist()
        assert side.tokens == sum(result.emitted)
        for index, text in enumerate(result.texts):
            kept = [piece for m in rounds if m.source == index for piece, kind in m.pieces
                    if kind != "rejected"]  # fmt: skip
            assert "".join(kept) == text
    kinds = {kind for moment in sides[1].moments for _, kind in moment.pieces}
    assert kinds == {"accepted", "rejected", "corrected"}
    assert {kind for m in sides[0].moments for _, kind in m.pieces} == {"corrected"}


def test_a_race_with_trees(pair):
    """What is shown is what is kept."""
    how = {"gamma": 1, "sampling": Sampling(0.0), "tree": "fixed(2, 1)"}
    method = building.build(pair.target, pair.draft, **how)
    sources = tokenize(pair.target, TEXTS[:1])
    options = {"max_new_tokens": BUDGET, "key": jax.random.key(0), "repeats": 1}
    side = recording.record("trees", method, pair.target, sources, **options)
    pieces = [piece for moment in side.moments for piece in moment.pieces]
    (text,) = specjax.generate(pair.target, None, TEXTS[:1], max_new_tokens=BUDGET).texts
    assert "".join(piece for piece, _ in pieces) == text
    assert {kind for _, kind in pieces} == {"accepted", "corrected"}


def test_time_runs_forward(sides):
    for side in sides:
        seconds = [moment.seconds for moment in side.moments]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert len(set(seconds)) == len(seconds)


def test_rounds_are_scaled_to_the_loops_own_time(pair, monkeypatch):
    """Medians of runs after the first: starts of .5 s, loops of 2 s, rounds stepped in 1 and 3."""
    rounds = [TracedRound([], [], [5]), TracedRound([6], [7], [8])]
    runs = [(9.0, 9.0, [9.0, 9.0], rounds)] + [
        (0.5 + off, 2.0 + off, [1.0 + off, 3.0 + off], rounds) for off in (-0.1, 0.0, 0.1)
    ]
    given = iter(runs * 2)
    monkeypatch.setattr(recording, "_timed", lambda *_: next(given))
    method = building.plain(pair.target, Sampling(0.0))
    options = {"max_new_tokens": BUDGET, "key": jax.random.key(0), "repeats": 3}
    side = recording.record("made", method, pair.target, [[3, 1], [4, 1]], **options)
    assert [m.seconds for m in side.moments] == pytest.approx([0.5, 1.0, 2.5, 3.0, 3.5, 5.0])
    assert [m.tokens for m in side.moments] == [0, 1, 3, 3, 4, 6]


MADE = Side(
    "made",
    [
        Moment(1.0, 0, [], 0),
        Moment(2.0, 0, [("abc", "accepted"), ("X", "rejected"), ("d", "corrected")], 4),
        Moment(4.0, 1, [], 4),
        Moment(5.0, 1, [("e\nf", "corrected")], 7),
    ],
)


def test_what_is_on_the_screen():
    assert recording.screen(MADE, 0.5, 3, 9) == []
    assert recording.screen(MADE, 2.0, 3, 9) == [
        [("abc", "accepted")],
        [("X", "rejected"), ("d", "corrected")],
    ]
    assert recording.screen(MADE, 9.0, 3, 2) == [
        [("e", "corrected")],
        [("f", "corrected")],
    ]


def test_spaces_at_the_edges_of_tokens_are_visible():
    pieces = [(") ", "rejected"), (")", "corrected"), (" a b", "accepted")]
    side = Side("spaces", [Moment(1.0, 0, [*pieces, (":\n  ", "corrected")], 3)])
    assert recording.screen(side, 1.0, 80, 9) == [
        [(")␣", "rejected"), (")", "corrected"), ("␣a b", "accepted"), (":", "corrected")],
        [("  ", "corrected")],
    ]
    figure = command.blank()
    command.draw(figure, [side, side], 1.0, "a pair", 5.0)
    drawn = {text.get_text() for text in figure.axes[0].texts}
    assert {")␣", "␣a b", "␣ a space at a token's edge"} <= drawn


def test_the_animation_says_what_was_gained():
    """Bars have the share of all tokens; at the end the faster side shows the factor."""
    fast = Side("fast", [Moment(1.0, 0, [("abc", "accepted")], 3), Moment(2.0, 0, [], 4)])
    assert recording.share(MADE, 0.5) == 0
    assert recording.share(fast, 1.5) == 0.75
    assert command.captions([MADE, fast], 1.5)[1] == "speculative: a draft, checked by the target"
    assert command.captions([MADE, fast], 2.0)[1] == "done: 2.50 times as fast"


def test_the_outcome():
    fast = Side("fast", [Moment(2.0, 0, [("abc", "accepted")], 7)])
    assert recording.outcome([MADE, fast]).endswith(
        "fast: 2.00 s, 7 tokens, 4 tokens/s. 2.50 times as fast."
    )


def test_an_animation(sides, tmp_path, monkeypatch):
    """All frames, and no half-written file beside it."""
    monkeypatch.setattr(command, "FRAMES_PER_SECOND", 2)
    monkeypatch.setattr(command, "GIF_SECONDS", 2.0)
    (tmp_path / "race.gif").write_bytes(b"an older one")
    assert command.save(tmp_path / "race.gif", sides, "a pair") == 2.0
    with Image.open(tmp_path / "race.gif") as image:
        assert image.n_frames > 3
        assert image.size[0] > image.size[1]
        image.seek(image.n_frames - 1)
        colours = {colour for _, colour in image.convert("RGB").getcolors()}
    assert (0xC6, 0x28, 0x28) in colours  # rejected, as it is
    assert len(colours) <= 20
    assert [path.name for path in tmp_path.iterdir()] == ["race.gif"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inputs=0"], "--inputs=0 must be ≥ 1"),
        (["--slow=0"], "--slow=0 a number above 0"),
        (["--slow=nan"], "--slow=nan a number above 0"),
        (["--slow=inf"], "--slow=inf a number above 0"),
        (["--save=race.mp4"], "--save=race.mp4 must end in .gif"),
    ],
)
def test_wrong_flags(arguments, message, monkeypatch, capsys):
    import command_line

    outcome = command_line.run(monkeypatch, capsys, "experiments.race", *arguments)
    assert outcome.status == 1
    assert message in outcome.stderr
