"""Choosing a draft: where the right answer is known, and each reason in words."""

import dataclasses
import functools
import json
import re
import types
import weakref
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import clocks
import command_line
import specjax
from pairs import TEXTS
from specjax import checkpoints, drafters, formulas, trees
from specjax.decoding import building
from specjax.drafters.base import ModelDrafter
from specjax.measure import doubts, metrics
from specjax.models.language_model import LanguageModel
from specjax.policies import Costs
from specjax.pytrees import pytree
from specjax.sampling import Greedy
from specjax.support import named
from specjax.support.named import short
from specjax.tuning.candidates import Candidates
from specjax.tuning.inputs import Inputs
from specjax.tuning.job import Job, apart
from specjax.tuning.members import smaller_members
from specjax.tuning.recommendation import Candidate, reasons, recommend, why_not
from specjax.tuning.ways import Lengths

BUDGET = 24


def trial(target, texts, drafts=(), gammas=(1,), nodes=(), timed_inputs=16, repeats=5, **job):
    return Candidates(Job(target, texts, **job), drafts, gammas, nodes, timed_inputs, repeats)


# The words, of candidates that were never measured.


def candidate(alpha=0.8, c=0.1, v=1.2, speedup=None, total=None, gammas=(1, 3, 7), **fields):
    """A round takes γc + v steps; speedups are as predicted, and τ as promised, unless given."""
    steps = {str(gamma): gamma * c + v for gamma in gammas}
    speedups = {g: formulas.expected_tokens(alpha, g) / (g * c + v) for g in gammas}
    gamma = max(speedups, key=speedups.__getitem__)
    speedup = speedups[gamma] if speedup is None else speedup
    made = Candidate(
        name="models/small",
        memory=100,
        alpha=alpha,
        c=c,
        gamma=gamma,
        v=v,
        nodes=gamma,
        steps=steps,
        promised=formulas.expected_tokens(alpha, gamma),
        tau=formulas.expected_tokens(alpha, gamma),
        tokens=20.0,
        predicted=speedups[gamma],
        speedup=speedup,
        speedup_low=speedup,
        speedup_high=speedup,
        speedup_end_to_end=speedup if total is None else total,
    )
    return dataclasses.replace(made, **fields)


@pytest.mark.parametrize(
    ("found", "causes", "words"),
    [
        (candidate(alpha=0.2, c=0.1, v=1.2), ("alpha",), "agreement is too low (α = 0.20)"),
        (candidate(alpha=0.7, c=0.9), ("c",), "the draft is too slow (c = 0.90"),
        (candidate(alpha=0.7, v=3.0), ("v",), "verification is not free"),
        (candidate(alpha=0.3, c=0.6, v=2.0), ("alpha", "c", "v"), "α = 0.30) and the draft is"),
        (candidate(total=0.9), ("length",), "outputs of 20 tokens are too short"),
        (candidate(speedup=0.9, tau=1.5), ("length",), "with 1.5 tokens for each call"),
        # Tokens come as the rates of each position say, and these fall.
        (candidate(speedup=0.9, tau=1.5, unended=1.6), ("later",), "1.6 tokens for each call of"),
        (candidate(speedup=0.9, tau=1.5, unended=2.2), ("length",), "with 1.5 tokens for each"),
        # None of the three is bad by itself: the largest loss.
        (candidate(alpha=0.55, c=0.4, v=1.3), ("alpha",), "agreement is too low"),
        (candidate(alpha=0.9, c=0.48, v=1.45, gammas=(1,)), ("c",), "the draft is too slow"),
    ],
)
def test_reasons(found, causes, words):
    assert found.speedup_end_to_end <= 1
    assert reasons(found) == causes
    assert words in why_not(found)
    said = recommend([found])
    assert (said.draft, said.settings.gamma) == (None, 0)
    assert said.words.startswith("Use plain decoding: no draft here makes outputs come sooner")
    assert words in said.words


