"""Tiny targets of every layout, EAGLEs of them that say something, and an EAGLE in slow numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints import Checkpoint
from specjax.drafters import eagle
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Llama, LlamaConfig
from specjax.models.memory import dtype_of
from specjax.models.t5 import T5, T5Config

KINDS = ("t5", "gpt", "llama")
EOS = 2


def _config(kind: str, size: int):
    ids = {"vocab_size": size, "pad_token_id": 0}
    if kind == "t5":
        return T5Config(
            d_model=8, d_kv=4, d_ff=12, num_layers=1, num_decoder_layers=2, num_heads=2, **ids
        )
    if kind == "gpt":
        return GPTConfig(n_positions=64, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, **ids)
    return LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, **ids,
    )  # fmt: skip


def louder(module: nnx.Module, by: float, dtype, seed: int = 1) -> None:
    """Weights large enough for distributions that differ from place to place, in place."""
    leaves, treedef = jax.tree.flatten(nnx.state(module))
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(
            (by if x.ndim > 1 else 1.0) * np.asarray(x, np.float64)  # norms stay near 1
            + 0.1 * rng.normal(size=x.shape),
            dtype,
        )
        for x in leaves
    ]
    nnx.update(module, jax.tree.unflatten(treedef, leaves))


@functools.cache
def target_of(kind: str, size: int = 5, dtype=jnp.float32, seed: int = 0) -> Checkpoint:
    """A target of 8 features and two layers with `size` ids."""
    config = _config(kind, size)
    make = {"t5": T5, "gpt": GPT, "llama": Llama}[kind]
    module = make(config, rngs=nnx.Rngs(seed), dtype=dtype)
    louder(module, {"t5": 1.0, "gpt": 25.0, "llama": 25.0}[kind], dtype, seed)
    model = LanguageModel.of(module)
    return Checkpoint(f"tiny {kind}", model, config, None, (EOS,))


def eagle_of(target: Checkpoint, version: int, *, first_learned: bool = True, **options):
    """Random, in the target's dtype, with a head over all ids but the last for version 3."""
    dtype = dtype_of(target.model)
    if version == 3:
        options = {"ids": np.arange(target.model.vocab_size - 1), "taps": (0, 1, 2), **options}
    made = eagle.fresh(target, version=version, heads=2, inner=12, **options)
    module = made.module
    louder(module, 3.0, dtype)
    if not first_learned:
        config = dataclasses.replace(made.config, first_learned=False)
        names = eagle.tensor_names(config)
        tensors = {
            name: array.astype(dtype) if array.dtype.kind == "f" else array
            for name, array in dataclasses.replace(made, params=_pure(module)).tensors().items()
        }
        kept = {name: tensors[name] for parts in names.values() for name in parts}
        kept |= {"d2t": tensors["d2t"]} if version == 3 else {}
        return eagle.Eagle.from_tensors(eagle.settings_of(config), kept, target)
    return dataclasses.replace(made, params=_pure(module))


def _pure(module):
    return nnx.to_pure_dict(nnx.state(module))


# --- in numpy ------------------------------------------------------------------------------------


def features_of(drafter, source, source_len, tokens) -> np.ndarray:
    """(B, T, F): the target's hidden states, as the drafter sees them, in one call."""
    module = drafter.target.module()
    context = module.encode(jnp.asarray(source), jnp.asarray(source_len))
    model = drafter.sees(drafter.target)
    return np.asarray(model(jnp.asarray(tokens), jnp.zeros((1,), jnp.int32), context, None)[0])


def reference(
    settings: dict, tensors: dict, embedding: np.ndarray, head, hidden: np.ndarray, tokens
) -> np.ndarray:
    """Logits (T, V) of an EAGLE at each slot of one text with the target's true features.

    Args:
      settings, tensors: of `Eagle`, without cross-attention.
      embedding: (V, E) of the target.
      head: (T, E) → (T, V) of the target.
      hidden: (T, F) of the target after each token.
    """
    w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    layer, width, three = settings["layer"], embedding.shape[1], bool(settings["taps"])
    place = "midlayer" if three else "layers.0"
    count = len(tokens)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + layer["rms_norm_eps"])
        return x / rms * w[f"{name}.weight"]

    features = linear(hidden[:, width:], "fc") if three else hidden
    first = w.get("first", np.zeros(width))
    before = np.concatenate([first[None], features[:-1]])
    embedded = embedding[np.asarray(tokens)].astype(np.float64)
    if three:
        normed = norm(before, f"{place}.hidden_norm")
        residual = normed if settings["residual_normed"] else before
        x = np.concatenate([norm(embedded, f"{place}.input_layernorm"), normed], axis=1)
    else:
        residual = x = linear(np.concatenate([embedded, before], axis=1), "fc")
    heads, shared = layer["num_attention_heads"], layer["num_key_value_heads"]
    size = layer["head_dim"]
    q, k, v = (linear(x, f"{place}.self_attn.{n}_proj").reshape(count, -1, size) for n in "qkv")
    turning = layer["rope_theta"] ** (-2 * np.arange(size // 2) / size)
    angles = np.arange(count)[:, None, None] * turning
    cos, sin = np.cos(angles), np.sin(angles)

    def turn(y):
        left, right = np.split(y, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    q, k = turn(q), turn(k)
    k, v = (np.repeat(y, heads // shared, axis=1) for y in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(size)
    seen = np.tril(np.ones((count, count), bool))
    if not settings["first_learned"]:
        seen[1:, 0] = False
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", weights, v).reshape(count, -1)
    x = residual + linear(mixed, f"{place}.self_attn.o_proj")
    inner = norm(x, f"{place}.post_attention_layernorm")
    gate = linear(inner, f"{place}.mlp.gate_proj")
    gated = gate / (1 + np.exp(-gate)) * linear(inner, f"{place}.mlp.up_proj")
    x = x + linear(gated, f"{place}.mlp.down_proj")
    if not three:
        return head(x)
    few = linear(norm(x, "norm"), "lm_head")
    logits = np.full((count, len(embedding)), -np.inf)
    logits[:, np.arange(few.shape[1]) + np.asarray(tensors["d2t"])] = few
    return logits
