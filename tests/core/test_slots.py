"""Policies that verify some of a batch's slots: exact for all rows together, and worked by hand."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from experiments.adaptive.policies import path
from specjax import generate, loop, passes, policies, speculative
from specjax.decoding import building
from specjax.drafters.base import ModelDrafter
from specjax.measure import batches
from specjax.policies import Costs, Observation, Policy, constant, heuristic
from specjax.policies.early_stop import PAUSE, convex
from specjax.policies.slots import allocate, rated
from specjax.pytrees import pytree
from specjax.rounds import Drafts
from specjax.rules import Block, Token
from specjax.sampling import Sampling
from specjax.testing import check_policy
from specjax.testing.common import check_joint, joint_expected
from specjax.types import Call, Packing
from table_models import hopeless, inputs_of, random_table
from tiny_models import slow
from toy_policies import OneOf

INPUTS = inputs_of([[1, 0], [0, 1, 1]])
TIMES = Costs(0.05, [1.0, 1.1, 1.9, 2.0], positions=[2, 3, 4, 6])
EARLY = policies.early_stop(TIMES)
POLICIES = {
    "fixed": policies.fixed(2),
    "early_stop": EARLY,
    "threshold": policies.threshold(0.4),
    "by_batch_size": policies.by_batch_size({1: 2, 2: 1}),
}


def method_of(policy, *, chosen=None, passes=(2, 3, 4), eos=1, rule=None, draft=None):
    target, other = (random_table(seed, 2) for seed in (1, 2))
    return speculative.Speculative(
        target, ModelDrafter(draft or other), rule or Token(), policy,
        chosen or Sampling(1.0), jnp.int32([eos]), 2, passes=passes,
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", POLICIES)
def test_enumerated_joint_distribution(name, capsys):
    """Two rows, all outputs of three tokens over 2. TV < 1e-9. All compile once."""
    with jax.enable_x64(True):
        check_policy(OneOfSlots(tuple(POLICIES.values()), jnp.int32(list(POLICIES).index(name))))
    assert "OneOfSlots verifies" in capsys.readouterr().out


@pytree
class OneOfSlots(OneOf):
    """One of several policies that decide by slot."""

    reads_batch = fills = True

    def chance(self, state, slot):
        each = zip(self.policies, state, strict=True)
        every = [jnp.asarray(one.chance(own, slot), jnp.float32) for one, own in each]
        return jnp.stack(jnp.broadcast_arrays(*every))[self.which]

    def verifies(self, state, slot):
        each = zip(self.policies, state, strict=True)
        return jnp.stack([jnp.asarray(one.verifies(own, slot)) for one, own in each])[self.which]


@pytree
class ReadsTheOther(Policy):
    """Orders slots by tokens of the other row, whose own slots it may not have looked at yet."""

    reads_batch = True

    def init(self, keys, gamma_max):
        return jnp.ones(keys.shape, jnp.float32)

    def begin(self, state, live, gamma_max):
        return jnp.full(state.shape, 0.5), jnp.int32(gamma_max)

    def chance(self, state, slot):
        first = jnp.arange(len(state)) == 0
        return jnp.where((slot == 0) & first, 0.9, state).astype(jnp.float32)

    def go_on(self, state, drafting, logprob):
        return jnp.where(logprob[::-1] > np.log(0.5), 0.8, 0.1).astype(jnp.float32), drafting

    def verifies(self, state, slot):
        return slot.taken < 2


@pytest.mark.sweep
def test_a_fault_between_rows():
    with pytest.raises(AssertionError, match="ReadsTheOther, two rows together: P"):
        check_policy(ReadsTheOther())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"eos": -1, "limits": (4, 2)},
        {"rule": Block()},
        slow({"chosen": Sampling(0.7, top_p=0.8)}),
        slow({"chosen": Sampling(0.0)}),
        {"policy": policies.both(heuristic(1), EARLY)},
        slow({"draft": "hopeless"}),
        {"passes": ()},
    ],
    ids=["ends", "block", "top_p", "greedy", "both", "hopeless", "one pass"],
)
def test_early_stop_with_other_methods(options):
    """Rules, sampling, ends, policies that end drafts, a bad draft, no packing. TV < 1e-9."""
    with jax.enable_x64(True):
        if "draft" in options:
            options = {"draft": hopeless(random_table(1, 2))}
        options = {"policy": EARLY} | options
        limits = options.pop("limits", (3, 3))
        check_joint("it", method_of(**options), INPUTS, limits)


@pytest.mark.slow
def test_three_rows():
    with jax.enable_x64(True):
        method = method_of(EARLY, passes=(3, 5))
        check_joint("it", method, inputs_of([[1, 0], [0], [0, 1, 1]]), (2, 2, 2))


def peeking_step(method, contexts, state, dice=None):
    """Draft, and cut each row before the first token that its distribution thinks unlikely."""
    drafts, state = speculative.draft(method, contexts.drafter, state, dice)
    likely = drafts.belief_logprob >= jnp.float32(np.log(0.5))
    kept = jnp.sum(jnp.cumprod(likely.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    drafts = drafts._replace(length=jnp.minimum(drafts.length, kept))
    verdict, state = speculative.judge(method, contexts, dice, state, drafts)
    return speculative.conclude(method, contexts.drafter, state, drafts, verdict)


# --- allocation -------------------------------------------------------------------------------


def kept(policy, chance, length, sizes=(), state=None):
    """Verified tokens of live rows."""
    chance, length = jnp.asarray(chance, jnp.float32), jnp.int32(length)
    drafts = Drafts.empty(length, chance.shape[1], jnp.zeros((len(length), 0)))
    drafts = drafts._replace(chance=chance, length=length)
    return allocate(policy, state, drafts, length > 0, sizes).length.tolist()


@pytree
class Skipping(Policy):
    """Refuses the second slot and would take all others."""

    def verifies(self, state, slot):
        return slot.taken != 1


THREE = [[0.9, 0.5], [0.8, 0.7], [0.4, 0.3]]  # in order: .9 .8 .7 .5 .4 .3, of rows 0 1 1 0 2 2
EVEN = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("policy", "chance", "length", "due"),
    [
        *((policies.fixed(count), THREE, [2, 2, 2], due)
          for count, due in [(0, [0, 0, 0]), (2, [1, 1, 0]), (3, [1, 2, 0]), (5, [2, 2, 1])]),
        (policies.fixed(3), THREE, [2, 1, 2], [2, 1, 0]),
        (policies.threshold(0.45), THREE, [2, 2, 2], [2, 2, 0]),
        (policies.fixed(9), THREE, [0, 2, 2], [0, 2, 2]),
        # Else a slot could be left out for its own chance, and those behind it verified.
        (Skipping(), [[0.9, 0.5], [0.8, 0.7]], [2, 2], [1, 0]),
        # Of equal ones earlier tokens first.
        *((policies.fixed(count), EVEN, [2, 2], due)
          for count, due in [(1, [1, 0]), (2, [1, 1]), (3, [2, 1])]),
        (constant(2), EVEN, [2, 1], [2, 1]),
    ],
)  # fmt: skip
def test_the_best_slots_of_all_rows(policy, chance, length, due):
    assert kept(policy, chance, length) == due


@pytree
class Rising(Skipping):
    """Thinks later tokens likelier than those before them."""

    def chance(self, state, slot):
        return 0.5 + 0.1 * slot.astype(jnp.float32)


def test_a_chance_counts_at_most_as_the_one_before():
    """Else a slot would move up in the order for a reason that its row's earlier token gave."""
    drafts = Drafts.empty(jnp.int32([3]), 3, jnp.zeros((1, 2)), by_slot=True)
    for slot in range(3):
        drafts = rated(Rising(), (), drafts, jnp.int32(slot))
    assert drafts.chance.tolist() == [[0.5, 0.5, 0.5]]


