"""The audit of somebody's sampler: every shipped case by its figure, faults, and bad input."""

import contextlib
import functools
import math
import re
import sys
import time

import numpy as np
import pytest

import command_line
from command_line import ROOT
from examples import algorithm1 as example
from specjax.audit import CASES, KINDS, Random, audit, auditing, findings, randomness
from specjax.audit.cases import algorithm1
from specjax.audit.randomness import Refused, outcomes
from specjax.cli.audit import of_cases, table

FIGURES = {
    "argmax_draft": 0.580000000,
    "top_k_on_one_side": 0.320000000,
    "noise_shared_with_the_draft": 0.089138756,
    "residual_from_p": 0.252000000,
    "noise_shared_by_positions": 0.167366730,
    "cut_to_the_smallest": 0.591200000,
    "peek_and_drop": 0.302814000,
    "budget_by_own_token": 0.165300000,
    "early_stop_by_own_token": 0.194400000,
    "global_maximum": 0.157113000,
    "temperature_lost": 0.622812838,
    "longest_path": 0.375724000,
}


@pytest.fixture(scope="module")
def audits():
    return of_cases()


@pytest.mark.parametrize("name", CASES)
def test_cases(name, audits):
    """Exact within 1e-12, or biased by its own figure."""
    found = audits[name]
    assert (found.exact, found.fault) == (CASES[name].exact, "")
    assert found.total_variation == pytest.approx(FIGURES.get(name, 0.0), abs=1e-6)
    assert CASES[name].exact == (name not in FIGURES)
    assert ("To check by hand" in str(found)) == (not found.exact)


def test_the_page_has_the_table(audits):
    page = (ROOT / "experiments" / "audit" / "README.md").read_text("utf-8")
    shown = re.search(r"<!-- cases -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown[1].strip() == table(audits)


@pytest.mark.parametrize(
    ("name", "table", "first_token"),
    [
        # p = (.6, .4), q = (.8, .2): token 0 is drafted always and kept with .75; else it is 1.
        ("argmax_draft", 1, [0.75, 0.25]),
        # Kept: min(p, q) = (.6, .2); the rest, .2, is drawn from p.
        ("residual_from_p", 1, [0.72, 0.28]),
        # q = (.2, .5, .3) is cut to (0, .625, .375); kept with (1, .6, 2/3), rejected with .375.
        ("top_k_on_one_side", 2, [0.375, 0.375, 0.25]),
    ],
)
def test_by_hand(name, table, first_token, audits):
    law = audits[name].findings[table].law
    np.testing.assert_allclose(law.sum(axis=tuple(range(1, law.ndim))), first_token, atol=1e-12)


def planted(verify, kind, *size):
    """An exact function of a kind; its output is wrong for one size (γ, V, rows)."""

    def wrong(drafts, draft_probs, *rest):
        tokens = verify(drafts, draft_probs, *rest)
        *rows, gamma, most = [1, *draft_probs.shape][-3:]
        if (gamma, most, *rows) == size:
            tokens = [0] if kind == "verify" else [*tokens[:-1], tokens[-1] * (drafts[-1][-1] > 0)]
        return tokens

    return wrong


@pytest.mark.parametrize(
    ("kind", "case", "size"),
    [
        ("verify", "algorithm1", (2, 4, 1)),
        ("verify", "algorithm1", (4, 2, 1)),
        ("lengths", "stop_before_the_draw", (3, 2, 2)),
        ("lengths", "stop_before_the_draw", (1, 2, 3)),
        ("lengths", "stop_before_the_draw", (2, 3, 2)),
    ],
)
def test_an_error_at_one_size(kind, case, size):
    found = audit(planted(CASES[case].function, kind, *size), kind)
    biased = {f.problem.size for f in found.findings if f.total_variation > 1e-3}
    assert biased == {size}


@pytest.mark.parametrize("kind", ["verify", "round", "batch", "lengths", "tree"])
@pytest.mark.parametrize("seed", range(3))
def test_samples_have_random_drafts_of_every_size(kind, seed):
    problems = KINDS[kind].problems(seed)
    chosen = auditing.few(problems)
    sizes = [problem.size for problem in chosen if problem.kind == "random"]
    assert sorted(sizes) == sorted({p.size for p in problems if p.kind == "random"})
    assert {problem.kind for problem in chosen} == {problem.kind for problem in problems}
    assert any(gamma >= 2 and size >= 3 for gamma, size, *_ in sizes)
    assert len(chosen) <= 15


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("algorithm1", "V up to 5, γ up to 4, one round"),
        ("rows_alone", "V up to 3, γ up to 3, up to 3 rows, one round"),
        ("gumbel_max", "V up to 5, one token"),
    ],
)
def test_the_verdict_names_the_sizes(name, sizes, audits):
    assert audits[name].verdict.endswith(f" for {sizes}")