def test_what_would_change_it():
    """The α and the c that are named are those at which the prediction passes 1."""
    found = candidate(alpha=0.55, c=0.4, v=1.3)
    alpha, c = map(float, re.findall(r"(?:above|below) (\d\.\d+)", why_not(found)))

    def predicted(alpha=found.alpha, c=found.c):
        return candidate(alpha=alpha, c=c, v=found.v).predicted

    assert predicted(alpha=alpha - 0.01) < 1 < predicted(alpha=alpha + 0.01)
    assert predicted(c=c + 0.01) < 1 < predicted(c=c - 0.01)
    # As slow as the target: whatever it proposes, nothing is gained.
    assert "It would pay with c below" in why_not(candidate(alpha=0.9, c=1.0, v=1.1))
    # A verify pass of 9 steps is paid by neither.
    assert "It would pay" not in why_not(candidate(alpha=0.2, c=0.5, v=9.0))
    # Where nothing is ever accepted no c is low enough, whatever noise says of v.
    assert "c below" not in why_not(candidate(alpha=0.0, c=0.2, v=0.96))
    # By the rates of each position, which no one α says.
    fading = candidate(alpha=0.9, c=1.0, v=1.1, expected={"1": 1.5, "3": 1.6, "7": 1.6})
    (most,) = re.findall(r"below (\d\.\d+)", why_not(dataclasses.replace(fading, guesses=True)))
    assert float(most) == pytest.approx(0.4)
    assert "α above" not in why_not(dataclasses.replace(fading, c=0.3, guesses=True))
    slow = candidate(alpha=0.9, c=1.25, v=1.1)
    assert "c = 1.25: a draft step takes 1.25x as long as a target step" in why_not(slow)


def test_settings_say_what_was_timed():
    """They hold what the winner was timed with, and without one the first candidate."""
    known = {"batch_size": 1}
    for one in (candidate(alpha=0.9), candidate(alpha=0.2)):
        chosen = recommend([dataclasses.replace(one, tuned_for=known)])
        assert chosen.settings.tuned_for == known


@pytree
class OneAhead(ModelDrafter):
    """A good first token and nothing behind it, as a Medusa of one head."""

    guesses: ClassVar[bool] = True

    def begin(self, *known, lags=True):
        hidden, state = super().begin(*known, lags=lags)
        return jnp.pad(hidden, ((0, 0), (0, 1)), constant_values=1.0), state

    def extend(self, *known):
        hidden, state = super().extend(*known)
        return jnp.pad(hidden, ((0, 0), (0, 1))), state

    def logits(self, hidden):
        return jnp.where(hidden[..., -1:] > 0, super().logits(hidden[..., :-1]), -jnp.inf)


@pytest.mark.sweep
def test_gamma_by_the_rates_of_each_position(pair):
    """Where the first token is as good as the target's and no other comes, one token is drafted.
    α, which asks for first tokens alone, would take the longest draft."""
    gammas = (1, 2, 4)
    made = trial(pair.target, TEXTS[:4], max_new_tokens=BUDGET, gammas=gammas)
    longest = building.build(pair.target, OneAhead(pair.twin.model), gamma=4, sampling=Greedy())
    rows = made.inputs.stream(longest, TEXTS[:4])
    expected = metrics.tokens_by_position(rows, gammas)
    assert expected == {1: 2.0, 2: 2.0, 4: 2.0}
    ways = Lengths(made.inputs, longest, gammas, 1.0)
    chosen = ways.best(expected, Costs(0.1, [1.0] * 5))
    assert (chosen.gamma, chosen.tokens, chosen.method.gamma_max) == (1, 2.0, 1)
    # Where time is short, all lengths are timed in the loop of one, and race in it.
    ways.lengths = [4]
    shared = ways.best(expected, Costs(0.1, [1.0, 1.1, 1.2, 1.3, 1.4]))
    assert (shared.gamma, shared.method.gamma_max, shared.v) == (1, 4, pytest.approx(1.4))
    assert int(shared.method.policy.gamma) == 1
    assert shared.steps == pytest.approx({gamma: 1.4 + 0.1 * gamma for gamma in gammas})


