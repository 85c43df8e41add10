"""Medusa and Hydra: what they propose, from which hidden state, and that the output stays the
target's."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import test_exactness
import test_loops
from checkpoint_formats import write_torch
from experiments.train.medusa import init
from specjax import rules
from specjax.checkpoints.own import wrap
from specjax.drafters import medusa
from specjax.drafters.medusa import Block, Head, Medusa
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Llama, LlamaConfig
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from specjax.types import Inputs
from table_models import TableModel, inputs_of, random_table
from tiny_models import quick
from toy_policies import Erratic

pytestmark = pytest.mark.sweep

NEVER = jnp.int32([-1])
BUDGET = 12
HEADS = 3
V, E = 30, 12  # of the decoders; a T5 has the sizes of test_loops
RAGGED = inputs_of([[1], [0, 2, 3, 1], [4, 4]])
SOURCES = inputs_of([[0], [0], [0]], [[3, 4, 1], [7, 1], [5, 6, 8, 9, 1]])


@functools.cache
def target(kind: str) -> LanguageModel:
    """With weights large enough that distributions differ from place to place."""
    if kind == "t5":
        return test_loops.target()
    if kind == "gpt":
        config = GPTConfig(vocab_size=V, n_positions=40, n_embd=E, n_layer=1, n_head=2,
                           bos_token_id=0, pad_token_id=0)  # fmt: skip
        module: nnx.Module = GPT(config, rngs=nnx.Rngs(0))
    else:
        shapes = LlamaConfig(
            vocab_size=V, hidden_size=E, intermediate_size=20, num_hidden_layers=1,
            num_attention_heads=2, bos_token_id=0, pad_token_id=0, max_position_embeddings=40,
        )  # fmt: skip
        module = Llama(shapes, rngs=nnx.Rngs(0))
    model = LanguageModel.of(module, V - 2)
    return dataclasses.replace(model, params=jax.tree.map(lambda x: 7 * x, model.params))


def shaken(drafter: Medusa, scale: float = 0.3) -> Medusa:
    """With noise on all of the heads' parameters."""
    rng = np.random.default_rng(0)

    def shake(x):
        return x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype)

    return dataclasses.replace(drafter, heads=jax.tree.map(shake, drafter.heads))


OPTIONS = {  # a layout, and what its heads are
    "t5": {"hydra": True},
    "gpt": {"own_head": True},
    "llama": {"hydra": True, "own_head": True, "layers": 2},
}


@functools.cache
def drafter(kind: str) -> Medusa:
    return shaken(init(target(kind), HEADS, **OPTIONS[kind]))


def inputs_for(kind: str) -> Inputs:
    return SOURCES if kind == "t5" else RAGGED


def method_of(drafter, rule=None, policy=None, chosen=None, gamma_max=3, eos_ids=NEVER):
    return Speculative(
        drafter.target,
        drafter,
        rules.Token() if rule is None else rule,
        constant(gamma_max) if policy is None else policy,
        Sampling(1.0) if chosen is None else chosen,
        eos_ids,
        gamma_max,
    )


# What should be proposed, in slow numpy, from hidden states over the whole text.


def silu(x):
    return x / (1 + np.exp(-x))


def hidden_states(model: LanguageModel, inputs: Inputs, tokens) -> np.ndarray:
    """(B, T, E), in one call without a cache."""
    module = model.module()
    context = module.encode(inputs.source, inputs.source_len)
    start = jnp.zeros(tokens.shape[:1], jnp.int32)
    return np.asarray(module(jnp.asarray(tokens), start, context, None)[0])


def unit(model: LanguageModel, token: int) -> np.ndarray:
    """A token's embedding over its root mean square."""
    row = np.asarray(model.module().embed(jnp.int32([[token]])))[0, 0].astype(np.float64)
    return row / np.sqrt(np.mean(row**2))


def expected_logits(drafter: Medusa, k: int, feature, path) -> np.ndarray:
    """Logits of the head of slot k, from the feature and the tokens since the newest known one."""
    head = jax.device_get(drafter.heads[k])
    x = np.asarray(feature, np.float64)
    for i, block in enumerate(head.blocks):
        reads = drafter.hydra and i == 0
        read = [unit(drafter.target, token) for token in path[: k + 1]] if reads else []
        x = x + silu(np.concatenate([x, *read]) @ block.weight + block.bias)
    if head.linear is not None:
        return x @ head.linear
    return np.asarray(drafter.target.logits(jnp.asarray(x, jnp.float32)))


