"""One encoder for a target and its drafter: how often it runs, which keys and values of the source
are held, and what a shallow decoder stores. tests/core/test_parts.py enumerates the drafters."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from eagles import eagle_of
from experiments.train import medusa
from specjax import decoding, drafters
from specjax.drafters import attached
from specjax.drafters.kangaroo import kangaroo
from specjax.drafters.shallow import Shallow, shallow
from specjax.drafters.switch import switch
from specjax.models.attention import TILE
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5
from specjax.models.tapped import Tapped
from specjax.pytrees import pytree
from specjax.sampling import Sampling, row_keys
from table_models import inputs_of
from test_exits import PROMPTS, logits_of, pointers
from test_int8 import in_int8
from tiny_models import quick, random_model

SOURCES = [[3, 5, 9, 1, 4, 4, 6], [7]]
ENCODED = (2, 7, 8)  # the shape of the encoder's output: rows, the longest source, width
LAYERS = 3  # of the target's decoder
DRAFTS = {  # how many layers of keys and values of the source a drafter adds to the target's
    "early_exit": (lambda target: specjax.early_exit(target, (0, 2)), 0),
    "frequent": (lambda target: specjax.frequent(specjax.early_exit(target, 1), range(9)), 0),
    "kangaroo": (lambda target: kangaroo(target, 1), 1),
    "shallow": (lambda target: shallow(target, (0, 2)), 2),
    "eagle 1": (lambda target: eagle_of(target, 1), 1),
    "eagle 3": (lambda target: eagle_of(target, 3), 1),
    "medusa": (lambda target: medusa.init(target.model, 2), 0),
    "switch": (
        lambda target: switch((shallow(target, 1), specjax.early_exit(target, 1)), target),
        1,
    ),
}
APART = {  # those that run an encoder of their own, or the target's again
    "model": (lambda _: random_model("t5", 40, seed=3, layers=1), 1),
    "exit of another": (lambda _: specjax.early_exit(random_model("t5", 40, seed=3), 2), 2),
}


@pytree
class Apart(LanguageModel):
    """A model whose encoding no drafter reads."""

    def encoding(self, inputs):
        """None: each drafter runs the encoder."""


def apart(model):
    """A target, whole or as a drafter sees it, whose encoding no drafter reads."""
    if isinstance(model, Tapped):
        return dataclasses.replace(model, model=apart(model.model))
    return Apart(**vars(model))


def method_of(name):
    target = random_model("t5", 40)
    draft = (DRAFTS | APART)[name][0](target)
    return decoding.speculative(target, draft, gamma=2, sampling=Sampling(0.0))


def start(method):
    zeros = jnp.zeros((2,), jnp.int32)
    inputs = inputs_of([[0], [0]], SOURCES)
    return method.start(inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 4, 100)


def encoded(monkeypatch, method):
    """Calls of the encoder while `start` is traced, and shapes of what it keeps of the source."""
    read, calls = T5.read, []

    def counted(self, *args):
        calls.append(args)
        return read(self, *args)

    monkeypatch.setattr(T5, "read", counted)
    kept = jax.tree.leaves(jax.eval_shape(start, method))
    return calls, [x.shape for x in kept if {7, TILE} & {*x.shape}]  # of 7 ids, in one tile


@pytest.mark.parametrize("name", DRAFTS | APART)
def test_the_encoder_runs_once_and_nothing_is_held_twice(name, monkeypatch):
    calls, held = encoded(monkeypatch, method_of(name))
    assert ENCODED not in held
    of_layers = [shape for shape in held if sorted(shape) == [2, 2, 4, TILE]]
    assert len(of_layers) == 2 * (LAYERS + (DRAFTS | APART)[name][1])
    assert len(calls) == (2 if name in APART else 1)
    # One mask for both, and one more for an encoder of its own.
    assert len(held) == len(of_layers) + len(calls)


def test_a_shallow_decoder_of_a_umt5_has_its_layers_biases():
    made = shallow(random_model("umt5", 40), 1)
    assert "decoder_bias" not in made.own
    biases = [name for name in made.tensors() if name.endswith("bias.weight")]
    assert biases == ["decoder.0.bias.weight"]


def test_a_target_can_keep_its_encoding(monkeypatch):
    """Where nothing is shared, the draft encodes again."""
    method = method_of("early_exit")
    method = dataclasses.replace(method, target=apart(method.target))
    assert len(encoded(monkeypatch, method)[0]) == 2


def test_a_drafter_reads_what_it_would_have_encoded_itself():
    """Its context and its state, with parts of the target's context in their places."""
    methods = {name: method_of(name) for name in DRAFTS}

    @jax.jit
    def both(methods):
        inputs = inputs_of([[0], [0]], SOURCES)
        shared = {}
        for name, method in methods.items():
            contexts, state = start(method)
            shared[name] = contexts.drafter, state.drafter
        return shared, {name: method.drafter.start(inputs, 100) for name, method in methods.items()}

    shared, alone = both(methods)
    assert jax.tree.structure(shared) == jax.tree.structure(alone)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(shared), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=str(path))