SHAPE = "fixed(paths=((0,), (1,)), draw='without')"
FAST = candidate(alpha=0.9, name="big/fast", memory=300)
SLOW = candidate(alpha=0.3, c=0.5, name="slow")
SAME = dataclasses.replace(
    FAST, name="big/same", memory=200, speedup_end_to_end=0.97 * FAST.speedup_end_to_end
)
BROKEN = Candidate("broken", problem="No such directory: broken.")
LUCKY = candidate(name="lucky", speedup=1.2, choosing=2.0)
STEADY = candidate(name="steady", speedup=1.5, choosing=1.6)
ODD = dataclasses.replace(FAST, name="odd", doubts=("c = 2.90: too slow",), choosing=9.0)
CHAIN = candidate(alpha=0.8, total=1.5)
TREE = dataclasses.replace(CHAIN, tree=SHAPE, gamma=1, nodes=2, speedup_end_to_end=1.8)
NOISY = dataclasses.replace(candidate(speedup=1.2), speedup_low=0.97, speedup_high=1.4)


def pair_of(first, second):
    """Two drafts of which the second needs less memory."""
    return [
        candidate(name=name, memory=memory, speedup=total, total=total)
        for name, memory, total in (("a", 300, first), ("b", 100, second))
    ]


@pytest.mark.parametrize(
    ("candidates", "draft", "words"),
    [
        (
            [SLOW, FAST, BROKEN], "big/fast",
            [f"Use fast with gamma={FAST.gamma}", f"{FAST.speedup:.2f} times as fast end to end",
             "slow, 0.", "broken cannot draft: No such directory"],
        ),
        # Of equals the smaller, or the chain, which is simpler.
        ([SLOW, FAST, SAME], "big/same", ["No slower within 5%, but larger: fast."]),
        ([CHAIN, TREE], "models/small", ["Use small with a tree of 2 nodes, 1 deep: ",
                                         f'tree="{SHAPE}"']),
        (
            [CHAIN, dataclasses.replace(TREE, speedup_end_to_end=1.52)], "models/small",
            ["No slower within 5%, but larger: small with a tree of 2 nodes, 1 deep."],
        ),
        ([CHAIN, Candidate("one", problem="it cannot", tree="none")], "models/small",
         ["one cannot branch: it cannot"]),
        ([BROKEN], None, ["Use plain decoding: no draft can be used.\nbroken"]),
        # One was lucky on the inputs that choose: its figures are of the others.
        ([LUCKY, STEADY], "lucky", ["Use lucky with", "1.20 times as fast end to end"]),
        ([dataclasses.replace(LUCKY, speedup_end_to_end=0.99), STEADY], "steady", []),
        ([candidate(speedup=1.5, choosing=1.01)], None, []),
        # Nothing follows from timings that contradict themselves, or from a busy machine.
        (
            [ODD], None,
            ["No draft is recommended: the timings contradict themselves.\nodd: ",
             "nothing follows from them (c = 2.90: too slow)"],
        ),
        ([ODD, FAST], "big/fast", ["odd: its timings contradict themselves"]),
        (
            [FAST, dataclasses.replace(FAST, load=5.2)], None,
            ["No draft is recommended. The machine was busy: ",
             f"\nBy these timings it would be: Use fast with gamma={FAST.gamma}: "],
        ),
        # Plain decoding is a candidate: nothing is recommended that is not faster, however small.
        (pair_of(1.03, 0.985), None,
         ["a, 1.03 times as fast end to end: that is no more than timings vary"]),
        (pair_of(1.07, 0.985), "a", ["1.07 times as fast end to end"]),
        (pair_of(1.07, 1.03), "a", []),
        (pair_of(1.08, 1.06), "b", ["1.06 times as fast end to end"]),
        (pair_of(0.9, 1.3), "b", []),
        # A median of 1.2 says little where a quarter of the repeats was slower.
        ([NOISY], None,
         ["1.20 times as fast end to end: that is no more than timings vary (quartiles"]),
        ([dataclasses.replace(NOISY, speedup_low=1.1)], "models/small", []),
    ],
)  # fmt: skip
def test_recommendation(candidates, draft, words):
    """In any order of the candidates; γ and tree are the winner's."""
    for order in (candidates, candidates[::-1]):
        said = recommend(order)
        assert said.draft == draft
        assert [one for one in words if one not in said.words] == []
        won = f"with a tree of {TREE.nodes}" in said.words.split(":")[0]
        assert said.settings.tree in ([SHAPE] if won else [None, "chain"])
        assert (said.settings.gamma == 0) == (draft is None)