class Found(NamedTuple):
    """What a run proposed."""

    worst: float  # distance of a proposed log-probability from the reference's
    drafted: list[int]  # the length of each draft that was begun with a feature
    silent: int  # rounds without one
    accepted: int


def proposals(method: Speculative, drafter: Medusa, inputs: Inputs, budget=BUDGET) -> Found:
    """Every distribution that the loop reports against `drafter`'s reference."""
    step = jax.jit(lambda contexts, state: method.step(contexts, state))
    contexts, state = test_loops.begin(method, inputs, budget)
    rounds = []
    while not np.all(state.done):
        before = np.asarray(state.length)
        state, round_ = step(contexts, state)
        rounds.append((before, jax.device_get(round_)))
    tokens = np.asarray(state.tokens)[:, : int(state.length.max())]
    hidden = hidden_states(drafter.target, inputs, tokens)
    worst, drafted, silent, accepted = 0.0, [], 0, 0
    for before, round_ in rounds:
        for row in np.flatnonzero(round_.active):
            known, drafts = before[row], round_.drafts
            if known == 1:
                assert drafts.length[row] == 0
                silent += 1
                continue
            drafted.append(int(drafts.length[row]))
            accepted += int(round_.accepted[row])
            path = [tokens[row, known - 1], *drafts.tokens[row]]
            for k in range(drafted[-1]):
                logits = expected_logits(drafter, k, hidden[row, known - 2], path)
                expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))
                worst = max(worst, np.abs(drafts.logprobs[row, k] - expected).max())
    return Found(worst, drafted, silent, accepted)


@pytest.mark.parametrize("kind", quick(OPTIONS, "t5"))
def test_the_loop_proposes_what_the_true_hidden_states_say(kind):
    """Ragged rows, a prompt of one token, rounds without drafts, rows that end apart: within 1e-4
    of numpy."""
    method = method_of(drafter(kind), policy=Erratic())
    found = proposals(method, drafter(kind), inputs_for(kind), np.array([12, 7, 10]))
    print(found)
    assert found.worst < 1e-4
    assert set(found.drafted) >= {0, 1, 3}
    assert 0 < found.accepted < sum(found.drafted)
    assert found.silent == (3 if kind == "t5" else 1)


def test_nothing_is_proposed_beyond_the_heads():
    """γ = 4 and three heads: three tokens, and the same output."""
    found = proposals(method_of(drafter("gpt"), gamma_max=4), drafter("gpt"), RAGGED)
    assert found.worst < 1e-4
    assert max(found.drafted) == HEADS


@pytree
class ShiftedByOne(Medusa):
    """Keeps the hidden state of the token before the one that it should be."""

    def observe(self, tokens, start, hidden, count, *rest):
        fewer = jnp.where(count > 1, count - 1, count)
        return super().observe(tokens, start, hidden, fewer, *rest)


@pytree
class OfTheRejected(Medusa):
    """Keeps the hidden state of the last token that was read, accepted or not."""

    def observe(self, tokens, start, hidden, count, *rest):
        everything = jnp.where(count > 0, tokens.shape[1], 0)
        return super().observe(tokens, start, hidden, everything, *rest)


@pytree
class OneTokenLate(Medusa):
    """Reads the tokens up to the one before the newest."""

    def extend(self, token, position, context, state):
        before = jnp.take_along_axis(state.path, state.slot[:, None], axis=1)[:, 0]
        return super().extend(before, position, context, state)


@pytest.mark.parametrize("fault", [ShiftedByOne, OfTheRejected, OneTokenLate])
def test_the_reference_sees(fault):
    """A planted fault moves a log-probability by more than .05."""
    right = drafter("llama")
    wrong = fault(right.target, right.heads)
    assert proposals(method_of(wrong), right, RAGGED).worst > 0.05


# Exactness.


@pytree
class Embeds(TableModel):
    """A table of which Hydra can ask embeddings: rows of the table."""

    def module(self):
        return self

    def embed(self, tokens):
        return self.table[tokens]


