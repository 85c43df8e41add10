"""Random models of every family, small enough to enumerate, made without files; which cases are
slow."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import checkpoints
from specjax.checkpoints import Checkpoint
from specjax.models.gpt import GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Rope
from specjax.models.t5 import T5Config, UMT5Config

QUICK, VARIANTS = ("t5", "gpt2", "llama"), ("t5 tied", "mistral")
FAMILIES = (*QUICK, *VARIANTS)
# Biases and windows in some layers; norms of queries and keys and scaled rotations too.
QWENS = ("qwen2", "qwen3")


def slow(case):
    """A case of a parametrized test that `make slow` runs: a value, or a tuple of values."""
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)


def quick(cases, *chosen):
    """Cases of a parametrized test. `make test` runs the chosen ones, and `make slow` the rest."""
    return [case if case in chosen else slow(case) for case in cases]


def covering(*axes, count: int = 0):
    """All combinations of the axes' values. `make test` runs `count` of them: the values of the
    longest axis in turn, each once by default, in cases in which most pairs of values are new."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases, chosen, seen = list(itertools.product(*axes)), set(), set()
    place = max(range(len(axes)), key=lambda place: len(axes[place]))
    for value in itertools.islice(itertools.cycle(axes[place]), count or len(axes[place])):
        some = [case for case in cases if case[place] == value]
        best = max(some, key=lambda case: len(pairs(case) - seen))
        chosen.add(best)
        seen |= pairs(best)
    return quick(cases, *chosen)


def config_of(family: str, vocab_size: int, layers: int):
    """So many layers, of the decoder if there is an encoder too."""
    llama = {
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    t5 = {
        "vocab_size": vocab_size,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 1,
        "num_decoder_layers": layers,
        "num_heads": 2,
        "relative_attention_num_buckets": 4,
    }
    if family == "gpt2":
        ids = {"bos_token_id": 0, "pad_token_id": 0}
        return GPTConfig(vocab_size, n_positions=64, n_embd=8, n_layer=layers, n_head=2, **ids)
    if family == "llama":
        return LlamaConfig(**llama)
    if family == "mistral":
        return MistralConfig(**llama, sliding_window=3, tie_word_embeddings=True)
    if family == "qwen2":
        return Qwen2Config(**llama, sliding_window=3, full_layers=(1,))
    if family == "qwen3":
        rope = Rope("yarn", theta=50.0, factor=4.0, original_length=16, slow=0.25, fast=2.0)
        some = {"attention_bias": True, "sliding_window": 2, "full_layers": (0,)}
        return Qwen3Config(**llama, **some, head_dim=4, rope=rope)
    tied = {"tie_word_embeddings": True, "scale_decoder_outputs": True}
    if family == "umt5":
        return UMT5Config(**t5)
    return T5Config(**t5, **(tied if family == "t5 tied" else {}))


def random_model(
    family: str,
    vocab_size: int,
    *,
    layers: int = 3,
    seed: int = 0,
    dtype=jnp.float32,
    eos: int = 2,
    platform=None,
) -> Checkpoint:
    """Weights so strong that every token before changes what comes next."""
    config = config_of(family, vocab_size, layers)
    rngs = nnx.Rngs(seed)
    module = checkpoints.FAMILIES[config.model_type].build(config, rngs=rngs, dtype=dtype)
    rng = np.random.default_rng(seed)
    params = nnx.state(module)
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), params)
    nnx.update(module, drawn)
    model = LanguageModel.of(module, platform=platform)
    return Checkpoint(family, model, config, eos_ids=(eos,))
