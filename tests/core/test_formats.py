"""Results in the formats of others, both ways: Spec-Bench's rows and vLLM's fields of a request."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

import command_line
import specjax
from pairs import TEXTS
from specjax.measure import formats
from specjax.measure.formats import Steps
from specjax.policies import Costs, constant
from specjax.replay import counts, replay
from specjax.results import Row, summarize
from toy_policies import library

BUDGET = 16


@pytest.fixture(scope="module")
def decoded(pair):
    """Outputs with their rounds; some end by EOS inside a draft."""
    return specjax.generate(
        pair.target, pair.draft, TEXTS, gamma=3, max_new_tokens=BUDGET, log_rounds=True
    )


def row_of(lengths, tested, verified, tokens=()) -> Row:
    accepted = sum(kept * count for kept, count in enumerate(lengths))
    calls = sum(lengths)
    return Row(0, 0, "", list(tokens), calls, verified, verified, accepted, lengths, tested)


def test_acceptance_by_hand():
    """γ = 2. Two calls without a draft; three drafts of two tokens, of which 0, 1 and 2 were kept;
    and one of one token, which was kept."""
    row = row_of([3, 2, 1], [4, 2], verified=7)
    assert (row.acceptance, row.mean_acceptance) == ([3 / 4, 1 / 2], 4 / 6)
    assert row.per_position_acceptance_rate == [3 / 4, 1 / 4]  # not conditional
    assert row.acceptance_histogram == [1, 2, 1]
    assert (row.num_spec_steps, row.mean_acceptance_length) == (4, 2.0)
    assert row.draft_acceptance_rate == 4 / 7
    fields = {"acceptance_by_position": [0.75, 0.5], "mean_acceptance": 0.6667}
    both = summarize([row, row])
    assert row.acceptance_fields() == both.acceptance_fields() == fields
    assert both.acceptance_histogram == [2, 4, 2]


def test_acceptance_where_nothing_was_drafted():
    row = row_of([5], [], verified=0)
    assert (row.acceptance, row.mean_acceptance, row.acceptance_histogram) == ([], None, [0])
    found = row.mean_acceptance_length, row.draft_acceptance_rate, row.num_spec_steps
    assert found == (1.0, 0.0, 0)
    none = {"acceptance_by_position": [], "mean_acceptance": None}
    assert summarize([]).acceptance_fields() == none
    with pytest.raises(AttributeError, match=r"Row has no levels: read draft_calls\."):
        row.levels  # noqa: B018


def test_vllms_own_example():
    """The response that vLLM's page on these metrics prints."""
    row = dataclasses.replace(row_of([39, 1, 0, 3], [43, 4, 3], verified=129))
    assert formats.vllm(row) == {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_fields_agree_with_the_rounds(decoded):
    """A reader of the arrays computes the counts, as vLLM does when it makes them."""
    for row in decoded.rows:
        found = formats.vllm(row)
        accepted, drafted = found["per_step_accepted"], found["per_step_drafted"]
        assert len(accepted) == len(drafted) == found["num_spec_steps"]
        assert found["num_spec_steps"] == sum(found["acceptance_histogram"])
        assert found["acceptance_histogram"] == [accepted.count(kept) for kept in range(4)]
        assert found["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
        assert found["draft_acceptance_rate"] == sum(accepted) / sum(drafted)
    assert any(line["verified"] == 0 for line in decoded.rounds)  # which does not count


def spec_bench_figures(lines, category=""):
    """Spec-Bench's figures by the definitions of its evaluation: the mean of all accepted lengths,
    and the mean over questions of tokens per second."""
    choices = [row["choices"][0] for row in map(json.loads, lines)
               if category in ("", row["category"])]  # fmt: skip
    lengths = [n for choice in choices for n in choice["accept_lengths"]]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    return np.mean(lengths), np.mean(speeds)


@pytest.mark.parametrize("logged", [True, False])
def test_spec_benchs_reader(decoded, logged):
    """It finds τ and tokens a second in questions of two turns, of each category and in all."""
    rows = decoded.rows if logged else [dataclasses.replace(r, rounds=()) for r in decoded.rows]
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    lines = [
        json.dumps(
            formats.spec_bench(
                [[(first, 0.5), (second, 1.5)]],
                question_id=number,
                category=("writing", "qa")[number % 2],
                model_id="tiny",
                tstamp=0.0,
            )
        )
        for number, (first, second) in enumerate(pairs)
    ]
    mean, speed = spec_bench_figures(lines)
    assert mean == pytest.approx(decoded.block_efficiency)
    assert speed == pytest.approx(np.mean([(a.emitted + b.emitted) / 2.0 for a, b in pairs]))
    some = [row for pair in pairs[1::2] for row in pair]
    mean, _ = spec_bench_figures(lines, "qa")
    assert mean == pytest.approx(specjax.Result(some).block_efficiency)
    choice = json.loads(lines[0])["choices"][0]
    assert choice["turns"] == [row.text.strip() for row in pairs[0]]
    assert choice["decoding_steps"] == [row.target_calls for row in pairs[0]]
    assert min(choice["accept_lengths"]) >= 1


# Replay of counts.


def replayed(policies, steps, **options):
    draws = options.pop("draws", 1)
    found = counts.from_counts(steps, **options)
    return found, replay.replay(policies, found, jax.random.key(0), draws=draws)


def drafts(accepted, gamma) -> Steps:
    return Steps(accepted, [gamma] * len(accepted), gamma)


def written(tmp_path, rows):
    file = tmp_path / "responses.jsonl"
    lines = (json.dumps(formats.vllm_response(row, "tiny")) for row in rows)
    file.write_text("\n".join(lines))
    return file


def test_the_recorded_length_gives_its_run_back(decoded, tmp_path):
    """τ of the steps and every accepted count, whatever is assumed at censored positions."""
    steps = formats.read_vllm(written(tmp_path, decoded.rows))
    tokens = sum(sum(one.accepted) + len(one.accepted) for one in steps)
    tau = tokens / sum(len(one.accepted) for one in steps)
    assert tau == pytest.approx(decoded.summary.mean_acceptance_length)
    assert counts.tested_share(steps) == pytest.approx(decoded.summary.mean_acceptance)
    for censored in (None, 0.0, 1.0):
        found, again = replayed([constant(3)], steps, censored=censored, draws=2)
        score = replay.score(again, found, Costs(0.1, [1.0] * 4))
        assert score.tau[0] == pytest.approx(tau)
        for row, one in enumerate(steps):
            expected = [2 * one.accepted.count(kept) for kept in range(4)]
            assert again.accepted[0, row].tolist() == expected


def test_shorter_drafts_by_hand():
    """γ = 3 kept 3 of 3 tokens, and then 1. By position: + + + ? + −. With γ = 2 rounds begin at
    0, 3 (whose first token is the censored one) and behind it."""
    steps = [drafts([3, 1], 3)]
    for censored, lengths in ((0.0, [1, 1, 1, 0]), (1.0, [0, 0, 2, 0])):
        _, found = replayed([constant(2)], steps, censored=censored)
        assert found.accepted[0, 0].tolist() == lengths
    assert counts.censored_share(steps) == 1 / 6
    assert counts.tested_share(steps) == 4 / 5


def test_censored_positions_are_drawn():
    """Their mean is the share of tested tokens that were accepted, and 0 and 1 bound the rounds."""
    rng = np.random.default_rng(0)
    accepted = np.minimum(rng.geometric(0.3, size=(20, 40)) - 1, 4)
    steps = [drafts(row.tolist(), 4) for row in accepted]
    taus = {}
    for censored in (0.0, None, 1.0):
        found, again = replayed([constant(1), constant(2)], steps, censored=censored, draws=8)
        taus[censored] = replay.score(again, found, Costs(0.1, [1.0] * 5)).tau
    alpha = 0.7  # each token was accepted with this chance: the real τ is known
    assert np.all(taus[0.0] <= taus[None])
    assert np.all(taus[None] <= taus[1.0])
    np.testing.assert_allclose(taus[None], [1 + alpha, 1 + alpha + alpha**2], rtol=0.03)
    assert taus[1.0][0] - taus[0.0][0] > 0.05


def test_policies_that_read_beliefs_are_refused():
    """By their name and what they read; all others run."""
    steps, policies = [drafts([0, 2, 3, 1], 3)], library(3, 10, board=True)
    for name in ("confidence", "svip", "adaedl", "first_descent", "lookahead", "tapout", "head"):
        with pytest.raises(ValueError, match="counts alone"):
            replayed([policies[name]], steps)
    for name in ("gammatune", "ucb", "hedge"):
        replayed([policies[name]], steps)
    _, found = replayed([policies[name] for name in ("heuristic", "goodput")], steps)
    assert (found.verified.sum(axis=(1, 2)) > 0).all()
    with pytest.raises(ValueError, match=r"^AdaEdl reads entropy, and .* counts alone: "):
        replayed([policies["adaedl"]], steps)
    with pytest.raises(ValueError, match=r"^Lookahead reads logprob"):
        replayed([policies["lookahead"]], steps)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 1: no per_step_accepted"),
        ('{"metrics": {"speculative_decoding": null}}', "no per_step_accepted"),
        ('{"per_step_accepted": [1], "per_step_drafted": "2"}', "per_step_drafted='2' should be"),
        ('{"per_step_accepted": [1]}', "per_step_drafted=None should be"),
        ('{"per_step_accepted": [true], "per_step_drafted": [1]}', "should be a list of counts"),
        ('{"per_step_accepted": [1], "per_step_drafted": [2000]}', "should be a list of counts"),
        ('{"per_step_accepted": [1, 2], "per_step_drafted": [2]}', "2 steps .* and 1 in"),
        ('{"per_step_accepted": [3], "per_step_drafted": [2]}', "step 0 accepted 3 of 2"),
        (
            '{"per_step_accepted": [1], "per_step_drafted": [2], "num_spec_tokens": 1}',
            "num_spec_tokens=1 should be the longest draft, and a step drafted 2",
        ),
        ("", "is empty"),
        ('{"per_step_accepted": [1', "not JSON"),
    ],
)
def test_wrong_lines(line, said, tmp_path):
    file = tmp_path / "responses.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=said) as raised:
        formats.read_vllm(file)
    assert "\n" not in str(raised.value)