def test_early_stop_by_hand():
    """Two rows and 1 a pass, .3 for each further position: 2/1, then (2 + .9)/1.3 > 2,
    (2.9 + .8)/1.6 > 2.23, (3.7 + .7)/1.9 > 2.31, and (4.4 + .1)/2.2 < 2.31."""
    policy = policies.early_stop(Costs(0.0, [1.0, 4.0], positions=[2, 12]))
    state = policy.init(jax.random.split(jax.random.key(0), 2), 3)
    state = state._replace(depth=jnp.full_like(state.depth, 3))
    chance = [[0.9, 0.8, 0.1], [0.7, 0.05, 0.01]]
    assert kept(policy, chance, [3, 3], state=state) == [2, 1]
    # Positions up to a compiled size cost nothing: of eight, two are the rows' own.
    assert kept(policy, chance, [3, 3], (2, 7, 12), state=state) == [3, 2]


def test_chances_follow_the_drafter_s_belief():
    """At even belief the chance is ½; at .9 it is 9^.6/(1 + 9^.6); and the product along a row."""
    policy, live = policies.fixed(2), jnp.ones(1, bool)
    state, _ = policy.begin(policy.init(jax.random.split(jax.random.key(0), 1), 2), live, 2)
    found = []
    for slot, belief in enumerate((0.9, 0.5)):
        logs = jnp.log(jnp.float32([[belief, 1 - belief]]))
        seen = Observation(jnp.int32(slot), live, logs, logs, logs)
        state, _ = policy.keep_drafting(state, seen)
        found.append(float(policy.chance(state, seen.slot)[0]))
    np.testing.assert_allclose(found, np.array([1, 0.5]) * 9**0.6 / (1 + 9**0.6), rtol=1e-5)


