"""Figure 1: traces of a run, in the terminal and as pictures; bars of measured tables."""

import math
import warnings

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from experiments import figure1
from experiments.figure1 import Branch, TracedRound, branches, trace
from experiments.reproduce import figures
from pairs import EOS_IDS, TEXTS, make_tokenizer
from specjax import loop
from specjax.decoding import building, starting
from specjax.decoding.outputs import read_rows
from specjax.decoding.texts import tokenize
from specjax.rounds import Round
from specjax.sampling import Sampling
from specjax.trees.nodes import Nodes
from tiny_models import slow

BUDGET = 24


@pytest.fixture(scope="module", params=[slow(0.0), 1.0])
def traced(pair, request):
    """For some texts, their rounds and their row as the jitted loop gives it, in a batch of 8."""
    method = building.build(pair.target, pair.draft, gamma=4, sampling=Sampling(request.param))

    def prepare():
        return starting.prepare(
            method,
            pair.target,
            tokenize(pair.target, TEXTS),
            [(i, 0) for i in range(8)],
            max_new_tokens=BUDGET,
            key=jax.random.key(2),
            rows=8,
        )

    state = loop.decode(method, *prepare())
    rows = read_rows(state, [(i, 0) for i in range(8)], pair.target)
    return [(trace(method, *prepare(), row=i), rows[i]) for i in (0, 2, 6)]


def test_a_trace_is_the_run(traced):
    for rounds, row in traced:
        tokens = [token for r in rounds for token in r.accepted + r.next_token]
        assert tokens == row.tokens
        assert len(rounds) == row.target_calls
        assert sum(len(r.accepted) for r in rounds) == row.accepted
        emitted = 0
        for r in rounds[:-1]:
            assert len(r.accepted + r.rejected) == min(4, BUDGET - emitted - 1)
            emitted += len(r.accepted + r.next_token)
        for r in rounds:
            ended = bool(r.accepted) and r.accepted[-1] in EOS_IDS
            assert len(r.next_token) == (0 if ended else 1)
            assert not (ended and r.rejected)


@pytest.fixture(
    scope="module", params=[(1.0, "fixed(3, 2)"), slow(((0.0, "best_first(2, 3, 6)"),))]
)
def traced_trees(pair, request):
    """As `traced`, of two texts and with trees."""
    temperature, tree = request.param
    method = building.build(
        pair.target, pair.draft, gamma=4, sampling=Sampling(temperature), tree=tree
    )

    def prepare():
        ids, labels = tokenize(pair.target, TEXTS[:2]), [(0, 0), (1, 0)]
        key = jax.random.key(2)
        return starting.prepare(
            method, pair.target, ids, labels, max_new_tokens=BUDGET, key=key, rows=2
        )

    state = loop.decode(method, *prepare())
    rows = read_rows(state, [(0, 0), (1, 0)], pair.target)
    return method.slots - 1, [(trace(method, *prepare(), row=i), rows[i]) for i in range(2)]


def test_a_trace_of_trees_is_the_run(traced_trees):
    """Each node of each round once: on the accepted path, or in a branch that leaves it."""
    size, runs = traced_trees
    branched = 0
    for rounds, row in runs:
        assert [token for r in rounds for token in r.accepted + r.next_token] == row.tokens
        counts = [len(r.accepted) + sum(len(b.tokens) for b in r.branches) for r in rounds]
        ended = not rounds[-1].next_token
        assert row.verified - (size if ended else 0) <= sum(counts) <= row.verified
        assert counts[0] == (size if len(rounds) > 1 else counts[0])
        for r in rounds:
            assert r.rejected == []
            for behind, tokens in r.branches:
                branched += 1
                known = len(behind) + 1
                assert [*behind, tokens[0]] != r.accepted[:known]
    assert branched > 10


def test_branches_of_a_tree():
    """What leaves the path last comes first; what was not submitted, or lies behind an EOS, never
    happened."""
    parent = np.array([[0, 0, 0, 1, 1, 3, 2, 0, 2]])
    tokens = np.tile(10 * np.arange(1, 9), (2, 1))
    submitted = np.ones((2, 8), bool)
    submitted[1, 6] = False  # node 7
    nodes = Nodes(tokens, parent, None, submitted, None, None)
    round_ = Round(**dict.fromkeys(Round._fields) | {"nodes": nodes, "node": np.array([2, 3])})
    early = [Branch([10], [40]), Branch([], [20, 60]), Branch([20], [80])]
    assert branches(round_, 2, row=1) == early
    assert branches(round_, 3, row=1) == [Branch([10, 30], [50]), *early]
    assert [branch.tokens for branch in branches(round_, 1, row=0)] == [[10, 30, 50], [40], [70]]


