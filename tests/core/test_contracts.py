"""What own parts must return: refused by name, before anything is compiled, or once it is seen."""

import jax
import jax.numpy as jnp
import pytest

from specjax import generate, loop, rules
from specjax.checkpoints.own import wrap
from specjax.decoding import building, starting
from specjax.drafters.base import Drafter
from specjax.drafters.ngram import PromptLookup
from specjax.policies import Policy, both, by_batch_size
from specjax.pytrees import pytree
from specjax.sampling import Filter, Sampling
from table_models import random_table

TARGET, DRAFT = (wrap(random_table(seed, 5), name=str(seed)) for seed in (1, 2))
TEXTS = [[1, 0], [0, 1, 1]]
ABSENT = object()


class Repeats(Drafter):
    """Drafts the last token again; what is faulty inherits from it."""

    vocab_size = 5

    def start(self, inputs, buffer_len):
        return (), jnp.zeros(inputs.prompt_len.shape, jnp.int32)

    def begin(self, tokens, length, context, state, *, lags=True):
        return self._again(tokens[:, 0]), state

    def extend(self, token, position, context, state):
        return self._again(token), state

    def logits(self, hidden):
        return hidden

    def _again(self, token):
        return jnp.where(token[:, None] == jnp.arange(5)[None, :], 2.0, 0.0)


BASES = {
    "policy": Policy,
    "rule": rules.Token,
    "draft": Repeats,
    "filters": Filter,
}


def faulty(argument, **functions):
    """The arguments of `generate` with a part `Mine`, whose functions are faulty."""
    own = {name: function for name, function in functions.items() if function is not ABSENT}
    bases = (BASES[argument],) if ABSENT not in functions.values() else ()
    part = pytree(type("Mine", bases, {"exact": True} | own))()
    return {argument: (part,) if argument == "filters" else part}


def decode(draft=DRAFT, **options):
    options = {"temperature": 1.0, "key": 0, "max_new_tokens": 4, "gamma": 2} | options
    return generate(TARGET, draft, TEXTS, **options)


def like(change, base, name):
    """A function whose results are changed."""
    return lambda self, *known: change(getattr(base, name)(self, *known))


RETURNED = [  # the argument, the faulty function, and what the message says beside its name
    ("policy", {"init": lambda s, k, g: jnp.int32(0)}, r"int32\[\] where a state whose .* 2 rows"),
    ("policy", {"begin": lambda s, state, live, g: jnp.int32(1)}, r"int32\[\] where \(the gi"),
    ("policy", {"begin": lambda s, state, live, g: (state, 2.5)}, r"float32\[\]\) .*integers\[2"),
    ("policy", {"go_on": lambda s, state, d, p: None}, r"None where .*, bool\[2\] or bool\[\]\)"),
    ("policy", {"go_on": lambda s, state, d, p: (state, p)}, r"float32\[2\]\) where .* bool\[2\]"),
    ("policy", {"keep_drafting": lambda s, state, seen: (0, True)}, r"\(int32\[\], bool\[\]\) wh"),
    ("policy", {"update": lambda s, state, r: jnp.zeros(2)}, r"float32\[2\] where the given state"),
    ("policy", {"go_on": lambda s, state, d: (state, d)}, r"is called with \(state, drafting, log"),
    ("policy", {"begin": lambda s, state, live, g: (state, live)}, r"bool\[2\]\) where"),
    ("policy", {"begin": lambda s, state, g: (state, g)}, r"is called with \(state, live, g"),
    ("policy", {"verifies": lambda s, state, slot: slot.chance, "reads_batch": True},
     r"float32\[\] where bool\[\] is"),
    ("rule", {"stop": lambda s, *_: None}, r"None where float32\[2, 3\] is due"),
    ("rule", {"stop": like(lambda x: x[:, 1:], rules.Token, "stop")}, r"\[2, 2\] where .*\[2, 3\]"),
    ("rule", {"stop": like(lambda x: x.astype(jnp.float16), rules.Token, "stop")}, "float16"),
    ("rule", {"next_probs": like(lambda x: x[:, 1:], rules.Token, "next_probs")}, r"\[2, 4\] whe"),
    ("rule", {"acceptance": lambda s, p, q: p}, r"\[2, 2, 5\] where float32\[2, 2\] is due"),
    ("draft", {"start": lambda s, inputs, room: ()}, r"\(\) where \(a state, a state\) is due"),
    ("draft", {"begin": lambda s, t, n, c, state: (s._again(n), state)}, "is called with .*lags"),
    ("draft", {"extend": lambda s, t, n, c, state: (t, state)}, r"where \(numbers\[2, any\], the "),
    ("draft", {"extend": lambda s, t, n, c, state: (t[:, None], 0)}, r"given state int32\[2\]\)"),
    ("draft", {"logits": lambda s, hidden: hidden[:, 1:]}, r"\[2, 4\] where floats\[2, 5\]"),
    ("draft", {"observe": lambda s, *_: None}, r"None where the given state int32\[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "functions", "message"), RETURNED)
def test_what_a_part_returns(argument, functions, message, monkeypatch):
    """Nothing is compiled before the error, which says where the part can be tried alone."""
    monkeypatch.setattr(starting.loop, "start", Uncalled(loop.start))
    label = rf"Mine\.{next(iter(functions))} .*{message}"
    check = {"draft": "drafter"}.get(argument, argument)
    with pytest.raises(ValueError, match=rf"(?s)(?=.*{label}).*`specjax\.testing\.check_{check}`"):
        decode(**faulty(argument, **functions))


class Uncalled:
    def __init__(self, function):
        self.eval_shape = function.eval_shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (faulty("policy", begin=lambda *_: 0, update=ABSENT), r"must be a draft-length policy"),
        ({"policy": pytree(type("Mine", (), {"begin": 0, "update": 0}))()}, "Mine lacks init, nod"),
        ({"rule": pytree(type("Mine", (), {"stop": 0, "next_probs": 0}))()}, "Mine lacks target_d"),
        ({"budget": "fixed(8)"}, r"generate has no argument budget: give policy="),
        (faulty("rule", under=lambda s, sampling: None), "rule=None must be an acceptance rule"),
        (
            faulty("rule", given_noise=lambda s, p, k, at: p[:, :3]) | {"draft": None},
            r"Mine\.given_noise returned float32\[2, 3\] where float32\[2, 5\] is due",
        ),
        (
            faulty("policy", carries=True, resume=lambda s, new, past, rows: rows)
            | {"carry_state": True, "batch_size": 1},
            r"Mine\.resume returned bool\[1\] where the given state is due",
        ),
        (faulty("draft", vocab_size="x"), r"vocab_size='x' must be a whole number"),
        ({"filters": [lambda logits: logits]}, "filters: function is no pytree"),
        ({"filters": [Filter]}, "is a class"),
        (faulty("filters", __call__=lambda s, x: x[..., 1:]), r"filter Mine returned float32\[2,"),
        (faulty("filters", __call__=lambda s, x: x[:1]), r"returned float32\[1, 5\] where .*\[2,"),
        (faulty("filters", __call__=lambda s, x: x > 0), r"filter Mine returned bool"),
        (faulty("filters", __call__=lambda s, x: None), r"filter Mine returned None"),
        ({"draft": "lookup(max_ngram=17)"}, r"max_ngram=17 must be a whole number in \[1, 16\]"),
        ({"draft": "lookup(matches=17)"}, r"matches=17 must be a whole number in \[1, 16\]"),
        ({"policy": "by_batch_size({1: 2, 65537: 3})"}, r"rows=65537 must be .* \[1, 65536\]"),
    ],
)  # fmt: skip
def test_what_is_no_part(options, message):
    with pytest.raises(ValueError, match=message):
        decode(**options)


