"""A drafter made of drafters: exact, one of them at a time, and none of them behind the text."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import specjax
import test_loops
from eagles import eagle_of, target_of
from experiments.train import medusa
from pairs import TEXTS
from reference import sequence_distribution, total_variation
from specjax import drafters, loop, speculative
from specjax.drafters import ngram
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.choices import Choice, Evidence, bandit, fixed, parse, recent
from specjax.drafters.switch import Latecomer, Switch, switch
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.replay import rollouts
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.support import named
from specjax.testing.enumeration import output_distribution
from table_models import chain, inputs_of, logits_after, random_table
from test_observe import Echo
from tiny_models import slow
from toy_policies import Erratic


@pytree
class Fickle(Choice):
    """Scores that depend on all past rounds through numbers modulo 11."""

    def init(self, rows, drafters):
        return jnp.broadcast_to(jnp.arange(drafters, dtype=jnp.int32), (rows, drafters))

    def scores(self, state):
        return (state * 7 % 5).astype(jnp.float32)

    def update(self, state, seen, gamma_max):
        passed, tested = (x.astype(jnp.int32) for x in seen)
        return (state * 3 + passed * 5 + tested + 1) % 11


@pytree
class Scripted(Choice):
    """Drafters written down for each round and row."""

    plan: Array  # (R, B) int32

    def init(self, rows, drafters):
        round_ = jnp.zeros((rows,), jnp.int32)
        return round_, jax.nn.one_hot(self.plan[0], drafters, dtype=jnp.float32)

    def scores(self, state):
        return state[1]

    def update(self, state, seen, gamma_max):
        then = (state[0] + 1) % len(self.plan)
        rows = jnp.arange(len(then), dtype=jnp.int32)
        return then, jax.nn.one_hot(self.plan[then, rows], state[1].shape[1], dtype=jnp.float32)


CHOICES = {"fixed": fixed(), "recent": recent(), "bandit": bandit(), "fickle": Fickle()}


def of(choice, *made) -> Switch:
    """A switch without a checkpoint."""
    return Switch(made, choice, made[0].vocab_size, (0,) * len(made))


def lookup(size) -> ngram.PromptLookup:
    return ngram.PromptLookup(size, max_ngram=2)


def model(seed, size=3, dtype=jnp.float64) -> Latecomer:
    return Latecomer(random_table(seed, size, dtype=dtype))


def bigram() -> ngram.Bigram:
    made = ngram.bigram(ngram.count([[0, 1, 1, 2], [0, 0, 1, 2], [0, 2]], 3, 1))
    return jax.tree.map(lambda x: x.astype(float) if x.dtype == jnp.float32 else x, made)


# The output's distribution.


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("choice", "temperature", "policy"),
    [
        *(slow((name, 1.0, constant(2))) for name in CHOICES),
        ("bandit", 0.7, Erratic()),
        slow(("fickle", 0.0, Erratic())),
    ],
)
def test_enumerated_distribution_is_the_targets(choice, temperature, policy):
    """Lookup, a model and bigrams; all outputs of up to 5 tokens over 3, EOS included: TV < 1e-12.
    Rows choose for themselves, and end apart."""
    with jax.enable_x64(True):
        target, inputs, distribution = random_table(1), inputs_of([[1, 0]]), Sampling(temperature)
        drafter = of(CHOICES[choice], lookup(3), model(2), bigram())
        method = speculative.Speculative(
            target, drafter, Token(), policy, distribution, jnp.int32([2]), 2
        )
        expected = sequence_distribution(target, inputs, distribution, {2}, 5)
        assert total_variation(output_distribution(method, inputs, 5), expected) < 1e-12


# Who drafts, and what of.


def by_rounds(method, inputs, budget):
    """(the tokens before, the state before, the state after, the round) of each round."""
    contexts, state = test_loops.begin(method, inputs, budget)
    step = jax.jit(speculative.step)
    while not np.all(state.done):
        after, round_ = step(method, contexts, state)
        yield jax.device_get((state.replace(keys=()), after.replace(keys=()), round_))
        state = after


@pytest.mark.sweep
@pytest.mark.parametrize("late", [True, False])
def test_every_row_gets_the_distributions_of_its_drafter(late):
    """Three rows that choose apart, by a plan: in each round the drafts' distributions are those
    of the chosen table after the whole text, though it was idle for rounds before. A table's
    distributions depend on all that was fed, and where."""
    target, *tables = (random_table(seed, 3, dtype=jnp.float32) for seed in (1, 2, 3))
    kind = Latecomer if late else ModelDrafter
    plan = jnp.int32([[0, 1, 0], *[[1, 1, 1]] * 6, [0, 1, 1], [1, 1, 0], [1, 0, 1]])
    inputs = inputs_of([[1], [0, 2, 1], [2, 2]])
    drafter = of(Scripted(plan), *map(kind, tables))
    method = dataclasses.replace(
        test_loops.method_of(target, tables[0], chosen=Sampling(1.0), gamma_max=2), drafter=drafter
    )
    idle, longest = np.zeros(3, int), 0
    for before, after, round_ in by_rounds(method, inputs, 30):
        chosen = after.drafter.chosen
        for row in np.flatnonzero(~before.done):
            known = before.tokens[row, : before.length[row]].tolist()
            count = int(round_.verified[row])
            drafts = round_.drafts.tokens[row].tolist()
            prefixes = [tuple(known + drafts[:i]) for i in range(count)]
            if count:
                longest = max(longest, idle[row] if chosen[row] == 0 else 0)
                idle[row] = 0 if chosen[row] == 0 else idle[row] + round_.emitted[row]
                table = tables[chosen[row]]
                logits = logits_after(table, inputs, prefixes, 50)
                expected = jax.nn.log_softmax(logits, axis=-1)
                np.testing.assert_allclose(
                    round_.drafts.logprobs[row, :count], expected, rtol=1e-4, atol=1e-6
                )
    assert longest > 8  # tokens that the first drafter missed


@pytree
class Counted(Drafter):
    """Counts its calls in its state."""

    inner: Drafter

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def start(self, inputs, buffer_len):
        context, state = self.inner.start(inputs, buffer_len)
        return context, (state, jnp.int32(0))

    def observe(self, tokens, start, hidden, count, context, state):
        return self.inner.observe(tokens, start, hidden, count, context, state[0]), state[1]

    def begin(self, tokens, length, context, state, *, lags=True):
        hidden, inner = self.inner.begin(tokens, length, context, state[0], lags=lags)
        return hidden, (inner, state[1] + 1)

    def extend(self, token, position, context, state):
        hidden, inner = self.inner.extend(token, position, context, state[0])
        return hidden, (inner, state[1] + 1)

    def logits(self, hidden):
        return self.inner.logits(hidden)


def test_at_batch_1_only_the_chosen_one_runs():
    """By a plan: each round adds three calls to one of three drafters, and none to the others."""
    tables = [random_table(seed, 3, dtype=jnp.float32) for seed in (1, 2, 3, 4)]
    plan = [0, 0, 2, 1, 1, 0]
    drafter = of(Scripted(jnp.int32(plan)[:, None]), *(Counted(Latecomer(t)) for t in tables[1:]))
    method = dataclasses.replace(
        test_loops.method_of(tables[0], tables[1], chosen=Sampling(1.0)), drafter=drafter
    )
    rounds = list(by_rounds(method, inputs_of([[1, 0]]), 30))[:6]
    for which, (before, after, _) in zip(plan, rounds, strict=True):
        pairs = zip(before.drafter.states, after.drafter.states, strict=True)
        calls = [int(new[1] - old[1]) for old, new in pairs]
        assert calls == [3 * (i == which) for i in range(3)]


@pytest.mark.sweep
def test_what_does_not_run_costs_nothing(on_cpu, monkeypatch):
    """In the compiled loop of T5s no cache is copied, and a round has no matrix products outside
    of passes and of loops that the choice decides about. Eight queries would make a bias as large
    as a cache."""
    monkeypatch.setattr(Latecomer, "stride", 6)
    made = test_loops.target()
    drafter = of(recent(), Latecomer(made), Latecomer(test_loops.near(made)))
    method = test_loops.method_of(made, made, gamma_max=4)
    method = dataclasses.replace(method, drafter=drafter, passes=(2,))
    arguments = test_loops.begin(method, test_loops.translate([[3, 1]]), 24, buffer_len=512)
    text = loop.decode.lower(method, *arguments).compile().as_text()
    assert re.search(r"\[1,2,(8,512|512,8)\]", text)
    assert not re.search(r"= f32\[1,2,(8,512|512,8)\]\S* copy\(", text)
    (body,) = (part for part in text.split("\n\n") if " conditional(" in part)
    assert "dot_general" in text
    assert "dot_general" not in body


def test_idle_drafters_see_the_target():
    """One that is NaN unless it was shown the target's state of every known token."""
    target, small = (random_table(s, 5, forbidden=0, dtype=jnp.float32) for s in (1, 2))
    plan = jnp.int32([[0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]])
    drafter = of(Scripted(plan), Echo(), Latecomer(small))
    method = dataclasses.replace(
        test_loops.method_of(target, small, chosen=Sampling(1.0)), drafter=drafter
    )
    state = test_loops.run(method, inputs_of([[1], [0, 2, 3, 1], [4, 4]]), 20)
    assert state.draft_finite
    assert state.stats.accepted.sum() > 0


