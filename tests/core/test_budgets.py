"""Verify budgets: exact for all rows together, worked by hand, and what they do not go with."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from reference import total_variation
from specjax import budgets, generate, loop, passes, speculative
from specjax.budgets import base, times
from specjax.budgets.early_stop import PAUSE
from specjax.drafters.base import ModelDrafter
from specjax.measure import batches
from specjax.policies import constant, heuristic
from specjax.policies.base import Observation
from specjax.pytrees import pytree
from specjax.rounds import Drafts
from specjax.rules import Block, Token
from specjax.sampling import Sampling
from specjax.testing import check_budget
from specjax.testing.common import check_joint, joint_expected
from specjax.testing.enumeration import joint_distribution
from specjax.types import Call, Packing
from table_models import hopeless, inputs_of, random_table

INPUTS = inputs_of([[1, 0], [0, 1, 1]])
TIMES = budgets.PassTimes([2, 3, 4, 6], [1.0, 1.1, 1.9, 2.0], draft=0.05)
BUDGETS = {
    "fixed": budgets.fixed(2),
    "early_stop": budgets.early_stop(TIMES),
    "threshold": budgets.threshold(0.4),
    "by_batch_size": budgets.by_batch_size({1: 2, 2: 1}),
    "static": budgets.static(1),
}


@pytree
class OneOf(base.Budget):
    """One of some budgets, by a number that is traced: all compile once."""

    each: tuple
    which: jax.Array
    fills = True

    def _pick(self, values):
        return jax.tree.map(lambda *xs: jnp.stack(xs)[self.which], *values)

    def init(self, keys, gamma_max):
        return tuple(one.init(keys, gamma_max) for one in self.each)

    def begin(self, state, live, gamma_max):
        found = [one.begin(own, live, gamma_max) for one, own in zip(self.each, state, strict=True)]
        return tuple(own for own, _ in found), self._pick([worth for _, worth in found])

    def chance(self, state, seen):
        found = [one.chance(own, seen) for one, own in zip(self.each, state, strict=True)]
        return tuple(own for own, _ in found), self._pick([chance for _, chance in found])

    def takes(self, state, slot):
        return self._pick([jnp.asarray(one.takes(own, slot))
                           for one, own in zip(self.each, state, strict=True)])  # fmt: skip

    def update(self, state, round_):
        return tuple(one.update(own, round_) for one, own in zip(self.each, state, strict=True))


def method_of(budget, *, chosen=None, sizes=(2, 3, 4), eos=1, rule=None, policy=None, draft=None):
    target, other = (random_table(seed, 2) for seed in (1, 2))
    return speculative.Speculative(
        target, ModelDrafter(draft or other), rule or Token(), policy or constant(2),
        chosen or Sampling(1.0), jnp.int32([eos]), 2, budget=budget, sizes=sizes,
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", BUDGETS)
def test_enumerated_joint_distribution(name):
    """Two rows, all outputs of three tokens over 2. TV < 1e-9."""
    with jax.enable_x64(True):
        check_budget(OneOf(tuple(BUDGETS.values()), jnp.int32(list(BUDGETS).index(name))))


@pytree
class ReadsTheOther(base.Budget):
    """Orders slots by tokens of the other row, whose own slots it may not have looked at yet."""

    def init(self, keys, gamma_max):
        return jnp.ones(keys.shape, jnp.float32)

    def begin(self, state, live, gamma_max):
        return jnp.full(state.shape, 0.5), jnp.int32(gamma_max)

    def chance(self, state, seen):
        first = jnp.arange(len(state)) == 0
        return state, jnp.where((seen.slot == 0) & first, 0.9, state).astype(jnp.float32)

    def drawn(self, state, logprob):
        return jnp.where(logprob[::-1] > np.log(0.5), 0.8, 0.1).astype(jnp.float32)

    def takes(self, state, slot):
        return slot.taken < 2


@pytest.mark.sweep
def test_a_faulty_budget():
    with pytest.raises(AssertionError, match="ReadsTheOther, two rows together: P"):
        check_budget(ReadsTheOther())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"eos": -1, "limits": (4, 2)},
        {"rule": Block()},
        {"chosen": Sampling(0.7, top_p=0.8)},
        {"chosen": Sampling(0.0)},
        {"policy": heuristic(1)},
        {"draft": "hopeless"},
        {"sizes": ()},
    ],
    ids=str,
)
def test_early_stop_with_other_methods(options):
    """Rules, sampling, ends, policies that end drafts, a bad draft, no packing. TV < 1e-9."""
    with jax.enable_x64(True):
        if "draft" in options:
            options = {"draft": hopeless(random_table(1, 2))}
        limits = options.pop("limits", (3, 3))
        check_joint("it", method_of(budgets.early_stop(TIMES), **options), INPUTS, limits)


@pytest.mark.sweep
def test_three_rows():
    with jax.enable_x64(True):
        method = method_of(budgets.early_stop(TIMES), sizes=(3, 5))
        check_joint("it", method, inputs_of([[1, 0], [0], [0, 1, 1]]), (2, 2, 2))


def peeking_draft(method, context, state, dice):
    """Draft, and cut each row before the first token that its distribution thinks unlikely."""
    drafts, state = speculative.draft(method, context, state, dice)
    likely = drafts.belief_logprob >= jnp.float32(np.log(0.5))
    kept = jnp.sum(jnp.cumprod(likely.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return drafts._replace(length=jnp.minimum(drafts.length, kept)), state


def peeking_step(method, contexts, state, dice=None):
    drafts, state = peeking_draft(method, contexts.drafter, state, dice)
    verdict, state = speculative.judge(method, contexts, dice, state, drafts)
    return speculative.conclude(method, contexts.drafter, state, drafts, verdict)


@pytest.mark.sweep
def test_tokens_that_are_dropped_after_a_look_count_in_the_enumeration():
    with jax.enable_x64(True):
        method = method_of(None, sizes=())
        found = joint_distribution(method, INPUTS, [2, 2], step=peeking_step)
        exact = joint_distribution(method, INPUTS, [2, 2])
        assert sum(found.values()) == pytest.approx(1)
        assert total_variation(found, exact) > 1e-2


# --- handing out ------------------------------------------------------------------------------


def handed(budget, chance, length, live, sizes=(), state=None):
    chance = jnp.asarray(chance, jnp.float32)
    chances = base.Chances(state, state, chance)
    given = base.hand_out(budget, chances, jnp.int32(length), jnp.asarray(live), sizes)
    return given.tolist()


def test_the_best_slots_of_all_rows():
    """Rows 0 and 2 of [.9 .5], [.8 .7], [.4 .3]: .9 .8 .7 .5 .4 .3."""
    chance = [[0.9, 0.5], [0.8, 0.7], [0.4, 0.3]]
    for count, expected in [(0, [0, 0, 0]), (2, [1, 1, 0]), (3, [1, 2, 0]), (5, [2, 2, 1])]:
        assert handed(budgets.fixed(count), chance, [2, 2, 2], [True] * 3) == expected
    assert handed(budgets.fixed(3), chance, [2, 1, 2], [True] * 3) == [2, 1, 0]
    assert handed(budgets.threshold(0.45), chance, [2, 2, 2], [True] * 3) == [2, 2, 0]
    ended = handed(budgets.fixed(9), chance, [0, 2, 2], [False, True, True])
    assert ended == [0, 2, 2]


@pytree
class Skipping(base.Budget):
    """Refuses the second slot and would take all others."""

    def takes(self, state, slot):
        return slot.taken != 1


def test_the_first_refusal_ends_the_handing_out():
    """Else a slot could be left out for its own chance, and those behind it verified."""
    chance = [[0.9, 0.5], [0.8, 0.7]]
    assert handed(Skipping(), chance, [2, 2], [True] * 2) == [1, 0]


def test_equal_chances_go_to_earlier_tokens_first():
    chance = [[0.5, 0.5], [0.5, 0.5]]
    assert handed(budgets.fixed(1), chance, [2, 2], [True] * 2) == [1, 0]
    assert handed(budgets.fixed(2), chance, [2, 2], [True] * 2) == [1, 1]
    assert handed(budgets.fixed(3), chance, [2, 2], [True] * 2) == [2, 1]


@pytree
class Rising(base.Budget):
    """Thinks later tokens likelier than those before them."""

    def chance(self, state, seen):
        return state, jnp.full(seen.drafting.shape, 0.5) + 0.1 * seen.slot.astype(jnp.float32)


def test_a_chance_counts_at_most_as_the_one_before():
    """Else a slot would move up in the order for a reason that its row's earlier token gave."""
    _, chances = base.begin(Rising(), (), jnp.array([True]), 3)
    probs = jnp.log(jnp.array([[0.6, 0.4]]))
    for slot in range(3):
        seen = Observation(jnp.int32(slot), jnp.array([True]), probs, probs, probs)
        chances = base.before_the_draw(Rising(), chances, seen)
    assert chances.chance.tolist() == [[0.5, 0.5, 0.5]]


