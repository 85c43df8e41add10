"""Drafters that belong to a target, named by their directories, in the tools that judge drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pairs import TEXTS
from specjax import drafters
from specjax.drafters import attached, eagle
from specjax.policies import constant
from specjax.replay import replay, rollouts
from specjax.sampling import sampling
from specjax.training import medusa

BUDGET = 12
KINDS = {
    "eagle 1": lambda target: eagle.fresh(target, version=1),
    "eagle 3": lambda target: eagle.fresh(target, version=3),
    "hydra": lambda target: medusa.init(target.model, heads=3, hydra=True),
}


@pytest.fixture(scope="module", params=KINDS)
def directory(request, pair, tmp_path_factory):
    """A drafter of each kind, which knows nothing yet, as its directory."""
    place = tmp_path_factory.mktemp("drafter")
    attached.save(place, KINDS[request.param](pair.target), pair.target, dtype=jnp.float32)
    return str(place)


def test_select(directory, pair):
    options = {"max_new_tokens": BUDGET, "gammas": (1, 2), "timed_inputs": 2, "repeats": 1}
    (found,) = specjax.select(pair.target, [directory], TEXTS, **options).candidates
    assert not found.problem
    wanted = specjax.measure_alpha(pair.target, directory, TEXTS, max_new_tokens=BUDGET)
    assert (found.alpha, found.alpha_low) == (wanted.value, wanted.low)
    own = drafters.load(directory, pair.target).tensors().values()
    assert found.parameters == sum(x.size for x in own if x.dtype.kind != "i")
    assert found.c > 0


def test_a_replay_is_the_loop(directory, pair):
    """At temperature 0 the rounds of a rollout along the target's outputs are those of decoding."""
    options = {"max_new_tokens": BUDGET, "batch_size": 8}
    real = specjax.generate(pair.target, directory, TEXTS, gamma=3, **options)
    assert real.tokens == specjax.generate(pair.target, None, TEXTS, **options).tokens
    loaded = drafters.load(directory, pair.target)
    how = {"gamma_max": 3, "sampling": sampling(0.0), "key": jax.random.key(0)}
    trace = rollouts.record(pair.target, loaded, TEXTS, real.tokens, **how, **options)
    found = replay.replay([constant(3)], trace, jax.random.key(0))
    lengths = np.arange(found.drafted.shape[-1])  # rounds are counted by length
    np.testing.assert_array_equal(found.drafted[0].sum(-1), real.target_calls)
    np.testing.assert_array_equal(found.drafted[0] @ lengths, real.drafted)
    np.testing.assert_array_equal(found.accepted[0] @ lengths, real.accepted)