@pytest.mark.sweep
def test_the_first_that_speaks(pair):
    """Fixed: the first alone drafts if it is always active; else the next helps out."""
    options = {"temperature": 1.0, "key": 0, "gamma": 3, "max_new_tokens": 24}
    first = switch((pair.draft, "lookup"), pair.target, "fixed")
    alone = specjax.generate(pair.target, pair.draft, TEXTS, **options)
    assert specjax.generate(pair.target, first, TEXTS, **options).rows == alone.rows
    silent = ngram.Unigram(jnp.full((pair.target.model.vocab_size,), -jnp.inf))
    helped = switch((silent, pair.draft), pair.target, "fixed")
    assert specjax.generate(pair.target, helped, TEXTS, **options).rows == alone.rows


def test_rollouts_of_a_switch_are_refused(pair):
    """Which drafter drafts depends on rounds before, and a rollout has none."""
    made = switch((pair.draft, "lookup"), pair.target, "recent")
    how = {"gamma_max": 2, "sampling": Sampling(0.0), "max_new_tokens": 4}
    with pytest.raises(ValueError, match="record its drafters one by one"):
        rollouts.record(pair.target, made, TEXTS[:1], [[1, 2]], key=jax.random.key(0), **how)


@pytest.mark.sweep
def test_drafters_that_read_the_target(pair):
    """An EAGLE-3, which asks for states of more layers, beside one that reads the last, and a
    model: tokens are the target's."""
    heads = medusa.init(pair.target.model, heads=3, hydra=True)
    eagle3 = eagle_of(pair.target, 3, taps=(0, 1, 1))
    made = switch((eagle3, heads, pair.draft), pair.target, Fickle())
    options = {"gamma": 3, "max_new_tokens": 16}
    found = specjax.generate(pair.target, made, TEXTS, **options)
    assert found.tokens == specjax.generate(pair.target, None, TEXTS, max_new_tokens=16).tokens
    assert found.accepted.sum() > 0
    with pytest.raises(ValueError, match="one such drafter"):
        switch((eagle3, eagle3), pair.target)
    other = target_of("gpt")
    with pytest.raises(ValueError, match="belongs to the target"):
        specjax.generate(other, made, [[1, 2]])