def test_algorithm1_of_the_examples():
    assert audit(example.speculative_decoding_step, "round").exact


def test_a_planted_fault():
    """The bonus token comes from the wrong position: only the last token is off."""

    def verify(drafts, draft_probs, target_probs, rng):
        tokens = algorithm1(drafts, draft_probs, target_probs, rng)
        if len(tokens) > len(drafts):
            tokens[-1] = rng.choice(target_probs.shape[1], p=target_probs[-2])
        return tokens

    found = audit(verify)
    law, expected = found.worst.law, found.worst.problem.expected
    assert found.verdict.startswith("biased: TV ")
    np.testing.assert_allclose(law.sum(axis=-1), expected.sum(axis=-1), atol=1e-12)


@pytest.mark.parametrize("child_law", ["after", "before"])
def test_trees_without_replacement(child_law):
    """The second child's distribution lacks the first child; without that it is biased."""

    def verify(parents, tokens, draft_probs, target_probs, rng):
        node, output = -1, []
        while True:
            p, q = target_probs[node + 1], draft_probs[node + 1].copy()
            for child in np.flatnonzero(parents == node):
                x = tokens[child]
                if rng.random() * q[x] < p[x]:
                    node, output = child, [*output, x]
                    break
                p = np.maximum(p - q, 0)
                p = p / p.sum()
                if child_law == "after":
                    q[x] = 0
                    q = q / q.sum()
            else:
                return [*output, rng.choice(len(p), p=p)]

    assert audit(verify, "distinct_tree").exact == (child_law == "after")


# --- What a sampler draws from --------------------------------------------------------------------


def law_of(draw, size=3):
    """The distribution of an index."""
    law = np.zeros(size)
    for weight, index in outcomes(lambda rng: int(draw(rng))):
        law[index] += weight
    return law


P = np.array([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.choice(3, p=P),
        lambda rng: rng.choice([0, 1, 2], p=P),
        lambda rng: rng.choice(3, size=(2, 2), p=P)[1, 0],
        lambda rng: np.searchsorted(np.cumsum(P), rng.random(), side="right"),
        lambda rng: np.argmax(np.cumsum(P) > rng.uniform()),
        lambda rng: np.argmax(1 - np.cumsum(P) <= 1 - rng.random()),
        lambda rng: np.argmax(np.log(np.cumsum(P)) > np.log(rng.random())),
        lambda rng: np.argmax(np.cumsum(P) > (rng.uniform(2, 4) - 2) / 2),
        lambda rng: np.argmax(rng.multinomial(1, P)),
        lambda rng: np.argmax(np.log(P) + rng.gumbel(size=3)),
        lambda rng: np.argmax(2 * (np.log(P) + rng.gumbel(size=3)) + 1),
        lambda rng: np.argmin(rng.exponential(size=3) / P),
        lambda rng: np.argmax(P / rng.standard_exponential(size=3)),
        lambda rng: rng.choice(5, 3, replace=False, p=[0.5, 0.3, 0.2, 0, 0])[0],
        lambda rng: [0, 0, 0, 0, 0, 1, 1, 1, 2, 2][rng.integers(10)],
        lambda rng: next(
            x for x in iter(lambda: rng.choice(4, p=[0.45, 0.27, 0.18, 0.1]), None) if x < 3
        ),
    ],
)
def test_ways_to_draw(draw):
    """All of numpy's usual ones, and rejection until one of them is in a set."""
    np.testing.assert_allclose(law_of(draw), P, atol=1e-9)


