"""The formulas against what the paper prints, their limits, and draws of the distributions they
describe."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reproduce import printed
from experiments.theory import __main__ as experiment
from specjax import formulas


def random_distributions(seed: int, shape=(500, 8)) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of distributions, from flat to sharp, some entries exactly zero."""
    rng = np.random.default_rng(seed)
    distributions = []
    for _ in range(2):
        logits = rng.normal(size=shape) * rng.uniform(0.1, 5, size=(*shape[:-1], 1))
        weights = np.exp(logits) * (rng.random(shape) > 0.2)
        weights[..., 0] += 1e-3  # at least one entry is positive
        distributions.append(weights / weights.sum(-1, keepdims=True))
    return distributions[0], distributions[1]


# Printed values


@pytest.mark.parametrize("row", printed.TABLE_1, ids=str)
def test_table_1(row):
    operations = formulas.operations_factor(row.alpha, row.gamma, c_hat=0)
    speed = formulas.walltime_speedup(row.alpha, row.gamma, c=0)
    assert f"{operations:.2f}" == f"{row.operations:.2f}"
    assert f"{speed:.2f}" == f"{row.speed:.2f}"


# c of each curve of Figure 3, and its γ at α = .5 and at .9.
FIGURE_3_ENDS = {0.01: (5, 24), 0.02: (4, 19), 0.05: (3, 13), 0.10: (2, 10)}


@pytest.mark.parametrize("c", FIGURE_3_ENDS)
def test_ends_of_figure_3(c):
    assert tuple(formulas.optimal_gamma(np.array([0.5, 0.9]), c)) == FIGURE_3_ENDS[c]


# Thm 3.8 and its best γ at the α and c of each row of Tables 2 and 4, computed elsewhere.
GAINS = ("3.16", "3.25", "2.50", "2.26", "2.35", "1.93",
         "2.40", "2.62", "2.02", "1.89", "1.80", "1.54")  # fmt: skip
BEST_GAMMAS = (9, 9, 6, 6, 6, 4, 7, 7, 4, 5, 4, 3)


@pytest.mark.parametrize("number", range(12))
def test_expectations_of_tables_2_and_4(number):
    row = printed.TABLES_2_AND_4[number]
    computed = formulas.walltime_speedup(row.alpha, row.gamma, row.c)
    assert f"{computed:.2f}" == GAINS[number]
    assert formulas.optimal_gamma(row.alpha, row.c) == BEST_GAMMAS[number]
    # α and c are rounded to two digits: some pair that rounds to them gives the printed digit.
    low = formulas.walltime_speedup(row.alpha - 0.005, row.gamma, row.c + 0.005)
    high = formulas.walltime_speedup(row.alpha + 0.005, row.gamma, row.c - 0.005)
    assert low < row.expected + 0.05
    assert high > row.expected - 0.05


def test_exactly_three_expectations_are_off_by_more_than_their_digit():
    gaps = {
        (row.task, row.draft, row.temperature): abs(
            formulas.walltime_speedup(row.alpha, row.gamma, row.c) - row.expected
        )
        for row in printed.TABLES_2_AND_4
    }
    odd = {("EnDe", "T5-base", 1), ("EnDe", "T5-large", 1), ("CNNDM", "T5-large", 1)}
    assert {row for row, gap in gaps.items() if gap > 0.05} == odd
    assert max(gaps.values()) < 0.07


def test_tables_agree_on_alpha():
    greedy = {(row.task, row.draft): row.alpha_greedy for row in printed.TABLE_3}
    sampled = {(row.task, row.draft): row.alpha_sampled for row in printed.TABLE_3}
    for row in printed.TABLES_2_AND_4:
        table = greedy if row.temperature == 0 else sampled
        assert table[row.task, row.draft] == row.alpha
    for row in printed.TABLE_5:
        assert row.alphas[0] == sampled["EnDe", row.draft]


def test_speedup_of_greedy_lenience():
    """A.5's text: T5-small at γ = 8 and c = .015."""
    speedups = formulas.walltime_speedup(np.array(printed.GREEDY_LENIENT_ALPHAS), 8, 0.015)
    assert [f"{speedup:.1f}" for speedup in speedups] == ["3.3", "3.3", "3.9", "4.9"]


# Limits and identities


def test_alpha_at_its_ends():
    gammas = np.arange(12)
    np.testing.assert_array_equal(formulas.expected_tokens(1.0, gammas), gammas + 1)
    np.testing.assert_array_equal(formulas.expected_tokens(0.0, gammas), np.ones(12))
    assert formulas.expected_tokens(1.0, np.inf) == np.inf
    assert formulas.expected_tokens(0.0, np.inf) == 1
    assert formulas.expected_tokens(0.9, np.inf) == pytest.approx(10)
    assert formulas.walltime_speedup(1.0, 4, 0.1) == pytest.approx(5 / 1.4)
    assert formulas.operations_factor(1.0, 4, 0.1) == pytest.approx(5.4 / 5)