# What is learned.


def test_what_a_round_shows():
    """A cycle of 3 at temperature 0, γ = 3, known 0 1 2 0. The model errs after 1, lookup never.

    Of the model, which drafts, two tokens are tested and one passes, whatever the choice. A choice
    that watches tests lookup at both verified positions.
    """
    target, erring = chain([1, 2, 0]), chain([1, 0, 0])
    found = {}
    for name, choice in {"recent": recent(), "bandit": bandit()}.items():
        drafter = of(choice, Latecomer(erring), lookup(3))
        method = dataclasses.replace(test_loops.method_of(target, erring), drafter=drafter)
        _, after, round_ = next(by_rounds(method, inputs_of([[0, 1, 2, 0]]), 20))
        assert (round_.verified.tolist(), round_.accepted.tolist()) == ([3], [1])
        found[name] = after.drafter.choice.seen
    for seen in found.values():
        assert (seen.passed[0, 0], seen.tested[0, 0]) == (1, 2)
    assert (found["recent"].passed[0, 1], found["recent"].tested[0, 1]) == (0, 0)
    assert (found["bandit"].passed[0, 1], found["bandit"].tested[0, 1]) == (2, 2)


@pytest.mark.sweep
def test_chances_of_a_free_drafter():
    """At temperature 1 the bandit adds Σ min(p, q) at each verified position, for bigrams that are
    spread too; not beyond the first rejection, nor behind an EOS."""
    with jax.enable_x64(True):
        target, counts = random_table(1), bigram()
        drafter = of(bandit(memory=0.0), model(2), counts)
        method = dataclasses.replace(
            test_loops.method_of(target, target, chosen=Sampling(1.0), eos_ids=jnp.int32([2, 2])),
            drafter=drafter,
        )
        inputs = inputs_of([[1, 0], [0], [1, 1, 2], [1, 1], [0, 1], [0, 0, 1], [1, 0, 0]])
        q = jax.nn.softmax(counts._after(jnp.arange(3, dtype=jnp.int32)), axis=-1)
        several = cut = 0
        for before, after, round_ in by_rounds(method, inputs, 8):
            for row in np.flatnonzero(~before.done):
                end = int(before.length[row]) - 1 + int(round_.emitted[row])
                known = after.tokens[row, before.length[row] - 1 : end]
                cut += round_.emitted[row] <= round_.accepted[row]
                p = np.exp(round_.target_logprobs[row, : len(known)])
                expected = np.minimum(p, q[known]).sum()
                seen = after.drafter.choice.seen
                np.testing.assert_allclose(seen.passed[row, 1], expected, rtol=1e-5)
                assert seen.tested[row, 1] == len(known)
                several += len(known) > 1
        assert several > 3
        assert cut > 1