@pytest.mark.slow
def test_trees_are_tried_beside_chains(pair):
    options = {"max_new_tokens": 12, "gammas": (1,), "timed_inputs": 2, "repeats": 1}
    drafts = [pair.draft, "lookup"]
    chosen = specjax.select(pair.target, drafts, TEXTS[:6], nodes=(1, 3), **options)
    chain, tree, lookup, refused = chosen.candidates
    assert (chain.tree, lookup.tree) == ("", "")
    assert trees.parse(tree.tree).nodes == tree.nodes
    assert tree.nodes in (1, 3)
    assert (chain.alpha, chain.name) == (tree.alpha, tree.name)
    assert min(tree.speedup, tree.predicted, tree.tau) > 0
    assert "drafts chains alone" in refused.problem
    assert f"{refused.name} cannot branch: " in chosen.words


@pytest.mark.sweep
def test_what_is_chosen_decodes(pair, monkeypatch):
    """By the last line of `select`'s docstring. The draft is the one that was given; n-grams have
    the counts that they were measured with, which lie beside no target."""
    speedups = {}

    def measure(self, draft, tree=False):
        name = drafters.name_of(draft)
        shape = "fixed(paths=((0,), (1,)), draw='without')" if tree else ""
        speedup = speedups[name] + (0.5 if tree else 0.0)
        return candidate(name=name, speedup=speedup, tree=shape, gammas=(1,), load=0.0)

    monkeypatch.setattr(Candidates, "measure", measure)
    rows = [types.SimpleNamespace(tokens=[3, 4, 5])]
    monkeypatch.setattr(Inputs, "stream", lambda *_: rows)
    run = {"max_new_tokens": 4}
    drafts = [pair.draft, "bigram", "lookup"]
    plain, kept = specjax.generate(pair.target, None, TEXTS[:2], **run), []
    for best in ("lookup", "bigram", pair.draft.name, None):
        speedups = {drafters.name_of(draft): 0.9 for draft in drafts} | {best: 2.0}
        nodes = (2,) if best == pair.draft.name else ()
        chosen = specjax.select(pair.target, drafts, TEXTS, nodes=nodes, **run)
        found = specjax.generate(
            pair.target, chosen.draft, TEXTS[:2], settings=chosen.settings, **run
        )
        assert found.tokens == plain.tokens
        assert (chosen.settings.tree or "chain").startswith("fixed" if nodes else "chain")
        assert chosen.settings.gamma == (best is not None)
        kept.append(chosen.draft)
    assert kept[0] == "lookup"
    assert isinstance(kept[1], specjax.drafters.ngram.Bigram)
    assert kept[2] is pair.draft
    assert kept[3] is None


# Which drafts to try.


def test_smaller_members(pair, tmp_path):
    assert smaller_members("google-t5/t5-large") == ["google-t5/t5-small", "google-t5/t5-base"]
    assert smaller_members("gpt2") == ["distilbert/distilgpt2"]
    assert smaller_members("Qwen/Qwen2.5-1.5B-Instruct") == ["Qwen/Qwen2.5-0.5B-Instruct"]
    assert smaller_members("gemma-3-4b-pt") == ["google/gemma-3-270m", "google/gemma-3-1b-pt"]
    assert smaller_members("t5gemma-b-b-ul2") == ["google/t5gemma-s-s-ul2"]
    # Beside a directory: of the same kind, with fewer parameters; whatever else lies there.
    assert smaller_members(pair.target.name) == [pair.draft.name, pair.twin.name]
    for unknown in ("t5-small", "somebody/model", pair.draft.name):
        with pytest.raises(ValueError, match=r"No smaller model is known for .*lookup"):
            smaller_members(unknown)