def test_alpha_towards_1_loses_no_digits():
    below = 1 - np.array([1e-4, 1e-8, 1e-12, 2.0**-53])
    series = 8 - 28 * (1 - below)  # 1 + α + … + α⁷ to first order
    np.testing.assert_allclose(formulas.expected_tokens(below, 7), series, rtol=1e-7)
    np.testing.assert_allclose(formulas.expected_tokens(below[1:], 7), series[1:], rtol=1e-14)


def test_expected_tokens_is_the_geometric_series():
    alphas, gammas = np.linspace(0, 1, 21)[:, None], np.arange(9)
    series = np.array([[sum(a**i for i in range(g + 1)) for g in gammas] for a in alphas[:, 0]])
    np.testing.assert_allclose(formulas.expected_tokens(alphas, gammas), series, rtol=1e-13)


def test_texts_of_unequal_difficulty_fall_short_of_eq_1():
    # experiments/theory/README.md: half of the tokens at β = .5, half at .9, in rounds of γ = 3.
    calls_per_token = 1 / formulas.expected_tokens(np.array([0.5, 0.9]), 3)
    assert f"{1 / calls_per_token.mean():.2f}" == "2.43"
    assert f"{formulas.expected_tokens(0.7, 3):.2f}" == "2.53"
    # With γ = ∞ the calls per token are 1 − β, linear in β: then α is all that matters.
    calls_per_token = 1 / formulas.expected_tokens(np.array([0.5, 0.9]), np.inf)
    assert 1 / calls_per_token.mean() == pytest.approx(formulas.expected_tokens(0.7, np.inf))


def test_some_gamma_is_faster_iff_alpha_exceeds_c():
    alphas, costs = np.linspace(0, 1, 41)[:, None], np.linspace(0, 1, 21)
    best = formulas.optimal_gamma(alphas, costs)
    np.testing.assert_array_equal(best > 0, alphas > costs)


def test_optimal_gamma_by_search():
    for alpha, c in ((0.3, 0.1), (0.62, 0.02), (0.95, 0.07)):
        speedups = [formulas.walltime_speedup(alpha, gamma, c) for gamma in range(200)]
        assert formulas.optimal_gamma(alpha, c) == int(np.argmax(speedups))


def test_optimal_gamma_is_the_smallest_of_equals():
    for alpha in np.linspace(0.05, 0.95, 19):
        v = (
            formulas.expected_tokens(alpha, np.arange(20)) / 1.3
        )  # every speedup is 1.3 up to rounding
        assert formulas.optimal_gamma(alpha, 0.0, v) == 1


def test_verify_cost_as_number_and_table():
    table = [1.0, 1.1, 1.3, 1.8, 2.6]
    expected = [formulas.expected_tokens(0.8, g) / (0.1 * g + table[g]) for g in range(5)]
    gammas = np.arange(5)
    for v in (table, np.array(table), jnp.array(table)):
        np.testing.assert_allclose(
            formulas.walltime_speedup(0.8, gammas, 0.1, v), expected, rtol=1e-6
        )
        assert formulas.walltime_speedup(0.8, 3, 0.1, v) == pytest.approx(expected[3])
        assert formulas.optimal_gamma(0.8, 0.1, v) == int(np.argmax(expected))
    assert formulas.walltime_speedup(0.8, 3, 0.1, v=1.8) == pytest.approx(expected[3])


def test_dear_verification_moves_the_optimum():
    assert formulas.optimal_gamma(0.8, 0.05) == 8
    assert formulas.optimal_gamma(0.8, 0.05, v=1 + 0.2 * np.arange(20)) == 3
    assert formulas.optimal_gamma(0.8, 0.05, v=1 + np.arange(20)) == 0
    # v(0) plays no part: γ = 0 is plain decoding, whose speedup is 1.
    assert formulas.optimal_gamma(0.8, 0.05, v=[3.0, 2.0]) == 0


