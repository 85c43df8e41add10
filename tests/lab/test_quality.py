"""Scores against their own libraries, intervals against plain bootstraps, and agreement."""

import sys

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer

from experiments.reproduce import scores

REFERENCES = [
    "Das Haus ist klein und alt.",
    "Vögel können fliegen, Fische nicht.",
    "Wir gingen heute früh nach Hause.",
    "Der Zug fuhr um neun Uhr ab.",
]
OUTPUTS = [
    "Das Haus ist klein und neu.",
    "Vögel können fliegen.",
    "Wir gingen heute nicht nach Hause.",
    "Der Zug fuhr um neun Uhr ab.",
]


def test_bleu_is_sacrebleu_s():
    (found,) = scores.score("bleu", OUTPUTS, REFERENCES)
    assert found.name == "bleu"
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score)
    assert found.low < found.value < found.high
    assert f"tok:13a|smooth:exp|version:{sacrebleu.__version__}" in found.signature
    assert "eff:no" in found.signature


def test_bleu_s_interval_is_over_corpora_and_not_over_sentences():
    picks = np.random.default_rng(1).integers(4, size=(400, 4))
    resampled = [
        sacrebleu.corpus_bleu([OUTPUTS[i] for i in p], [[REFERENCES[i] for i in p]]).score
        for p in picks
    ]
    (found,) = scores.score("bleu", OUTPUTS, REFERENCES)
    expected = np.quantile(resampled, [0.025, 0.975])
    np.testing.assert_allclose([found.low, found.high], expected, atol=3)


def test_outputs_without_a_match_score_zero():
    (found,) = scores.score("bleu", ["", "x"], ["a b c d e", "f g h i j"])
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_rouge_is_rouge_score_s_with_a_sentence_on_each_line():
    """Lsum joins the matches of all sentences; on one line, their order would count."""
    output, reference = "Trains ran late. Bread is dear.", "Bread was dear and a train ran late ."
    found = scores.score("rouge", [output, "x"], [reference, "y"])
    assert [score.name for score in found] == ["rouge1", "rouge2", "rougeLsum"]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=True)
    lines = output.replace(". ", ".\n")
    expected = scorer.score(reference, lines)
    for score in found:
        assert score.value == pytest.approx(50 * expected[score.name].fmeasure)
        assert (score.low, score.high) == (0, pytest.approx(2 * score.value))
    assert expected["rougeLsum"] > scorer.score(reference, output)["rougeLsum"]


def test_exact_and_its_interval():
    (found,) = scores.score("exact", ["a"] * 30 + ["b"] * 70, ["a"] * 100)
    assert found.value == pytest.approx(0.3)
    normal = 1.96 * np.sqrt(0.3 * 0.7 / 100)
    np.testing.assert_allclose([found.low, found.high], [0.3 - normal, 0.3 + normal], atol=0.02)


@pytest.mark.parametrize("metric", scores.METRICS)
def test_equal_outputs_agree(metric):
    found = scores.agree(metric, OUTPUTS, OUTPUTS, REFERENCES)
    assert found.identical == 1
    assert found.within
    assert all((d.value, d.low, d.high) == (0, 0, 0) for d in found.differences)


def test_draws_of_one_distribution_agree_and_those_of_another_do_not():
    """Three draws of a vote that is right with 60%, 60% and 40%."""
    rng = np.random.default_rng(0)
    a, b, worse = (
        np.where(rng.random(400) < share, "a", "b").tolist() for share in (0.6, 0.6, 0.4)
    )
    references = ["a"] * 400
    assert scores.agree("exact", a, b, references).within
    other = scores.agree("exact", a, worse, references)
    assert not other.within
    assert other.differences[0].value == pytest.approx((a.count("a") - worse.count("a")) / 400)
    assert other.identical == np.mean(np.array(a) == np.array(worse))


def test_the_bootstrap_of_a_difference_is_paired():
    """The second method misses one output more: a small difference between two wide intervals."""
    references = ["a"] * 100
    first, second = ["a"] * 50 + ["b"] * 50, ["a"] * 49 + ["b"] * 51
    alone = scores.score("exact", first, references)[0]
    (difference,) = scores.agree("exact", first, second, references).differences
    assert difference.high - difference.low < 0.3 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("metric", "outputs", "references", "message"),
    [
        ("blue", ["a"], ["a"], "no metric 'blue': choose from bleu, rouge, exact"),
        ("bleu", ["a"], ["a", "b"], "1 outputs do not pair up with 2 texts"),
        ("exact", [], [], "no outputs to score"),
    ],
)
def test_errors(metric, outputs, references, message):
    with pytest.raises(ValueError, match=message):
        scores.score(metric, outputs, references)


def test_methods_with_other_numbers_of_outputs_do_not_compare():
    with pytest.raises(ValueError, match="2 outputs do not pair up with 1 texts"):
        scores.agree("exact", ["a"], ["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("metric", "module"), [("bleu", "sacrebleu"), ("rouge", "rouge_score.rouge_scorer")]
)
def test_a_missing_package_is_named(metric, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.split(".")[0]
    with pytest.raises(ValueError, match=rf"needs {package}: pip install -e '\.\[data\]'"):
        scores.score(metric, ["a"], ["a"])