def test_a_number_keeps_what_comparisons_say():
    def compare(rng):
        u = rng.random()
        return (u < 0.5) + (u < 0.2) + (u > 0.9)

    np.testing.assert_allclose(law_of(compare), [0.4, 0.4, 0.2], atol=1e-12)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda rng: int(10 * rng.random()), "takes the value"),
        (lambda rng: math.log(rng.random()) < 0, "takes the value"),
        (lambda rng: rng.random() < rng.random(), "compares two random numbers"),
        (lambda rng: rng.random() + rng.random() < 1, "computes with two"),
        (lambda rng: rng.normal(), "rng.normal cannot be enumerated"),
        (lambda rng: rng.integers(1 << 40), "draws one of 1099511627776 numbers"),
        (lambda rng: rng.gumbel(size=(10**5, 10**4)), "draws an array of size (100000, 10000)"),
        (lambda rng: rng.multinomial(10**9, P), "draws an array of size 1000000000"),
        (lambda rng: np.argsort(rng.gumbel(size=3))[0], "Gumbel noise again"),
        (lambda rng: rng.gumbel() < 0.5, "compares a Gumbel number"),
        (lambda rng: np.random.default_rng().integers(1 << 30), "draws its own noise"),
        (lambda rng: rng.random() < np.random.default_rng().random(), "draws its own noise"),
    ],
)
def test_refused(draw, words):
    with pytest.raises(Refused, match=re.escape(words)):
        law_of(draw)


def test_a_loop_that_draws_without_an_end(monkeypatch):
    """The draws are counted over all runs; one run alone may have no end."""
    monkeypatch.setattr(randomness, "MAX_DRAWS", 2000)

    def until(accepts):
        def verify(drafts, draft_probs, target_probs, rng):
            while True:
                with contextlib.suppress(Exception):
                    token = rng.integers(2)
                    if accepts(rng, target_probs[0][token]):
                        return [token]

        return verify

    for accepts in (lambda rng, p: rng.random() < p, lambda rng, p: False):
        with pytest.raises(ValueError, match=r"draws more than 2,000 numbers .* has no end here"):
            audit(until(accepts))


def test_larger_batches_are_left_out(monkeypatch):
    """What is drawn for all positions of all rows at once has many outcomes."""
    monkeypatch.setattr(randomness, "MAX_DRAWS", 20_000)
    found = audit(CASES["rows_alone"].function, "batch")
    assert found.verdict.endswith(
        "V up to 3, γ up to 3, up to 3 rows, one round; larger batches left out: 1"
    )


def test_a_table_that_takes_long_is_named(monkeypatch):
    monkeypatch.setattr(findings, "PATIENCE", 0.01)
    (problem, *_) = KINDS["verify"].problems(0)
    words = r"No result after 0.01 seconds of tables 'by hand', V = 2, γ = 1"
    with pytest.warns(UserWarning, match=words), findings.watched(problem):
        time.sleep(0.3)


# --- Outputs that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda drafts, p: [p.shape[1]], "emits id 2, outside the vocabulary of 2 ids"),
        (lambda drafts, p: [-1], "emits id -1, outside"),
        (lambda drafts, p: [], "emits no token"),
        (lambda drafts, p: [*drafts, 0, 0], "emits 3 tokens; a round has 1 to 2"),
        (lambda drafts, p: [np.nan], "emits nan, which is no id"),
        (lambda drafts, p: None, "which are no ids"),
        (lambda drafts, p: "01", "returns '01', which are no ids"),
        (lambda drafts, p: {}.pop("keyword"), "raises KeyError: 'keyword' (tables"),
        (lambda drafts, p: 1 / 0, "raises ZeroDivisionError: division by zero"),
    ],
)
def test_faults(output, words):
    found = audit(lambda drafts, draft_probs, target_probs, rng: output(drafts, target_probs))
    assert words in found.verdict
    assert "tables 'by hand', V = 2, γ = 1, target (0.7 0.3), draft (0.5 0.5)" in found.verdict
    assert not found.exact
    assert words in repr(found)
    assert "\n" not in repr(found)


@pytest.mark.parametrize("seeded", [False, True])
def test_a_function_that_ignores_rng_is_named(seeded):
    """A generator with a seed repeats itself, so that two runs agree."""

    def verify(drafts, draft_probs, target_probs, rng):
        own = np.random.default_rng(0) if seeded else rng
        return [own.choice(len(target_probs[0]))]

    found = audit(verify)
    assert found.verdict.startswith("biased: TV ")
    assert found.verdict.endswith("; it drew nothing from rng") == seeded


@pytest.mark.parametrize(
    ("raised", "words"),
    [(KeyError("late"), "invalid: raises KeyError: 'late'"), (SystemExit(0), "leaves the process")],
)
def test_rows_that_are_computed_late(raised, words):
    def batch(drafts, draft_probs, target_probs, rng):
        yield [0]
        raise raised

    try:
        said = audit(batch, "batch").verdict
    except ValueError as error:
        said = str(error)
    assert words in said


