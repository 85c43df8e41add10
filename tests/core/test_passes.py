"""Narrower verify passes: no other token, no wider program and no copy of a cache."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_cost
import test_loops
from specjax import loop, rules, speculative
from specjax.policies import constant
from specjax.policies.constant import Constant
from specjax.sampling import Sampling
from table_models import inputs_of
from test_policies import small_method
from tiny_models import slow

one_step = jax.jit(speculative.step)


@pytest.mark.sweep
def test_the_narrowest_pass_runs():
    """Distributions past its width are never computed: with drafts of 2 and passes of 2, 3 and 8,
    five."""
    method = small_method(constant(2), gamma_max=7, passes=(6, 4))
    contexts, state = test_loops.begin(method, inputs_of([[1], [2]]), 20)
    _, round_ = jax.jit(speculative.step)(method, contexts, state)
    scored = np.any(np.asarray(round_.target_logprobs) != 0, axis=(0, 2))
    assert scored.tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize(("drafted", "width"), [(0, 1), (1, 3), (2, 3), (3, 5), (4, 5)])
def test_one_pass_a_round(drafted, width):
    """The smallest that holds the draft, and no other: calls and positions are counted."""
    method, contexts, state = test_cost.setup(0.0)
    policy = Constant(jnp.int32(drafted))
    method = dataclasses.replace(method, policy=policy, passes=(1, 3))
    for rounds in (1, 2):
        state = one_step(method, contexts, state)[0]
        assert state.cache.tolist() == [rounds, rounds * width]


RULES = ["token", "block", "gumbel", "lenient(0.5)", "typical"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rule", "drafted"),
    [
        *(("token", drafted) for drafted in (0, 1, 2)),
        ("gumbel", 1),
        *(
            slow((rule, drafted))
            for rule in RULES[1:]
            for drafted in (0, 1, 2)
            if (rule, drafted) != ("gumbel", 1)
        ),
    ],
)
def test_a_narrower_pass_gives_the_same_round(rule, drafted):
    """With passes of 1, 2 and 4 positions and with one of 6, γ_max = 5: what the round says of the
    drafted tokens, and how it ends."""
    with jax.enable_x64(True):
        method = small_method(
            Constant(jnp.int32(drafted)), jnp.float64, gamma_max=5, rule=rules.parse(rule)
        )
        inputs = inputs_of([[1, 0]] * 40)
        narrow, wide = (
            one_step(method, *test_loops.begin(method, inputs, 20, test_loops.keys_of(40, seed=3)))[
                1
            ]
            for method in (dataclasses.replace(method, passes=(40, 80, 160)), method)
        )
    for name in ("accepted", "next_token", "emitted", "submitted"):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name), name)
    for name in ("stop", "next_probs"):
        np.testing.assert_allclose(getattr(narrow, name), getattr(wide, name), atol=1e-12)
    for name in ("overlap", "ratio"):
        each = (np.where(one.submitted, getattr(one, name), 0) for one in (narrow, wide))
        np.testing.assert_allclose(*each, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("distribution", [Sampling(0.0), slow((Sampling(1.0),))])
def test_nothing_is_computed_for_passes_that_do_not_run(on_cpu, distribution):
    """In the compiled loop of T5s: outside of passes and drafts, a round has no matrix products, no
    distributions at γ_max + 1 positions, and no loop beside those of its passes: draws have some.
    XLA moves what does not change within a loop to before it, were it of one turn or none."""
    model = test_loops.target()
    method = test_loops.method_of(model, model, chosen=distribution, gamma_max=4)
    method = dataclasses.replace(method, passes=(2,))
    arguments = test_loops.begin(method, test_loops.translate([[3, 1]]), 24)
    text = loop.decode.lower(method, *arguments).compile().as_text()
    (body,) = (part for part in text.split("\n\n") if " conditional(" in part)  # drafts, or not
    positions = f"f32[1,5,{model.vocab_size}]"
    for what in ("dot_general", positions):
        assert what in text
        assert what not in body
    assert body.count(" while(") == 2


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [(), (2,)])
def test_no_cache_is_copied_in_a_round(sizes):
    """In the compiled loop of T5s, buffer 512, d_kv 8. A `lax.switch` among widths would copy, and
    so would a conditional around drafting with results that nobody reads.
    """
    model = test_loops.target()
    method = test_loops.method_of(model, model, gamma_max=4)
    method = dataclasses.replace(method, passes=sizes)
    arguments = test_loops.begin(method, test_loops.translate([[3, 1]]), 24, buffer_len=512)
    text = loop.decode.lower(method, *arguments).compile().as_text()
    assert re.search(r"\[1,2,(8,512|512,8)\]", text)
    assert not re.search(r"= f32\[1,2,(8,512|512,8)\]\S* copy\(", text)