def test_nothing_to_replay(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        formats.read_vllm(tmp_path / "none.jsonl")
    for steps in ([], [Steps([], [], 3)], [Steps([0], [0], 3)]):
        with pytest.raises(ValueError, match="No step drafted a token"):
            counts.from_counts(steps)
    with pytest.raises(ValueError, match="censored=2 must be"):
        counts.from_counts([drafts([1], 2)], censored=2)
    found = counts.from_counts([Steps([], [], 2), drafts([1], 2)])
    assert found.emitted.tolist() == [0, 2]
    assert math.isnan(float(found.belief_logprob[0, 0, 0]))


def test_replay_of_a_file(decoded, tmp_path, monkeypatch, capsys):
    """A table for the terminal, rows and a report; costs are given; refusals in one line."""
    file = written(tmp_path, decoded.rows)

    def run(*arguments):
        return command_line.run(
            monkeypatch, capsys, "experiments.replay", f"--trace={file}", *arguments
        )

    outcome = run("--policies=heuristic", "--c=0.1", "--censored=0")
    assert outcome.status == 0, outcome.stderr
    lines = map(json.loads, (tmp_path / "replay.jsonl").read_text().splitlines())
    found = {row["policy"]: row for row in lines}
    assert list(found) == ["γ=1", "γ=2", "γ=3", "oracle", "heuristic"]
    assert found["γ=3"]["tau"] == pytest.approx(decoded.summary.mean_acceptance_length)
    assert found["oracle"]["regret"] == 0 <= found["heuristic"]["regret"]
    assert "of the tested tokens were accepted" in (tmp_path / "report.md").read_text()
    several = run("--policies=heuristic", "--c=0.1,0.4,0.1", "--censored=0")
    assert several.status == 0, several.stderr
    lines = list(map(json.loads, (tmp_path / "replay.jsonl").read_text().splitlines()))
    assert [line["c"] for line in lines] == [0.1] * 5 + [0.4] * 5
    assert {**lines[3], "c": 0, "command": 0} == {**found["oracle"], "c": 0, "command": 0}
    assert "T = 0, c = 0.4" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "costs.png").stat().st_size > 0
    for arguments, said in (
        (["--policies=heuristic"], "holds no costs: give --c"),
        (["--policies=svip(threshold=0.3)", "--c=0.1"], "Svip reads"),
        (["--policies=heuristic", "--c=0.1,x"], "--c=0.1,x must be floats"),
        (["--policies=heuristic", "--c=0.1", "--temperature=0,1"], "a file has one"),
    ):
        outcome = run(*arguments)
        assert (outcome.status, outcome.stderr.count("\n")) == (1, 1)
        assert said in outcome.stderr