def on_table(heads: int, hydra: bool, dtype=jnp.float64) -> Medusa:
    """Random heads, with linear heads of their own, on a random table over 3 tokens."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def head(k):
        return Head((Block(normal(3 * (k + 2) if hydra else 3, 3), normal(3)),), normal(3, 3))

    table = random_table(1, forbidden=0, dtype=dtype).table
    return Medusa(Embeds(table), tuple(head(k) for k in range(heads)))


EOS = test_exactness.EOS


# Memory and files.


def pointers(tree) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_the_targets_arrays_are_shared():
    """Head and embedding are the target's buffers; what is stored is the blocks alone."""
    model = target("llama")
    made = init(model, HEADS, hydra=True)
    again = Medusa.from_tensors(made.settings(), made.tensors(), wrap(model))
    for one in (made, again):
        assert pointers(one.target) == pointers(model)
        sizes = [x.size for x in jax.tree.leaves(one.heads)]
        assert sum(sizes) == sum((k + 2) * E * E + E for k in range(HEADS))
        assert not set(pointers(one.heads)) & set(pointers(model))
    assert sum(x.size for x in made.tensors().values()) == sum(sizes)


def published(directory, form: str, layers: int = 2, rows: int = V) -> dict[str, np.ndarray]:
    """A directory as FasterDecoding/Medusa writes it, and its tensors: the blocks of a head are one
    module there, so that several of them are equal."""
    rng, tensors = np.random.default_rng(3), {}
    for k in range(2):
        weight, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((E, E), (E,)))
        for i in range(layers):
            tensors |= {f"{k}.{i}.linear.weight": weight, f"{k}.{i}.linear.bias": bias}
        tensors[f"{k}.{layers}.weight"] = rng.normal(size=(rows, E)).astype(np.float32)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "vocab_size": rows}
    (directory / "config.json").write_text(json.dumps(config))
    if form == "pt":
        write_torch(directory / "medusa_lm_head.pt", tensors)
    else:
        named = {f"medusa_head.{name}": np.array(x) for name, x in tensors.items()}
        save_file(named, directory / "medusa_lm_head.safetensors")
    return tensors


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_published_heads(tmp_path, form):
    """Both formats, names with and without a prefix: logits of each head within 1e-5 of numpy."""
    tensors, model = published(tmp_path, form), target("llama")
    loaded = medusa.load_published(tmp_path, wrap(model))
    tokens, one = jnp.int32([[3, 9]]), jnp.int32([1])
    hidden = np.random.default_rng(0).normal(size=(1, 1, E)).astype(np.float32)
    _, state = loaded.start(inputs_of([[3, 9]]), 8)
    state = loaded.observe(tokens[:, :1], one - 1, jnp.asarray(hidden), one, (), state)
    said, state = loaded.begin(tokens, one + 1, (), state)
    for k in range(3):
        logits = np.asarray(loaded.logits(said))[0]
        if k == 2:
            assert np.all(logits == -np.inf)
            break
        x = hidden[0, 0]
        for i in range(2):
            x = x + silu(tensors[f"{k}.{i}.linear.weight"] @ x + tensors[f"{k}.{i}.linear.bias"])
        expected = (tensors[f"{k}.2.weight"] @ x)[: model.vocab_size]
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        said, state = loaded.extend(one, one + 1 + k, (), state)


def test_heads_that_do_not_fit(tmp_path):
    """Each is refused by the name of what is wrong."""
    tensors = published(tmp_path, "pt", rows=V - 5)
    model, settings = target("llama"), {"medusa_num_heads": 2, "medusa_num_layers": 2}
    with pytest.raises(ValueError, match=r"0\.2\.weight has shape \(25, 12\).*with 28 ids"):
        medusa.load_published(tmp_path, wrap(model))
    with pytest.raises(ValueError, match=r"shape.*of width 24 with 37 ids.*another target"):
        medusa.load_published(tmp_path, wrap(target("t5")))
    wide = {f"{k}.2.weight": np.zeros((V, E), np.float32) for k in range(2)}
    with pytest.raises(ValueError, match=r"no tensor medusa_head\.2\.2\.weight"):
        Medusa.from_tensors({**settings, "medusa_num_heads": 3}, tensors | wide, wrap(model))
    with pytest.raises(ValueError, match=r"medusa_num_heads=0 must be"):
        Medusa.from_tensors({**settings, "medusa_num_heads": 0}, tensors, wrap(model))
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"none of medusa_lm_head\.safetensors"):
        medusa.load_published(tmp_path, wrap(model))