WORDS = ["the", "new", "bridge", "road", "old", "house", "a", "law"]
OF_A_TREE = TracedRound(
    [0, 1], [], [2], [Branch([0, 1], [3]), Branch([0], [4, 5]), Branch([], [6, 7])]
)


def words(ids):
    return "".join(f" {WORDS[i]}" for i in ids)


@pytest.mark.parametrize(
    ("most", "beneath"),
    [
        (3, "            ␣road\n        ␣old␣house\n    ␣a␣law\n"),
        (2, "            ␣road\n    … 2 more\n"),
    ],
)
def test_branches_stand_where_they_begin(most, beneath):
    """In a terminal and in a picture, beneath the lines of their rounds."""
    lines = figure1.spans([OF_A_TREE, OF_A_TREE], words, most)
    kept = [[piece for piece in line if piece[1] in ("accepted", "corrected")] for line in lines]
    assert kept == [[(" the", "accepted"), (" new", "accepted"), (" bridge", "corrected")]] * 2
    printed = figure1.coloured(lines).plain
    legend = "    accepted, rejected, the target's own, ␣: a space at a token's edge\n"
    own = "␣the␣new␣bridge\n"
    assert printed == f"  1 {own}{beneath}  2 {own}{beneath}{legend}"
    figure = figure1.draw(lines, "title")
    found = {text.get_text(): text.get_position() for text in figure.axes[0].texts[6:]}
    assert found["␣road"][0] == 5 + len(" the new")
    heights = [text.get_position()[1] for text in figure.axes[0].texts[6:] if text.get_text()]
    assert heights == sorted(heights)
    assert figure.get_figheight() > figure1.draw([kept[0]] * 2, "title").get_figheight()


def test_spans_join_to_the_decoded_text(traced):
    decode = make_tokenizer().decode
    for rounds, row in traced:
        lines = figure1.spans(rounds, decode)
        kept = [piece for line in lines for piece, kind in line if kind != "rejected"]
        assert "".join(kept) == decode(row.tokens)
        assert len(kept) == row.emitted
        for line, round_ in zip(lines, rounds, strict=True):
            kinds = ["accepted"] * len(round_.accepted)
            kinds += ["rejected"] * bool(round_.rejected) + ["corrected"] * len(round_.next_token)
            assert [kind for _, kind in line] == kinds


def test_pieces_of_one_character():
    """é is two tokens here and € three; half of one shows in a rejected piece."""
    tokenizer = make_tokenizer()

    def ids(text):
        return tokenizer(text)["input_ids"][:-1]

    (e1, e2), (u1, u2, u3) = ids("é"), ids("€")
    rounds = [
        TracedRound([e1], [u1, u2], [e2]),
        TracedRound([u1, u2], [e1], [u3]),
        TracedRound([], [], [e1]),
    ]
    assert figure1.spans(rounds, tokenizer.decode) == [
        [("", "accepted"), ("��", "rejected"), ("é", "corrected")],
        [("", "accepted"), ("", "accepted"), ("��", "rejected"), ("€", "corrected")],
        [("�", "corrected")],
    ]
    assert figure1.spans([], tokenizer.decode) == []


STRANGE = "a\n\t\x07\x1b[31m$x$ {$\\frac$} [b] \u200b\u202e中😀�é"


def test_spaces_at_a_tokens_edge_are_visible():
    """A rejected `)` and the `) ` in its place differ, and both say so in a legend."""
    assert figure1.token_text("  a b ") == "␣␣a b␣"
    assert figure1.token_text(" ") == "␣"
    assert figure1.token_text("") == ""
    assert figure1.token_text("\t)\n") == "→)↵"
    lines = [[("x y", "accepted"), (")", "rejected"), (") ", "corrected")]]
    terminal = figure1.coloured(lines).plain
    picture = [text.get_text() for text in figure1.draw(lines, "title").axes[0].texts]
    assert terminal.startswith("  1 x y))␣\n")
    assert picture[-3:] == ["x y", ")", ")␣"]
    for found in (terminal, picture):
        assert any("␣: a space at a token's edge" in text for text in [found, *found])