def test_early_stop_by_hand():
    """Two rows and 1 a pass, .3 for each further position: 2/1, then (2 + .9)/1.3 > 2,
    (2.9 + .8)/1.6 > 2.23, (3.7 + .7)/1.9 > 2.31, and (4.4 + .1)/2.2 < 2.31."""
    budget = budgets.early_stop(budgets.PassTimes([2, 12], [1.0, 4.0]))
    state = budget.init(jax.random.split(jax.random.key(0), 2), 3)
    state = state._replace(depth=jnp.full_like(state.depth, 3))
    chance = [[0.9, 0.8, 0.1], [0.7, 0.05, 0.01]]
    assert handed(budget, chance, [3, 3], [True] * 2, state=state) == [2, 1]
    # Positions up to a compiled size cost nothing: of eight, two are the rows' own.
    assert handed(budget, chance, [3, 3], [True] * 2, (2, 7, 12), state=state) == [3, 2]


def test_costs_that_rise_in_steps_are_smoothed():
    """The largest convex function below: 3 lies on the line from 2 to 6."""
    found = times.convex([2, 3, 6, 8], [1.0, 2.0, 2.0, 4.0])
    np.testing.assert_allclose(found, [1, 1.25, 2, 4])
    table = budgets.PassTimes([2, 3, 6, 8], [1.0, 2.0, 2.0, 4.0], draft=0.5, rest=0.25)
    assert float(table.smoothed(jnp.int32(3), 2)) == pytest.approx(2.5)
    assert float(table.exact(jnp.int32(4), 2)) == pytest.approx(3.25)
    # A round without a draft is a step of plain decoding.
    plain = budgets.PassTimes([2, 3], [1.0, 2.0], rest=0.25, token=1.1)
    assert float(plain.exact(jnp.int32(2), 0)) == float(plain.smoothed(jnp.int32(2), 0))
    assert float(plain.exact(jnp.int32(2), 0)) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("sizes", "passes", "ten"),
    [
        ([2, 4, 8], [1.0, 2.0, 4.0], 5.0),
        ([2, 4], [4.0, 5.0], 8.0),
        ([5], [1.0], 2.0),
        ([2, 5], [1.0, 1.0], 2.0),
        ([2, 5], [2.0, 1.0], 2.0),
    ],
)
def test_positions_beyond_the_last_size_are_not_free(sizes, passes, ten):
    """The last slope goes on; where it says nothing, each costs the mean of a position."""
    table = budgets.PassTimes(sizes, passes, draft=0.5, rest=0.25)
    for time in (table.smoothed, table.exact):
        assert float(time(jnp.int32(10), 2)) == pytest.approx(ten + 1.25)