REFUSED = ("switch", "tree"), ("kangaroo", "int8")
NAMES, HOW = ("early_exit", "kangaroo", "shallow", "switch"), ("chain", "tree", "int8")
CASES = [case for case in itertools.product(NAMES, HOW) if case not in REFUSED]


@pytest.mark.parametrize(("name", "how"), quick(CASES, ("early_exit", "int8"), ("shallow", "tree")))
def test_greedy_tokens_are_those_of_plain_decoding(name, how):
    """In two rows, into which the other inputs are admitted."""
    target = random_model("t5", 40, seed=1)
    target = in_int8(target) if how == "int8" else target
    options = {"max_new_tokens": 10, "temperature": 0.0, "batch_size": 2}
    plain = specjax.generate(target, None, PROMPTS, **options)
    length = {"tree": "fixed(2, 1)"} if how == "tree" else {"gamma": 3}
    found = specjax.generate(target, DRAFTS[name][0](target), PROMPTS, **length, **options)
    assert found.tokens == plain.tokens
    assert found.drafted.sum() > 0


# --- a shallow decoder --------------------------------------------------------------------------


def trained(drafter: Shallow) -> Shallow:
    """Another decoder, of weights near these."""
    moved = jax.tree.map(lambda x: x + jnp.linspace(0, 0.1, x.size).reshape(x.shape), drafter.own)
    return dataclasses.replace(drafter, own=moved)


def test_its_directory_has_the_decoder_alone(tmp_path):
    target = random_model("t5", 40)
    begun = shallow(target, (0, 2))
    exit_ = logits_of(specjax.early_exit(target, (0, 2)).model)
    np.testing.assert_array_equal(logits_of(begun.model), exit_)
    new = pointers(jax.tree.leaves(begun)) - pointers(jax.tree.leaves(target.model))
    assert new == pointers(jax.tree.leaves(begun.own))
    drafter = trained(begun)
    expected = logits_of(drafter.model)
    assert np.abs(expected - exit_).max() > 0.01
    attached.save(tmp_path, drafter, target, dtype=np.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["settings"] == {"encoder": "target", "layers": [0, 2]}
    assert {name.split(".")[0] for name in drafter.tensors()} == {
        "decoder", "decoder_norm", "decoder_bias",
    }  # fmt: skip
    again = drafters.load(str(tmp_path), target)
    np.testing.assert_array_equal(logits_of(again.model), expected)
    assert drafters.parameters(again, target) == sum(x.size for x in jax.tree.leaves(begun.own))
    # As stored it does not depend on the platform's layout.
    elsewhere = random_model("t5", 40, platform="gpu")
    there = Shallow.from_tensors(drafter.settings(), drafter.tensors(), elsewhere)
    np.testing.assert_allclose(logits_of(there.model), expected, rtol=1e-4, atol=1e-5)


def test_its_decoder_stays_in_floats_beside_int8(tmp_path):
    """It starts as the floats that a target in int8 stands for, and loads beside one."""
    target = random_model("t5", 40)
    narrow = in_int8(target, cache=False)
    begun, exact = (jax.tree.leaves(shallow(one, (0, 2)).own) for one in (narrow, target))
    for one, other in zip(begun, exact, strict=True):
        assert one.dtype == jnp.float32
        assert jnp.abs(one - other).max() <= 0.501 * jnp.abs(other).max() / 127
    assert any(jnp.any(one != other) for one, other in zip(begun, exact, strict=True))
    attached.save(tmp_path, trained(shallow(target, 1)), target, dtype=np.float32)
    of_floats, beside = (drafters.load(str(tmp_path), one) for one in (target, narrow))
    for one, other in zip(jax.tree.leaves(of_floats.own), jax.tree.leaves(beside.own), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_it_refuses(tmp_path):
    """Another target, with both names; another encoder; and a target without one."""
    target, other = (
        dataclasses.replace(random_model("t5", 40, seed=seed), name=f"target {seed}")
        for seed in (0, 3)
    )
    drafter = shallow(target, 1)
    attached.save(tmp_path, drafter, target)
    words = "belongs to the target 'target 0', and 'target 3' has other weights"
    with pytest.raises(ValueError, match=words):
        drafters.load(str(tmp_path), other)
    with pytest.raises(ValueError, match="other weights"):
        specjax.generate(other, drafter, [[3, 1]])
    with pytest.raises(ValueError, match="encoder='own' should be 'target'"):
        Shallow.from_tensors({"encoder": "own", "layers": [0]}, drafter.tensors(), target)
    with pytest.raises(ValueError, match=r"gpt2 has no encoder .* early_exit"):
        shallow(random_model("gpt2", 12), 1)