def test_costs_that_rise_in_steps_are_smoothed():
    """The largest convex function below: 3 lies on the line from 2 to 6."""
    found = convex([2, 3, 6, 8], [1.0, 2.0, 2.0, 4.0])
    np.testing.assert_allclose(found, [1, 1.25, 2, 4])
    table = Costs(0.5, [1.0, 2.0, 2.0, 4.0], positions=[2, 3, 6, 8], rest=0.25)
    assert float(policies.early_stop(table).smoothed(jnp.int32(3), 2)) == pytest.approx(2.5)
    assert float(table.exact(jnp.int32(4), 2)) == pytest.approx(3.25)
    # A round without a draft is a step of plain decoding.
    plain = Costs(0.0, [1.0, 2.0], positions=[2, 3], rest=0.25, token=1.1)
    assert float(plain.exact(jnp.int32(2), 0)) == float(
        policies.early_stop(plain).smoothed(jnp.int32(2), 0)
    )
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
    table = Costs(0.5, passes, positions=sizes, rest=0.25)
    for time in (policies.early_stop(table).smoothed, table.exact):
        assert float(time(jnp.int32(10), 2)) == pytest.approx(ten + 1.25)


def test_a_draft_that_never_pays_is_left_out_and_tried_again():
    """A drafter as slow as its target: after some rounds one token is drafted in 17 rounds."""
    dear = Costs(1.0, [1.0, 3.0], positions=[2, 6])
    policy = policies.early_stop(dear, prior=0.3)
    state = policy.init(jax.random.split(jax.random.key(0), 2), 2)
    begin = jax.jit(lambda state: policy.begin(state, jnp.array([True, True]), 2))
    depths = []
    for _ in range(2 * PAUSE + 4):
        state, depth = begin(state)
        depths.append(int(depth))
    assert sum(depths) == 2
    assert max(depths) == 1


def test_lengths_by_batch_size():
    table = policies.by_batch_size({1: 8, 4: 4, 16: 1})
    assert table.length(jnp.arange(18)).tolist() == [8] * 4 + [4] * 12 + [1, 1]


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


@pytest.mark.parametrize("greedy", [True, slow(False)])
def test_a_packed_pass_gives_the_tokens_of_a_whole_one(pair, greedy):
    """A T5, by all sizes that hold the positions; if all is verified, the tokens of one length."""
    options = {"gamma": 3, "temperature": 0.0 if greedy else 1.0, "key": 1, "max_new_tokens": 12,
               "batch_size": 4}  # fmt: skip
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3], [4, 4, 5]]
    today = generate(pair.target, pair.draft, texts, **options)
    full = generate(pair.target, pair.draft, texts, policy="by_batch_size({1: 3})",
                    passes=(4, 8, 12), **options)  # fmt: skip
    assert [row.tokens for row in full.rows] == [row.tokens for row in today.rows]
    few = generate(pair.target, pair.draft, texts, policy="fixed(2)", passes=(4, 6), **options)
    if greedy:
        assert [row.tokens for row in few.rows] == [row.tokens for row in today.rows]
    assert sum(row.verified for row in few.rows) < sum(row.verified for row in today.rows)
    assert sum(row.draft_calls for row in few.rows) > sum(row.verified for row in few.rows)


@pytest.mark.parametrize(("lengths", "width"), [([0, 0], 1), ([0, 1], 3), ([2, 2], 3)])
def test_a_round_without_a_draft_runs_one_position_of_each_row(lengths, width):
    method = method_of(policies.fixed(4))
    keys = jax.random.split(jax.random.key(0), 2)
    _, state = speculative.start(method, INPUTS, keys, jnp.int32([4, 4]), 12)
    drafts = Drafts.empty(jnp.int32([2, 2]), 2, jnp.zeros((2, 2)))
    drafts = drafts._replace(length=jnp.int32(lengths))

    def judge(state, drafts):
        return jnp.int32([drafts.tokens.shape[1] + 1]), state

    assert passes.packed(method, judge, state, drafts)[0].tolist() == [width]