# Measured.


@pytree
class Slowed:
    """A model that gives the same and takes milliseconds more in every call."""

    model: LanguageModel
    work: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})
    turns: int = dataclasses.field(metadata={"static": True})

    def start(self, inputs, buffer_len):
        return self.model.start(inputs, buffer_len)

    def __call__(self, tokens, start, context, cache):
        hidden, cache = self.model(tokens, start, context, cache)
        nothing = jnp.minimum(jnp.abs(hidden[0, 0, 0]), 0.0)  # 0, which the compiler cannot know
        done = jax.lax.fori_loop(0, self.turns, lambda _, x: x @ self.work, self.work + nothing)
        return hidden + jnp.minimum(jnp.abs(done[0, 0]), 0.0), cache

    def logits(self, hidden):
        return self.model.logits(hidden)[..., : self.vocab_size]


def slowed(checkpoint, name, turns):
    model = Slowed(checkpoint.model, jnp.eye(256), checkpoint.model.vocab_size, turns)
    return dataclasses.replace(checkpoint, model=model, name=name)


@pytest.mark.slow
def test_selection_where_the_answer_is_known(pair, monkeypatch):
    """The twin agrees always and costs little, the draft agrees less, the slow twin costs more than
    the target: the twin wins, with the longest draft. Each is freed before the next comes.
    """
    target, alive = slowed(pair.target, "target", 4), []
    load = checkpoints.load

    def watched(name, **options):
        assert all(model() is None for model in alive)
        loaded = load(name, **options)
        alive.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(checkpoints, "load", watched)
    monkeypatch.setattr(doubts, "load_average", lambda: 0.0)
    drafts = [pair.draft.name, pair.twin.name, slowed(pair.twin, "slow twin", 12), "/nowhere"]
    options = {"max_new_tokens": BUDGET, "gammas": (1, 4), "timed_inputs": 4, "repeats": 3}
    chosen = specjax.select(target, drafts, TEXTS, minutes=0, **options)
    draft, twin, slow, missing = chosen.candidates
    assert len(alive) == 2
    assert (twin.alpha, twin.agreement, twin.gamma) == (1, 1, 4)
    assert twin.c < 1 < slow.c
    wanted = specjax.measure_alpha(pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET)
    assert (draft.alpha, draft.alpha_low) == (wanted.value, wanted.low)
    assert (chosen.draft, chosen.settings.gamma) == (pair.twin.name, 4)
    assert twin.speedup_end_to_end > 1.3 > 1 > slow.speedup_end_to_end
    assert reasons(slow) == ("c",)
    assert "No such directory: /nowhere" in missing.problem
    assert twin.parameters == sum(x.size for x in jax.tree.leaves(pair.twin.model))
    # Parameters of both and caches for 8 rows; of slow twins the ballast too.
    assert twin.memory > 4 * (256**2 + 2 * twin.parameters)
    assert slow.memory == twin.memory + 4 * 256**2


def test_a_prediction_counts_what_lies_between_the_phases(pair, monkeypatch):
    """On a clock by which a call takes .05, a token 1, a draft step .375 and a verify pass 1.13; a
    round takes .33 between these, which no phase shows that is timed alone."""
    clocks.of_rounds(monkeypatch, 0.375, 1.13 + 0.33)
    options = {"max_new_tokens": BUDGET, "gammas": (1, 3), "timed_inputs": 4, "repeats": 1}
    (found,) = specjax.select(pair.target, [pair.twin], TEXTS[:4], minutes=0, **options).candidates
    assert (found.gamma, found.doubts) == (3, ())
    assert (found.c, found.v) == (pytest.approx(0.375, rel=0.02), pytest.approx(1.46, rel=0.02))
    assert found.predicted == pytest.approx(found.speedup, rel=0.03)
    assert found.speedup == pytest.approx(4 / (3 * 0.375 + 1.46), rel=0.03)