def test_a_terminal_gets_nothing_unprintable():
    lines = [[(STRANGE, "accepted"), ("[/b]", "rejected")], [("$", "corrected")]]
    text = figure1.coloured(lines)
    assert text.plain.count("\n") == 3  # and a legend
    assert all(c.isprintable() for c in text.plain.replace("\n", ""))
    assert "[b]" in text.plain
    assert "[/b]" in text.plain
    styles = [str(span.style) for span in text.spans]
    assert f"{figure1.COLOURS['rejected']} strike" in styles
    assert figure1.printable("a\n\tb\x07") == "a↵→b�"


@pytest.mark.filterwarnings("error")
def test_a_picture_of_any_text(tmp_path):
    """No warning of a missing glyph, no mathematics, and no character that vanishes."""
    lines = [[(c, "accepted") for c in STRANGE], [(STRANGE, "rejected"), (STRANGE, "corrected")]]
    figure = figure1.draw(lines, STRANGE)
    figure.savefig(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert any("$x$" in text and "↵→��[31m" in text for text in drawn)
    assert max(map(len, drawn)) == len(STRANGE)


def test_pieces_lie_side_by_side():
    """Each piece ends where the next begins, within a tenth of a character."""
    figure = figure1.draw([[("long enough " * 5, "accepted"), ("x", "corrected")]], "")
    figure.set_dpi(160)
    first, second = figure.axes[0].texts[-2:]
    to_data = figure.axes[0].transData.inverted()
    renderer = FigureCanvasAgg(figure).get_renderer()
    end = to_data.transform(first.get_window_extent(renderer).get_points())[1]
    assert abs(end[0] - second.get_position()[0]) < 1.5  # the last character is a space
    per_character = (end[0] - first.get_position()[0]) / 59
    assert abs(per_character - 1) < 0.02


def test_a_long_trace_is_cut_and_what_is_rejected_is_struck():
    """The legend too; calls beyond `MAX_CALLS` are counted."""
    figure = figure1.draw([[("no", "rejected"), ("yes", "corrected")]] * 44, "title")
    axes = figure.axes[0]
    assert sum(text.get_text() == "yes" for text in axes.texts) == figure1.MAX_CALLS
    assert axes.texts[-1].get_text() == "… 4 more calls"
    assert len(axes.lines) == 1 + figure1.MAX_CALLS


SETTING = "draft-small, γ=10, T=0: 62 tokens"


def test_a_trace_says_what_was_run():
    """It takes no room where it is not given."""
    lines = [[("a", "accepted")]]
    said, silent = figure1.draw(lines, "x", SETTING), figure1.draw(lines, "x")
    assert SETTING in [text.get_text() for text in said.axes[0].texts]
    assert said.get_figheight() > silent.get_figheight()


def test_speedups_and_tables(tmp_path):
    """Bars are what was measured, with whiskers; predictions are marks."""
    row = {
        "predicted_paper": 3.5, "predicted": 1.3, "speedup_decode": 1.4, "speedup_end_to_end": 1.2,
        "speedup_decode_low": 1.35, "speedup_decode_high": 1.5,
    }  # fmt: skip
    near = row | {"predicted_paper": 1.1, "predicted": None, "speedup_decode": 1.45}
    labels = ["small\nT=0 γ=4", "a/long-name-of-a-draft T=1"]
    figure = figures.draw_speedups([row, near], labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "speedups.png")
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.4, 1.45, 1.2, 1.2]
    # The axis ends above the largest measurement, which the paper's formula exceeds by far.
    assert 1.5 < axes.get_ylim()[1] < 1.8
    whiskers = [path.vertices[:, 1] for path in axes.collections[0].get_paths()]
    assert whiskers[0].tolist() == pytest.approx([1.35, 1.5])
    marks = {line.get_marker(): list(line.get_ydata()) for line in axes.lines}
    assert marks["_"] == pytest.approx([1.3, math.nan], nan_ok=True)
    assert marks["D"] == pytest.approx([math.nan, 1.1], nan_ok=True)
    assert len(marks["^"]) == 1
    assert [text.get_text() for text in axes.texts] == ["3.5"]
    assert axes.get_xticklabels()[0].get_text() == "small\nT=0 γ=4"
    assert figure.legends[0].get_texts()[0].get_text().startswith("measured")