def test_bounds_are_taken():
    assert by_batch_size({1: 2, 65536: 3}).lengths[-2:].tolist() == [2, 3]
    assert PromptLookup(5, max_ngram=16, matches=16).max_ngram == 16


@pytree
class Scaled(rules.Token):
    """The paper's rule, with other chances."""

    exact = True
    stop_by: jnp.ndarray
    next_by: jnp.ndarray
    beyond: jnp.ndarray  # whether it forgets the end of a draft

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        draft_len = jnp.where(self.beyond, drafts.shape[1], draft_len)
        return self.stop_by * super().stop(target_logprobs, draft_logprobs, drafts, draft_len)

    def next_probs(self, *known):
        return self.next_by * super().next_probs(*known)


@pytest.mark.parametrize(
    ("stop_by", "next_by", "beyond", "message"),
    [
        (1.0, 1.0, False, ""),
        (jnp.nan, 1.0, False, r"Scaled\.stop gave no distribution"),
        (0.9, 1.0, False, r"Scaled\.stop gave no distribution"),
        (1.0, jnp.nan, False, r"Scaled\.next_probs gave no distribution"),
        (1.0, -1.0, False, r"Scaled\.next_probs gave no distribution"),
        (1.0, 0.0, False, r"Scaled\.next_probs gave no distribution"),
        (1.0, 1.0, True, r"Scaled\.stop accepts tokens behind the end of a draft"),
    ],
)
def test_an_own_rule_without_distributions(stop_by, next_by, beyond, message):
    """Numbers are traced, so all compile once. The package's own rules carry no flag."""
    rule = Scaled(jnp.float32(stop_by), jnp.float32(next_by), jnp.bool_(beyond))
    if not message:
        assert decode(rule=rule).tokens == decode().tokens
        method = building.build(TARGET, DRAFT, sampling=Sampling(1.0))
        begun = starting.prepare(method, TARGET, TEXTS, [(0, 0), (1, 0)], max_new_tokens=4,
                                 key=jax.random.key(0), rows=2)  # fmt: skip
        assert begun[1].rule_sound is None
        return
    with pytest.raises(FloatingPointError, match=rf"{message}.*check_rule"):
        decode(rule=rule)


def test_noise_that_is_no_distribution():
    with pytest.raises(FloatingPointError, match=r"Mine\.next_probs"):
        decode(None, **faulty("rule", given_noise=lambda s, p, k, at: p * jnp.nan))


def test_parts_within_parts():
    """An own policy within one of the package."""
    arm = faulty("policy", go_on=lambda s, state, d, p: None)["policy"]
    with pytest.raises(ValueError, match=r"Mine\.go_on returned None"):
        decode(policy=both(arm, "fixed(1)"))