def test_a_draft_that_never_pays_is_left_out_and_tried_again():
    """A drafter as slow as its target: after some rounds one token is drafted in 17 rounds."""
    dear = budgets.PassTimes([2, 6], [1.0, 3.0], draft=1.0)
    budget = budgets.early_stop(dear, prior=0.3)
    state = budget.init(jax.random.split(jax.random.key(0), 2), 2)
    begin = jax.jit(lambda state: budget.begin(state, jnp.array([True, True]), 2))
    depths = []
    for _ in range(2 * PAUSE + 4):
        state, depth = begin(state)
        depths.append(int(depth))
    assert sum(depths) == 2
    assert max(depths) == 1


def test_lengths_by_batch_size():
    table = budgets.by_batch_size({1: 8, 4: 4, 16: 1})
    assert table.length(jnp.arange(18)).tolist() == [8] * 4 + [4] * 12 + [1, 1]


def test_with_a_budget_lengths_are_not_fixed():
    """It may draft less than γ_max, so an accelerator's loop must not draft γ_max in any case."""
    assert method_of(None).fixed
    assert not method_of(budgets.fixed(2)).fixed


# --- packed passes ------------------------------------------------------------------------------


def test_packed_positions():
    x = jnp.arange(12).reshape(3, 4)
    packing = Packing.first(jnp.int32([2, 0, 3]), 4, 6)
    call = Call(jnp.zeros((3,), jnp.int32), packing=packing)
    assert call.pack(x).tolist() == [0, 1, 8, 9, 10, 10]
    back = call.unpack(call.pack(x))
    assert back[0, :2].tolist() == [0, 1]
    assert back[2, :3].tolist() == [8, 9, 10]
    assert Call(call.start).pack(x) is x
    assert Call(call.start).unpack(x) is x


