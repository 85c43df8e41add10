"""One encoder for a target and its drafter: how often it runs, and which keys and values of the
source are held. tests/core/test_parts.py enumerates the drafters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from eagles import eagle_of
from experiments.train import medusa
from specjax.decoding import building
from specjax.drafters.switch import switch
from specjax.drafters.views import kangaroo, shallow
from specjax.models.attention import TILE
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5
from specjax.pytrees import pytree
from specjax.sampling import Sampling, row_keys
from table_models import inputs_of
from test_exits import PROMPTS
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
    return Apart(**vars(model))


def method_of(name):
    target = random_model("t5", 40)
    draft = (DRAFTS | APART)[name][0](target)
    return building.build(target, draft, gamma=2, sampling=Sampling(0.0))


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


REFUSED = (("switch", "tree"),)
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
    assert found.verified.sum() > 0