def test_speedup_from_tau_is_the_speedup_at_the_expected_tau():
    tau = formulas.expected_tokens(0.7, 4)
    speedup = formulas.walltime_speedup(0.7, 4, 0.1, v=1.4)
    assert formulas.walltime_speedup_from_tau(tau, 4, 0.1, v=1.4) == pytest.approx(speedup)
    assert formulas.walltime_speedup_from_tau(3.0, 4, 0.1, 1.4, overhead=0.2) == pytest.approx(1.5)
    assert formulas.walltime_speedup_from_tau(3.0, 4, 0.1, 1.4, overhead=-0.3) == pytest.approx(2.0)
    assert formulas.walltime_speedup_from_tau(2.0, 2.5, 0.2) == pytest.approx(2 / 1.5)  # mean γ
    assert formulas.walltime_speedup_from_tau(1.0, 0, 0.1) == 1
    assert (
        formulas.walltime_speedup_from_tau(tau=formulas.expected_tokens(1.0, 7), gamma=7, c=0) == 8
    )


def test_identities_of_d_lk():
    target, draft = random_distributions(0)
    distance = formulas.d_lk(target, draft)
    middle = (target + draft) / 2
    np.testing.assert_allclose(distance, 1 - np.minimum(target, draft).sum(-1), atol=1e-12)
    np.testing.assert_allclose(distance, np.abs(target - middle).sum(-1), atol=1e-12)
    np.testing.assert_array_equal(distance, formulas.d_lk(draft, target))
    np.testing.assert_array_equal(formulas.d_lk(target, target), np.zeros(len(target)))
    assert np.all((distance >= 0) & (distance <= 1))
    assert formulas.d_lk([1.0, 0.0], [0.0, 1.0]) == 1


def test_non_iterative_acceptance():
    target, draft = random_distributions(1)
    acceptance = formulas.non_iterative_acceptance(target, draft)
    assert np.all(acceptance <= 1 - formulas.d_lk(target, draft) + 1e-12)
    assert np.any(acceptance > 0.01)
    with np.errstate(divide="ignore", invalid="ignore"):  # A.2 as it is printed
        smallest = np.nanmin(draft / target, axis=-1)
    np.testing.assert_allclose(acceptance, (target * smallest[:, None]).sum(-1), atol=1e-12)
    assert formulas.non_iterative_acceptance([0.5, 0.5], [0.5, 0.5]) == 1
    assert formulas.non_iterative_acceptance([0.0, 1.0], [0.5, 0.5]) == 0.5
    assert formulas.non_iterative_acceptance([0.5, 0.5], [0.0, 1.0]) == 0


# Types, shapes and errors


def test_floats_give_floats_and_arrays_broadcast():
    assert type(formulas.expected_tokens(0.5, 3)) is float
    assert type(formulas.walltime_speedup(0.5, 3, 0.1)) is float
    assert type(formulas.d_lk(jnp.array([0.5, 0.5]), jnp.array([0.25, 0.75]))) is float
    assert type(formulas.optimal_gamma(0.5, 0.1)) is int
    alphas, costs = jnp.array([[0.5], [0.75]]), jnp.array([0.0625, 0.125, 0.25])
    speedups = formulas.walltime_speedup(alphas, 3, costs)
    best = formulas.optimal_gamma(alphas, costs)
    assert speedups.shape == best.shape == (2, 3)
    assert speedups[1, 2] == formulas.walltime_speedup(0.75, 3, 0.25)
    assert best[1, 2] == formulas.optimal_gamma(0.75, 0.25)


