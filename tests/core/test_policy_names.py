"""Policies by name, of one's own and through `generate`; what is refused, in words."""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.adaptive.policies import path
from specjax import generate, policies
from specjax.decoding import building
from specjax.policies import Costs
from specjax.pytrees import pytree
from specjax.rules import Token
from specjax.sampling import Sampling
from test_policies import bias, lengths, small_method
from toy_policies import BY_SLOT, FOR_TREES, library

PATIENT = """
import jax.numpy as jnp

from specjax.policies import Policy
from specjax.pytrees import pytree


@pytree
class Patient(Policy):
    patience: float

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)  # bad rounds in a row

    def begin(self, state, live, gamma_max):
        return state, jnp.where(state < self.patience, 2, 1)

    def update(self, state, round_):
        bad = round_.accepted < round_.verified
        return jnp.where(round_.active, jnp.where(bad, state + 1, 0), state)
"""


@pytest.fixture
def patient(tmp_path, monkeypatch):
    (tmp_path / "patient.py").write_text(PATIENT)
    (tmp_path / "broken.py").write_text("import no_such_thing_at_all")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.sweep
def test_a_policy_in_one_file(patient):
    """Found by its import path, and exact."""
    policy = policies.parse("patient:Patient", patience=2)
    assert lengths(policy, 2, [(2, 1), (2, 0), (1, 0), (1, 1)]) == [2, 2, 1, 1, 2]
    with jax.enable_x64(True):
        assert bias(small_method(policy, jnp.float64), 4) < 1e-12


def test_names():
    """Every name stands for its maker, with its settings; some are tested elsewhere."""
    names = set(policies.NAMES) - FOR_TREES - BY_SLOT
    kinds = {type(policies.parse(name, **NEEDED.get(name, {}))) for name in names}
    assert kinds == {type(policy) for policy in library(1, 3).values()}
    assert float(policies.parse("svip", threshold=0.5).threshold) == 0.5


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("svipp", {}, "There is no policy 'svipp': it is one of constant, heuristic"),
        ("no_such_module:x", {}, "there is no module 'no_such_module'"),
        ("patient:Hasty", {}, "patient has no attribute 'Hasty'"),
        ("svip", {"bar": 1}, "unexpected keyword argument 'bar'; it is svip"),
        ("svip", {"scale": 0.0}, r"scale=0\.0 must be a number > 0"),
        ("heuristic", {"gamma": 0}, "gamma=0 must be"),
        ("confidence", {"threshold": 2}, "threshold=2 must be a number in"),
        ("adaedl", {"goal": 2}, "goal=2 must be"),
        ("goodput", {"costs": Costs(0.1, [1, 1]), "memory": 2}, "memory=2 must be"),
    ],
)
def test_errors(name, settings, message, patient):
    with pytest.raises(ValueError, match=message):
        policies.parse(name, **settings)


NEEDED = {
    "constant": {"gamma": 3},
    "goodput": {"costs": Costs(0.1, [1, 1])},
    "lookahead": {"costs": Costs(0.1, [1, 1])},
    "together": {"costs": Costs(0.1, [1, 1])},
    "fixed": {"slots": 2},
    "by_batch_size": {"table": {1: 2}},
    "early_stop": {"times": Costs(0.0, [1.0], positions=[2])},
}


def test_an_import_error_inside_a_policy_is_shown(patient):
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        policies.parse("broken:Policy")


# Through `generate`.


@pytree
class Secretive(Token):
    """Shows nothing of shorter drafts, except at temperature 0."""

    reveals_shorter = False

    def under(self, sampling):
        return Token() if sampling.greedy else self


@pytest.mark.sweep
def test_generate_takes_a_name_and_passes(pair):
    """Greedy tokens as with a constant length, from fewer drafted ones."""
    texts = ["return self.line", "import os, sys"]
    plain = generate(pair.target, pair.draft, texts, gamma=4, max_new_tokens=12)
    found = generate(
        pair.target, pair.draft, texts, gamma=4, max_new_tokens=12, policy="svip", passes=(2, 4, 6)
    )
    assert found.tokens == plain.tokens
    assert found.verified.sum() < plain.verified.sum()


@pytest.mark.sweep
def test_pairs_that_do_not_fit(pair):
    """Hedge with a rule that hides shorter drafts; passes that are none."""
    build = functools.partial(building.build, pair.target, pair.draft, gamma=4)
    with pytest.raises(ValueError, match=r"Hedge learns .* which Secretive does not show"):
        build(sampling=Sampling(1.0), rule=Secretive(), policy=path("hedge"))
    build(sampling=Sampling(0.0), rule=Secretive(), policy=path("hedge"))
    build(sampling=Sampling(1.0), rule=Secretive(), policy=path("ucb"))
    with pytest.raises(ValueError, match="passes=0 must be a whole number ≥ 1"):
        build(sampling=Sampling(1.0), passes=(2, 0))