@pytest.mark.parametrize("sizes", [slow(((),)), (3, 6)])
def test_no_cache_is_copied(sizes):
    """In the compiled loop of T5s, two rows, buffer 512, d_kv 8: chances go through the conditional
    around drafting too."""
    model = test_loops.target()
    many = Costs(0.0, [1.0, 1.1, 1.3, 1.6], positions=[2, 3, 6, 10])
    method = test_loops.method_of(model, model, policy=policies.early_stop(many), gamma_max=4)
    method = dataclasses.replace(method, passes=sizes)
    inputs = test_loops.translate([[3, 1], [4, 2, 1]])
    arguments = test_loops.begin(method, inputs, 24, buffer_len=512)
    text = loop.decode.lower(method, *arguments).compile().as_text()
    assert re.search(r"\[2,2,(8,512|512,8)\]", text)
    assert not re.search(r"= f32\[2,2,(8,512|512,8)\]\S* copy\(", text)


@pytest.mark.slow
def test_the_loop_draws_the_target_s_outputs():
    """Through the jitted loop, packed: pairs of outputs of two rows, by chi-square."""
    from collections import Counter

    from reference import chi_square
    from specjax import sampling as smp

    method = method_of(EARLY, eos=-1)
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
        (lambda: policies.fixed(-1), "slots"),
        (lambda: policies.threshold(2.0), "least"),
        (lambda: policies.by_batch_size({0: 2}), "rows"),
        (lambda: Costs(0.0, [1.0, 2.0], positions=[4, 2]), "ascending"),
        (lambda: Costs(0.0, [1.0], positions=[2, 4]), "a time for each"),
        (lambda: policies.both("svip", "svip"), "verifies all that was drafted"),
        (lambda: policies.both("fixed(1)", "fixed(2)"), "decides slot by slot too"),
        (lambda: policies.both(3, "fixed(2)"), "first=3 must be a draft-length policy"),
        (lambda: policies.early_stop({}), "Costs"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "early_stop"}, "weighs times, and none are given"),
        ({"policy": "fixed(2)", "passes": (0,)}, "passes"),
        ({"policy": "fixed(2)", "tree": "fixed(2, 1)", "gamma": None}, "what of it is verified"),
        ({"budget": "fixed(2)"}, "no argument budget: give policy="),
        ({"widths": (2,)}, "give passes="),
    ],
)
def test_what_a_policy_by_slot_does_not_go_with(pair, options, message):
    options = {"draft": pair.draft, "gamma": 2, "temperature": 0.0} | options
    with pytest.raises(ValueError, match=message):
        generate(pair.target, options.pop("draft"), [[5, 6]], **options)


def test_times_of_packed_passes_are_measured(pair):
    """Sizes from no draft up; a policy that reads the times decodes the same tokens."""
    texts = [[5, 6, 7], [8, 9]]
    found = batches.pass_times(pair.target, pair.draft, texts, gamma=1, batch_size=4,
                               max_new_tokens=8, repeats=2)  # fmt: skip
    assert found.positions == (4, 5, 6, 8)
    assert bool(jnp.all(found.verify > 0))
    options = {"gamma": 1, "temperature": 0.0, "max_new_tokens": 8, "batch_size": 4}
    plain = generate(pair.target, None, texts, temperature=0.0, max_new_tokens=8)
    early = generate(pair.target, pair.draft, texts, policy=policies.early_stop(found),
                     passes=found.positions, **options)  # fmt: skip
    assert [row.tokens for row in early.rows] == [row.tokens for row in plain.rows]


@pytree
class Alone(Policy):
    """Decides slot by slot, and does not say that rows depend on each other."""

    def verifies(self, state, slot):
        return slot.taken < 1


def test_what_two_policies_declare_together():
    """What either learns from and carries over; plain decoding where the first prefers it."""
    dear = Costs(9.0, [1.0] * 3, alpha=0.5, error=np.nan)
    for first in (path("hedge"), policies.parse("goodput", costs=dear), "svip"):
        first = policies.parse(first) if isinstance(first, str) else first
        made = policies.both(first, "fixed(2)")
        for what in ("needs_shorter", "carries"):
            assert getattr(made, what) == getattr(first, what), (first, what)
        assert made.prefers_plain(2, 9, 4) == first.prefers_plain(2, 9, 1)
    assert policies.both(path("hedge"), "fixed(2)").needs_shorter
    assert policies.both(policies.parse("goodput", costs=dear), "fixed(2)").prefers_plain(2, 9)


def test_rows_that_share_positions_depend_on_each_other(pair):
    method = test_loops.method_of(pair.target.model, pair.draft.model)
    with pytest.raises(ValueError, match=r"Alone decides which slots .*declare reads_batch = True"):
        building.with_policy(method, Alone())