# Of the command.


@pytest.fixture
def decode(pair, tmp_path, monkeypatch, capsys):
    """specjax decode on lines of JSON, of which some have Spec-Bench's fields."""
    source = tmp_path / "in.jsonl"
    lines = [{"input": text} for text in TEXTS]
    lines[0] |= {"question_id": 81, "category": "writing"}
    source.write_text("\n".join(map(json.dumps, lines)))

    def run(*arguments):
        return command_line.run(
            monkeypatch, capsys, "specjax decode", "--config=configs/decode.py",
            f"--config.target={pair.target.name}", f"--config.draft={pair.draft.name}",
            f"--config.max_new_tokens={BUDGET}", "--config.gamma=3", f"--input={source}",
            f"--output={tmp_path / 'out.jsonl'}", *arguments,
        )  # fmt: skip

    return run


def test_decode_writes_spec_benchs_rows(decode, decoded, tmp_path):
    """Each input's own seconds, without compilation, which dwarfs them; a continued run too."""
    options = "--format=spec_bench", "--config.batch_size=1"
    outcome = decode(*options)
    assert outcome.status == 0, outcome.stderr
    output = tmp_path / "out.jsonl"
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["question_id"], row["category"]) for row in found[:2]] == [
        (81, "writing"),
        (2, ""),
    ]
    for row, ours in zip(found, decoded.rows, strict=True):
        (choice,) = row["choices"]
        assert choice["new_tokens"] == [ours.emitted]
        assert choice["accept_lengths"] == [line["emitted"] for line in ours.rounds]
    seconds = sum(row["choices"][0]["wall_time"][0] for row in found)
    whole, compiled = map(float, re.findall(r"([\d.]+)(?: s,| of them compiling)", outcome.stdout))
    assert 0 < seconds <= whole - compiled + 0.2
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:5]))
    assert decode(*options).status == 0
    again = output.read_text().splitlines(keepends=True)
    assert again[:5] == lines[:5]
    assert [json.loads(line)["question_id"] for line in again] == [81, *range(2, 9)]
    outcome = decode("--format=vllm", "--config.batch_size=1")
    assert "format was 'spec_bench' and is 'vllm'" in outcome.stderr