@pytest.mark.parametrize("greedy", [True, False])
def test_a_packed_pass_gives_the_tokens_of_a_whole_one(pair, greedy):
    """A T5, by all sizes that hold the positions; a full budget gives the tokens of none."""
    options = {"gamma": 3, "temperature": 0.0 if greedy else 1.0, "key": 1, "max_new_tokens": 12,
               "batch_size": 4}  # fmt: skip
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3], [4, 4, 5]]
    today = generate(pair.target, pair.draft, texts, **options)
    full = generate(pair.target, pair.draft, texts, budget=budgets.static(3), sizes=(4, 8, 12),
                    **options)  # fmt: skip
    assert [row.tokens for row in full.rows] == [row.tokens for row in today.rows]
    few = generate(pair.target, pair.draft, texts, budget="fixed(2)", sizes=(4, 6), **options)
    if greedy:
        assert [row.tokens for row in few.rows] == [row.tokens for row in today.rows]
    assert sum(row.drafted for row in few.rows) < sum(row.drafted for row in today.rows)
    assert sum(row.levels for row in few.rows) > sum(row.drafted for row in few.rows)


@pytest.mark.parametrize(("lengths", "width"), [([0, 0], 1), ([0, 1], 3), ([2, 2], 3)])
def test_a_round_without_a_draft_runs_one_position_of_each_row(lengths, width):
    method = method_of(budgets.static(2))
    keys = jax.random.split(jax.random.key(0), 2)
    _, state = speculative.start(method, INPUTS, keys, jnp.int32([4, 4]), 12)
    drafts = Drafts.empty(2, 2, jnp.zeros((2, 2)))._replace(length=jnp.int32(lengths))

    def judge(state, drafts, packing=None):
        return jnp.int32([drafts.tokens.shape[1] + 1]), state

    assert passes.packed(method, judge, state, drafts)[0].tolist() == [width]