def scores(choice, rounds, gamma_max=2):
    """After rounds that showed (passed, tested) of each drafter."""
    state = choice.init(1, len(rounds[0]))
    for seen in rounds:
        pairs = np.array(seen, np.float32).T[:, None, :]
        state = choice.update(state, Evidence(*map(jnp.asarray, pairs)), gamma_max)
    return np.asarray(choice.scores(state))[0]


def test_scores_by_hand():
    """Tokens per time of 2 drafted tokens: (1 + α + α²)/(1 + 2·cost)."""

    def rate(alpha, cost=0.0):
        return (1 + alpha + alpha**2) / (1 + 2 * cost)

    rounds = [[(1, 2), (0, 0)], [(2, 2), (0, 1)]]
    found = scores(recent((0.1, 0.0), memory=0.5, prior=0.8, weight=1.0), rounds)
    np.testing.assert_allclose(found, [rate((2.5 + 0.8) / 4, 0.1), rate(0.8 / 2)], rtol=1e-6)
    found = scores(bandit(memory=0.5, width=0.1), rounds)
    radius = 0.1 * np.sqrt(2 * np.log(1 + 4))
    alphas = [2.5 / 3 + radius / np.sqrt(3), radius]
    np.testing.assert_allclose(found, [rate(alpha) for alpha in alphas], rtol=1e-6)
    assert scores(bandit(), [[(0, 1), (0, 0)]])[1] == rate(1.0)  # never tested


def test_choices_settle_and_come_back():
    """A cycle of 4 that the model knows and lookup must see first; costs make lookup the better one
    then. With `recent` it is chosen in the end too, since an idle drafter is tried again."""
    target = chain([1, 2, 3, 0])
    for choice in (recent((0.3, 0.0), prior=1.0), bandit((0.3, 0.0))):
        drafter = of(choice, Latecomer(target), lookup(4))
        method = dataclasses.replace(test_loops.method_of(target, target), drafter=drafter)
        chosen = [int(after.drafter.chosen[0]) for _, after, _ in by_rounds(
            method, inputs_of([[0]]), 60)]  # fmt: skip
        assert chosen[0] == 0
        assert chosen[-3:] == [1, 1, 1]


# Names.


@pytest.mark.sweep
def test_by_name(pair, tmp_path):
    """Everywhere a draft can be named, with what it is made of; and what is wrong with it."""
    text = f"switch(drafts=('lookup(max_ngram=2)', '{pair.draft.name}'), choice='recent')"
    made = drafters.load(text, pair.target)
    assert made.drafters[0] == ngram.PromptLookup(pair.target.model.vocab_size, 2)
    expected = switch(("lookup(max_ngram=2)", pair.draft), pair.target)
    options = {"max_new_tokens": 16, "temperature": 1.0, "key": 0}
    wanted = specjax.generate(pair.target, expected, TEXTS, **options)
    assert specjax.generate(pair.target, text, TEXTS, **options).rows == wanted.rows
    assert drafters.parameters(made, pair.target) == drafters.parameters(pair.draft, pair.target)
    assert not drafters.counts_ngrams(text)
    assert drafters.counts_ngrams(text.replace("lookup(max_ngram=2)", "bigram"))
    assert named.split(f"unigram, {text}") == ["unigram", text]
    assert parse("recent(memory=0.5)").memory == 0.5
    with pytest.raises(ValueError, match=r"ngram\.npz"):
        drafters.load(text.replace("lookup(max_ngram=2)", "bigram"), pair.target)
    for wrong, words in {
        "switch(drafts=('lookup',))": "two or more",
        "switch(drafts='lookup')": "two or more",
        "switch(drafts=('lookup', 'nowhere:no'))": "no module 'nowhere'",
        "switch(drafts=('lookup', 'lookup'), choice='best')": "no choice 'best'",
        "switch(drafts=('lookup', 'lookup'), choice='recent(memory=2)')": "memory=2 must be",
    }.items():
        with pytest.raises(ValueError, match=words):
            drafters.load(wrong, pair.target)
    uneven = switch(("lookup", "lookup"), pair.target, recent((0.1, 0.2, 0.3)))
    with pytest.raises(ValueError, match="one for each of the 2 drafters"):
        specjax.generate(pair.target, uneven, TEXTS)
    with pytest.raises(ValueError, match="chains alone"):
        specjax.generate(pair.target, made, TEXTS, tree="fixed(2)")