def test_decode_writes_vllms_responses(decode, decoded, tmp_path):
    """They are those of `generate`, and replay reads them; plain decoding has no drafts."""
    assert decode("--format=vllm").status == 0
    output = tmp_path / "out.jsonl"
    metrics = [
        json.loads(line)["metrics"]["speculative_decoding"]
        for line in output.read_text().splitlines()
    ]
    assert metrics == [formats.vllm(row) for row in decoded.rows]
    assert "per_step_accepted" in metrics[0]
    assert [one.longest for one in formats.read_vllm(output)] == [3] * 8
    plain = "--format=vllm", "--config.method=autoregressive", "--config.draft=", "--overwrite"
    assert decode(*plain).status == 0
    line = json.loads(output.read_text().splitlines()[0])
    assert line["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0]
    assert formats.read_vllm(output) == [Steps([], [], 0)] * 8


def test_refused_formats(decode, tmp_path):
    source = tmp_path / "wrong.jsonl"
    source.write_text('{"input": "a", "category": 1}')
    one = "--format=spec_bench", "--config.batch_size=1"
    for arguments, said in (
        (["--format=spec_bench"], "one output at a time: give --config.batch_size=1"),
        ([*one, "--config.samples=2"], "--config.samples=1"),
        ([*one, f"--input={source}"], "line 1: question_id=1 and category=1 should be"),
    ):
        outcome = decode(*arguments)
        assert (outcome.status, outcome.stderr.count("\n")) == (1, 1)
        assert said in outcome.stderr