@pytest.mark.sweep
def test_counts_are_of_inputs_that_are_not_measured(pair):
    """Over the outputs of the first half; and α at temperature 1 beside the greedy agreement."""
    found = trial(
        pair.target, ["", *TEXTS], ["bigram"], sampling=specjax.Sampling(), key=0,
        max_new_tokens=BUDGET, timed_inputs=2, repeats=1,
    ).measure("bigram")  # fmt: skip
    key = apart(jax.random.key(0))
    generate = functools.partial(
        specjax.generate, pair.target, None, max_new_tokens=BUDGET, temperature=1.0, key=key
    )
    size, start = pair.target.model.vocab_size, pair.target.start_id
    bigram = specjax.drafters.ngram.bigram(
        specjax.drafters.ngram.count(generate(TEXTS[:4]).tokens, size, start)
    )
    outputs = generate(TEXTS[4:]).tokens
    both = [
        metrics.alpha_of(
            building.build(pair.target, bigram, gamma=1, sampling=specjax.Sampling(t)),
            pair.target,
            TEXTS[4:],
            outputs,
        ).value
        for t in (1.0, 0.0)
    ]
    assert [found.alpha, found.agreement] == both
    assert found.parameters == 0
    assert found.tokens == sum(len(row) for row in outputs) / 4
    assert (
        "for 4 of the inputs, and all candidates are measured on the 4 others" in found.remarks[0]
    )
    sure = {"speedup_low": 2.0, "speedup_end_to_end": 2.0, "choosing": 2.0}
    praised = dataclasses.replace(found, **sure, doubts=(), load=0.0)
    assert found.remarks[0] in recommend([praised]).words


def test_an_input_that_is_given_twice_is_not_counted_and_measured(pair):
    """A list that repeats itself: its second half is its first."""
    made = trial(pair.target, [*TEXTS, *(f"{text} " for text in TEXTS)], ["unigram"])
    assert made.inputs.counted == [f"{text} " for text in TEXTS[: len(TEXTS) // 2]]
    assert [text.strip() for text in made.inputs.measured] == 2 * TEXTS[len(TEXTS) // 2 :]
    with pytest.raises(ValueError, match=r"1 different input\(s\) are too few"):
        trial(pair.target, ["one", "one "], ["bigram"])


def test_inputs_may_be_token_ids(pair):
    """Repeated and empty lists of ids are handled as repeated and blank texts."""
    ids = [[3, 4, 5], (6, 7), [8], [9, 10], [3, 4, 5]]
    made = trial(pair.target, [*ids, [], "one"], ["unigram"])
    assert made.inputs.counted == [[3, 4, 5], (6, 7)]
    assert made.inputs.measured == [[8], [9, 10], "one"]
    assert all(len(output) > 0 for output in made.inputs.outputs)


def test_ngrams_need_inputs_that_are_kept_for_them(pair):
    """Without such a draft a trial measures on all inputs, and has none to count."""
    found = trial(pair.target, TEXTS, max_new_tokens=BUDGET).measure("bigram")
    assert "n-grams count outputs of inputs that nothing is measured on" in found.problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gammas": (0, 1)}, "gammas=0 must be a whole number in"),
        ({"gammas": ("a",)}, "gammas='a' must be a whole number in"),
        ({"gammas": 3}, r"gammas=3 must be a list .* write \(3,\)"),
        ({"gammas": ()}, r"gammas=\(\) must be"),
        ({"nodes": (0,)}, "nodes=0"),
        ({"repeats": 0}, "repeats=0 must be a whole number ≥ 1"),
        ({"timed_inputs": 0}, "timed_inputs=0 must be a whole number ≥ 1"),
        ({"texts": ["one", " "]}, r"1 input\(s\) are too few"),
    ],
)
def test_options_out_of_range(pair, options, message):
    with pytest.raises(ValueError, match=message):
        trial(pair.target, **{"texts": TEXTS, **options})


def test_a_name_is_no_list_of_drafts(pair):
    """It would be taken for its letters."""
    with pytest.raises(ValueError, match=r"drafts='lookup' should be a list, such as \['lookup'\]"):
        specjax.select(pair.target, "lookup", TEXTS)


# The command.


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS))
    return functools.partial(
        command_line.run, monkeypatch, capsys, "specjax select",
        "--config=configs/select.py", f"--input={file}", "--config.max_new_tokens=24",
        "--config.gammas=(1,)", "--config.timed_inputs=2", "--config.repeats=1",
        "--config.minutes=0",
    )  # fmt: skip