@pytest.mark.parametrize("sizes", [(), (3, 6)])
def test_no_cache_is_copied(sizes):
    """In the compiled loop of T5s, two rows, buffer 512, d_kv 8: chances go through the conditional
    around drafting too."""
    model = test_loops.target()
    method = test_loops.method_of(model, model, gamma_max=4)
    many = budgets.PassTimes([2, 3, 6, 10], [1.0, 1.1, 1.3, 1.6])
    method = dataclasses.replace(method, budget=budgets.early_stop(many), sizes=sizes)
    inputs = test_loops.translate([[3, 1], [4, 2, 1]])
    arguments = test_loops.begin(method, inputs, 24, buffer_len=512)
    text = loop.decode.lower(method, *arguments).compile().as_text()
    assert re.search(r"\[2,2,(8,512|512,8)\]", text)
    assert not re.search(r"= f32\[2,2,(8,512|512,8)\]\S* copy\(", text)


def test_the_loop_draws_the_target_s_outputs():
    """Through the jitted loop, packed: pairs of outputs of two rows, by chi-square."""
    from collections import Counter

    from reference import chi_square
    from specjax import sampling as smp

    method = method_of(BUDGETS["early_stop"], eos=-1)
    inputs = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), INPUTS)

    @jax.jit
    @jax.vmap
    def outputs(sample):
        keys = smp.row_keys(jax.random.key(0), jnp.arange(3, dtype=jnp.int32), jnp.full(3, sample))
        begun = loop.start(method, inputs, keys, jnp.int32([2, 2, 0]), buffer_len=9)
        state = loop.decode(method, *begun)
        place = inputs.prompt_len[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
        return jnp.take_along_axis(state.tokens, place, axis=1)[:2]

    with jax.enable_x64(True):
        found = np.asarray(outputs(jnp.arange(8192, dtype=jnp.int32)))
        counts = Counter(tuple(map(tuple, both)) for both in found.tolist())
        assert chi_square(counts, joint_expected(method, INPUTS, (2, 2))) > 1e-3


# --- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: budgets.fixed(-1), "slots"),
        (lambda: budgets.threshold(2.0), "least"),
        (lambda: budgets.by_batch_size({}), "table"),
        (lambda: budgets.by_batch_size({0: 2}), "rows"),
        (lambda: budgets.early_stop({}), "PassTimes"),
        (lambda: budgets.PassTimes([4, 2], [1.0, 2.0]), "ascending"),
        (lambda: budgets.PassTimes([2, 4], [1.0]), "a time for each"),
        (lambda: budgets.parse("nothing"), "nothing"),
        (lambda: budgets.parse("fixed(2.5)"), "slots"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "early_stop"}, "times"),
        ({"sizes": (4,)}, "budget"),
        ({"budget": "fixed(2)", "sizes": (0,)}, "sizes"),
        ({"budget": "fixed(2)", "sizes": (4,), "widths": (2,)}, "widths"),
        ({"budget": "fixed(2)", "tree": "fixed(2, 1)", "gamma": None}, "tree"),
        ({"budget": 3}, "budget"),
        ({"budget": "fixed(2)", "draft": None}, "draft"),
    ],
)
def test_what_a_budget_does_not_go_with(pair, options, message):
    options = {"draft": pair.draft, "gamma": 2, "temperature": 0.0} | options
    with pytest.raises(ValueError, match=message):
        generate(pair.target, options.pop("draft"), [[5, 6]], **options)


def test_times_of_packed_passes_are_measured(pair):
    """Sizes from no draft up; a budget that reads the times decodes the same tokens."""
    texts = [[5, 6, 7], [8, 9]]
    found = batches.pass_times(pair.target, pair.draft, texts, gamma=2, batch_size=4,
                               max_new_tokens=8, repeats=2)  # fmt: skip
    assert found.sizes == (4, 5, 6, 8, 10, 12)
    assert bool(jnp.all(found.passes > 0))
    options = {"gamma": 2, "temperature": 0.0, "max_new_tokens": 8, "batch_size": 4}
    plain = generate(pair.target, None, texts, temperature=0.0, max_new_tokens=8)
    early = generate(pair.target, pair.draft, texts, budget=budgets.early_stop(found),
                     sizes=found.sizes, **options)  # fmt: skip
    assert [row.tokens for row in early.rows] == [row.tokens for row in plain.rows]