EVEN = [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formulas.expected_tokens(75, 3), r"alpha=75.0 must lie in \[0, 1\].*percentage"),
        (lambda: formulas.expected_tokens([0.5, -0.1], 3), r"alpha=-0.1 must"),
        (lambda: formulas.expected_tokens(np.nan, 3), r"alpha=nan must"),
        (lambda: formulas.expected_tokens(0.5, -1), r"gamma=-1.0 must be a whole number"),
        (lambda: formulas.expected_tokens(0.5, 2.5), r"gamma=2.5 .*walltime_speedup_from_tau"),
        (
            lambda: formulas.walltime_speedup(0.5, np.inf, 0.1),
            r"gamma=inf .*walltime_speedup_from_tau",
        ),
        (lambda: formulas.walltime_speedup(0.5, 3, -0.1), r"c=-0.1 must be ≥ 0"),
        (lambda: formulas.walltime_speedup(0.5, 3, 0.1, v=0), r"v=0.0 must be > 0"),
        (
            lambda: formulas.walltime_speedup(0.5, 3, 0.1, v=[1, 1.2]),
            r"gamma=3.0 is outside the table",
        ),
        (lambda: formulas.walltime_speedup(0.5, 3, 0.1, v=np.ones((2, 2))), r"shape \(2, 2\)"),
        (lambda: formulas.walltime_speedup_from_tau(5, 3, 0.1), r"tau=5.0 must be ≤ gamma \+ 1"),
        (
            lambda: formulas.walltime_speedup_from_tau(2, 3, 0.1, 1, -2),
            r"overhead=-2 makes γc \+ v \+",
        ),
        (
            lambda: formulas.walltime_speedup_from_tau(2, 2.5, 0.1, [1, 2, 3]),
            r"whole where v depends",
        ),
        (lambda: formulas.operations_factor(0.5, 3, -1), r"c_hat=-1.0 must be ≥ 0"),
        (lambda: formulas.optimal_gamma(1.5, 0.1), r"alpha=1.5 must"),
        (lambda: formulas.optimal_gamma(0.5, 0.1, v=[1.0]), r"v=\[1.0\] ends at γ = 0"),
        (lambda: formulas.d_lk([0.5, 0.6], EVEN), r"sum of target_probs=1.1 must be 1"),
        (lambda: formulas.d_lk(EVEN, [-1.0, 2.0]), r"draft_probs=-1.0 must .* not logits"),
        (lambda: formulas.d_lk(EVEN, [0.5, 0.25, 0.25]), r"2 and 3 tokens; .* same vocabulary"),
    ],
)
def test_errors_name_the_value_and_the_way_out(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_experiment_writes_report_and_figures(tmp_path):
    experiment.write(tmp_path, experiment.table1())
    figures = ["figure2.png", "figure3.png", "figure4.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*figures, "report.md", "report.tex"]
    assert r"$\alpha$ & $\gamma$ & operations" in (tmp_path / "report.tex").read_text()
    text = (tmp_path / "report.md").read_text()
    assert "| 0.9 | 10 | 1.60X | 1.60X | 6.86X | 6.86X |" in text
    assert "Every digit is the paper's." in text
    assert "5 to 24 at c = 0.01, 4 to 19 at c = 0.02" in text
    assert all(f"({figure})" in text for figure in figures)
    wrong = [{**row, "paper_speed": 2.0} for row in experiment.table1()[:1]]
    assert experiment.verdict(wrong) == "Rows that differ: α = 0.6, γ = 2."


def test_figures_show_the_papers_curves():
    curves = [line.get_ydata() for line in experiment.figure3().axes[0].lines]
    ends = [(curve[0], curve[-1]) for curve in curves]
    assert ends == list(FIGURE_3_ENDS.values())
    assert [line.get_ydata()[-1] for line in experiment.figure2().axes[0].lines[:5]] == (
        pytest.approx([1.9, 3.439, 4.68559, 5.6953279, 10])
    )


# Outputs that end.


def enumerated(alpha, gamma, tokens):
    """P(k rounds), by every possible course of an output."""
    chances = np.zeros(tokens + 1)

    def follow(left, rounds, chance):
        if not left:
            chances[rounds] += chance
            return
        drafted = min(gamma, left - 1)
        for accepted in range(drafted + 1):
            stops = 1 - alpha if accepted < drafted else 1
            follow(left - 1 - accepted, rounds + 1, chance * alpha**accepted * stops)

    follow(tokens, 0, 1.0)
    return chances


@pytest.mark.parametrize(("alpha", "gamma", "tokens"), [(0.8, 3, 9), (0.3, 2, 7), (0.6, 20, 5)])
def test_rounds_of_an_output_that_ends(alpha, gamma, tokens):
    one = formulas.rounds_distribution(alpha, gamma, tokens)
    np.testing.assert_allclose(one, enumerated(alpha, gamma, tokens), atol=1e-14)
    # The slower of two rows.
    both = np.zeros(tokens + 1)
    for first, second in np.ndindex(tokens + 1, tokens + 1):
        both[max(first, second)] += one[first] * one[second]
    found = formulas.rounds_distribution(alpha, gamma, tokens, rows=2)
    np.testing.assert_allclose(found, both, atol=1e-14)


def test_rounds_of_certain_and_of_endless_outputs():
    assert formulas.rounds_distribution(0.0, 3, 8)[8] == 1
    assert formulas.rounds_distribution(1.0, 3, 9)[3] == 1
    chances = formulas.rounds_distribution(0.8, 3, 2000)
    tau = 2000 / (chances @ np.arange(2001))
    assert tau < formulas.expected_tokens(0.8, 3)
    assert tau == pytest.approx(formulas.expected_tokens(0.8, 3), rel=2e-3)
    # 48 tokens in 21 rounds or more, as one key drew: less than one key in fifty.
    assert 0.015 < formulas.rounds_distribution(0.8, 3, 48)[21:].sum() < 0.02


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"rows": 0}, {"alpha": 1.1}, {"gamma": 0.5}])
def test_rounds_of_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}="):
        formulas.rounds_distribution(**{"alpha": 0.8, "gamma": 3, "tokens": 8, **wrong})