@pytest.mark.slow
def test_command(command, pair, tmp_path, monkeypatch):
    """Without drafts the two beside the target; the rows are kept, and gone on from."""
    work = tmp_path / "work"
    run = functools.partial(command, f"--config.target={pair.target.name}", f"--workdir={work}")
    first = run()
    assert first.status == 0, first.stderr
    said = [line.split("] ")[1] for line in first.progress if "] still" not in line]
    assert said[0] == f"loading the target {pair.target.name}"
    assert [line for line in said if "loading " in line[5:]] == [
        "draft (1 of 2): loading draft", "twin (2 of 2): loading twin"
    ]  # fmt: skip
    assert "draft (1 of 2): timing plain decoding and speculative, turn 1 of 1" in said
    results = work / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["name"] for row in rows] == [pair.draft.name, pair.twin.name]
    assert [row["alpha"] for row in rows][1] == 1
    said = recommend([Candidate(**{f.name: row[f.name] for f in dataclasses.fields(Candidate)})
                      for row in rows])  # fmt: skip
    assert first.stdout.endswith(said.words + "\n")
    for heading in ("draft", "α", "agree", "predicted", "memory", "plain decoding"):
        assert heading in first.stdout
    monkeypatch.setattr(checkpoints, "load", None)  # nothing is left to measure
    again = run(f"--settings={tmp_path / 'settings.json'}")
    assert (again.status, again.stdout) == (0, first.stdout)
    assert specjax.Settings.load(tmp_path / "settings.json").gamma == said.settings.gamma
    other = run("--config.seed=1")
    assert other.status == 1
    assert "holds rows of another command" in other.stderr


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.target=", "No target"),
        ("--config.dtype=float23", "dtype='float23'"),
        ("--config.target=somebody/model", "No smaller model is known for somebody/model"),
        ("--config.draft=x", 'Did you mean "drafts"'),
        ("--config.repeats=0", "repeats=0 must be a whole number"),
        ("--config.timed_inputs=0", "timed_inputs=0 must be a whole number"),
        ("--config.minutes=-1.0", "minutes=-1.0 must be a number"),
    ],
)
def test_errors_in_one_line(command, flag, words):
    outcome = command("--config.target=t5-base", flag)
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_settings_never_replace_a_file_that_is_read(command, tmp_path):
    given = f"--settings={tmp_path / 'in.txt'}"
    outcome = command("--config.target=t5-base", "--config.drafts=lookup", given)
    assert "which is the file of --input=" in outcome.stderr
    assert (tmp_path / "in.txt").read_text() == "\n".join(TEXTS)


def test_names():
    assert named.split("a/b, lookup(max_ngram=2, min_ngram=1),,m:f") == [
        "a/b", "lookup(max_ngram=2, min_ngram=1)", "m:f"
    ]  # fmt: skip
    assert drafters.name_of("a/b") == "a/b"
    assert drafters.name_of(specjax.drafters.ngram.PromptLookup(5)) == "PromptLookup"
    assert short("models/small/") == "small"