def test_an_empty_residual():
    """p − q without a fallback is 0/0 where the draft is the target, if 1 is not always kept."""

    def verify(drafts, draft_probs, target_probs, rng):
        left = np.maximum(target_probs[0] - draft_probs[0], 0)
        return [rng.choice(len(left), p=left / left.sum())]

    assert "choice: p = [nan nan] has entries that are no probabilities" in audit(verify).verdict


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "verfy"}, "no kind 'verfy': it is one of verify, batch"),
        ({"kind": "sampler"}, "is called with (logits, temperature, rng)"),
        ({"dtype": "bfloat16"}, "must be one of float64, float32"),
        ({"rng": "numpy"}, "must be one of branching, generator, key"),
        ({"draws": 100}, "goes with rng='generator' or 'key'"),
        ({"draws": 1e3, "rng": "key"}, "draws=1000.0 must be an integer from 1 to 10,000,000"),
        ({"draws": 10**12, "rng": "generator"}, "must be an integer from 1 to 10,000,000"),
        ({"seed": -1}, "seed=-1 must be an integer from 0 to 2⁶³ − 1"),
        ({"seed": 1 << 63}, "must be an integer from 0 to 2⁶³ − 1"),
        ({"kind": []}, "There is no kind []: it is one of verify"),
        ({"rng": "key", "kind": "batch"}, "goes with kinds verify and sampler"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        audit(algorithm1, **arguments)


@pytest.mark.parametrize("rng", ["branching", "generator"])
def test_a_function_that_leaves_the_process(rng):
    """Its status would be the command's; an interrupt is the user's."""
    with pytest.raises(ValueError, match=r"^<lambda>: It leaves the process by SystemExit\(0\)"):
        audit(lambda drafts, draft_probs, target_probs, rng: sys.exit(0), rng=rng)

    def interrupted(drafts, draft_probs, target_probs, rng):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(interrupted, rng=rng)


def test_a_function_with_noise_of_its_own_names_the_way_out():
    def verify(drafts, draft_probs, target_probs, rng):
        return algorithm1(drafts, draft_probs, target_probs, np.random.default_rng())

    with pytest.raises(ValueError, match=r"verify: It draws its own noise.*rng='generator'"):
        audit(verify)


# --- The command ----------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def verify(drafts, draft_probs, target_probs, rng):\n    return [drafts[0]]\n"
    )
    (tmp_path / "broken.py").write_text("x = 1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    return functools.partial(command_line.run, monkeypatch, capsys, "specjax audit", cwd=tmp_path)


def test_the_command(command):
    outcome = command("algorithm1")
    assert (outcome.status, outcome.stdout.splitlines()[-1][:9]) == (0, "exact: TV")
    outcome = command("mine:verify", "--kind=verify")
    assert outcome.status == 1
    assert outcome.stdout.startswith("verify (verify)\n")
    assert "To check by hand: V = 2, γ = 1\n\n  first token " in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith("biased: TV ")
    assert command("peek_and_drop").stdout.startswith("peek_and_drop (lengths)")


def test_help_has_every_kind(command):
    outcome = command("--help")
    for name, kind in KINDS.items():
        assert re.search(rf"^  {name} +\({kind.signature}\)$", outcome.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give one of MODULE:FUNCTION, --rule and --cases"),
        (["algorithm1", "--cases"], "Give one of"),
        (["algorithm1", "mine:verify"], "not understood: mine:verify"),
        (["nowhere:verify"], "there is no module 'nowhere'"),
        (["mine:verfy"], "mine has no attribute 'verfy'"),
        (["mine"], "as module:attribute"),
        ([":"], "as module:attribute"),
        (["mine.py:verify"], "without .py, mine:verify"),
        (["leaves:verify"], "its code leaves the process by SystemExit(0)"),
        (["algorithm1", "--seed=-1"], "seed=-1 must be an integer from 0"),
        (["broken:verify"], "cannot be imported: ZeroDivisionError"),
        (["mine:verify", "--kind=tree"], "is called with (parents, tokens, draft_probs"),
        (["mine:verify", "--draws=9"], "goes with rng='generator'"),
        (["--rule=tokn"], "no rule 'tokn'"),
    ],
)
def test_bad_input(arguments, words, command):
    outcome = command(*arguments)
    assert (outcome.status, outcome.stdout) == (1, "")
    assert words in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_random_is_named_as_numpys():
    """Its functions take the arguments of numpy's."""
    for name in ("random", "uniform", "choice", "multinomial", "gumbel", "exponential"):
        assert hasattr(np.random.Generator, name)
        assert hasattr(Random, name)
