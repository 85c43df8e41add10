"""Turns a GGUF file into what Hugging Face's directories hold: a config and names of tensors.

Read are the architectures llama (Mistral too), qwen2, qwen3, gemma2, gemma3, gpt2 and t5 (mT5 and
umT5 too), as llama.cpp's converter writes them. It interleaves the halves of each head in a Llama's
queries and keys, adds 1 to a Gemma's norms, transposes a GPT-2's projections, and stores Llama 3's
scaling of positions as factors of all frequencies.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints import gemma, gguf_files, gpt
from specjax.checkpoints.config_json import check_fields, check_sizes
from specjax.checkpoints.gguf_files import GGUF, GGUFTensor
from specjax.checkpoints.gguf_tokenizers import ENDS, TOKENS, mark_ids
from specjax.checkpoints.tensors import AGAIN, Tensor, Turned, read_into
from specjax.models.llama import Rope, frequencies
from specjax.support.ranges import LARGEST


class Layout(NamedTuple):
    """The differences of an architecture from Hugging Face's layout."""

    fields: dict[str, str]
    """Fields of config.json, and their metadata; a "?" marks what may be absent."""
    layers: str
    """Beginning of the names of a layer's tensors."""
    names: dict[str, str]
    """Names of tensors in the file and in Hugging Face's, within a layer or outside."""
    turned: tuple[str, ...] = ()
    """Suffixes of tensors that the file transposes."""


LLAMA = Layout(
    {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv?",
        "head_dim": "attention.key_length?",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base?",
    },
    "model.layers.",
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    },
)
GEMMA = Layout(
    {
        **LLAMA.fields,
        "sliding_window": "attention.sliding_window?",
        "attn_logit_softcapping": "attn_logit_softcapping?",
        "final_logit_softcapping": "final_logit_softcapping?",
        "rope_local_base_freq": "rope.freq_base_swa?",
    },
    LLAMA.layers,
    {
        **LLAMA.names,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
GPT2 = Layout(
    {
        "n_embd": "embedding_length",
        "n_inner": "feed_forward_length?",
        "n_layer": "block_count",
        "n_head": "attention.head_count",
        "n_positions": "context_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    },
    "transformer.h.",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    gpt.TURNED,
)
T5 = Layout(
    {
        "d_model": "embedding_length",
        "d_ff": "feed_forward_length",
        "d_kv": "attention.key_length",
        "num_layers": "block_count",
        "num_decoder_layers": "decoder_block_count?",
        "num_heads": "attention.head_count",
        "n_positions": "context_length?",
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "relative_attention_num_buckets": "attention.relative_buckets_count",
        "decoder_start_token_id": "decoder_start_token_id?",
    },
    "block.",
    {
        "token_embd": "shared",
        "output_norm": "final_layer_norm",
        "output": "lm_head",
        "attn_norm": "layer.0.layer_norm",
        **{f"attn_{x}": f"layer.0.SelfAttention.{x}" for x in "qkvo"},
        "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
        "cross_attn_norm": "layer.1.layer_norm",
        **{f"cross_attn_{x}": f"layer.1.EncDecAttention.{x}" for x in "qkvo"},
        "cross_attn_rel_b": "layer.1.EncDecAttention.relative_attention_bias",
        "ffn_norm": "layer.{last}.layer_norm",
        "ffn_gate": "layer.{last}.DenseReluDense.wi_0",
        "ffn_up": "layer.{last}.DenseReluDense.wi{up}",
        "ffn_down": "layer.{last}.DenseReluDense.wo",
    },
)
LAYOUTS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
    "gpt2": GPT2,
    "t5": T5,
}
NAME = re.compile(r"(?:(enc|dec)\.)?(?:blk\.(\d+)\.)?(\w+)(\.(?:weight|bias))")
EMBEDDING, HEAD, ROPE_FREQS = "token_embd.weight", "output.weight", "rope_freqs.weight"
GATED = "gated-gelu"
INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
SCALING = {  # in `rope_scaling` and in the metadata
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
THETA = 10_000.0  # where the metadata has none
PERIODS = {"gemma2": 2, "gemma3": 6}  # of layers that see all tokens
LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which scales queries by its width
LLAMA3 = Rope("llama3", original_length=8192, slow=1.0, fast=4.0)  # of all sizes of Llama 3
OTHER = (  # fields that are no sizes
    "rope_theta",
    "rope_local_base_freq",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the fields of config.json, and the tensors under Hugging Face's names.

    Raises:
      FileNotFoundError: a shard is missing.
      ValueError: a file is damaged, lacks metadata, or is of another architecture.
    """
    found = gguf_files.read(path)
    try:
        raw = _config(found)
        check_fields(raw)
        return raw, _named(found, raw)
    except ValueError as error:
        raise ValueError(f"{found.file}: {error}") from None


def _config(found: GGUF) -> dict[str, Any]:
    """The fields of config.json."""
    fields, there = found.fields, found.tensors
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise ValueError(
            f"general.architecture={kind!r} is not supported; supported are "
            f"{', '.join(map(repr, LAYOUTS))}."
        )
    raw: dict[str, Any] = {}
    for name, given in LAYOUTS[kind].fields.items():
        key = f"{kind}.{given.removesuffix('?')}"
        if key in fields:
            raw[name] = _plain(fields[key])
        elif not given.endswith("?"):
            raise ValueError(f"its metadata has no {key!r}. {AGAIN}")
    check_sizes(raw, other=OTHER)
    rows = there[EMBEDDING].shape[0] if EMBEDDING in there else 0
    tokens = fields.get(TOKENS, ())
    if not isinstance(tokens, list | tuple) or len(tokens) not in ((rows,) if tokens else (0,)):
        raise ValueError(f"{TOKENS} are not as many as the rows of {EMBEDDING}, {rows}. {AGAIN}")
    ids = {role: mark_ids(fields, role, rows) for role in ("bos", "padding", *ENDS)}
    raw |= {
        "model_type": kind,
        "vocab_size": rows,
        "bos_token_id": next(iter(ids["bos"]), None),
        "pad_token_id": next(iter(ids["padding"]), None),
        "eos_token_id": [end for role in ENDS for end in ids[role]],
        "tie_word_embeddings": HEAD not in there,
    }
    if kind == "gpt2":
        raw["tie_word_embeddings"] = None  # the head may be a copy of the embedding
    elif kind == "t5":
        gated = "enc.blk.0.ffn_gate.weight" in there
        raw["feed_forward_proj"] = GATED if gated else "relu"
        raw["tie_word_embeddings"] |= not gated  # the head of T5 1.0 is its embedding
        if there.keys() & {f"{stack}.blk.1.attn_rel_b.weight" for stack in ("enc", "dec")}:
            raw["model_type"] = "umt5"
    else:
        raw |= _llama(kind, raw, found)
    return raw


def _llama(kind: str, raw: Mapping[str, Any], found: GGUF) -> dict[str, Any]:
    """The fields that the Llama layout has beyond `LLAMA`."""
    stored = {
        key.removeprefix(f"{kind}."): _plain(value)
        for key, value in found.fields.items()
        if key.startswith(f"{kind}.")
    }
    heads = raw["num_attention_heads"]
    size = raw.get("head_dim") or stored.get("rope.dimension_count") or raw["hidden_size"] // heads
    given: dict[str, Any] = {
        "num_key_value_heads": raw.get("num_key_value_heads", heads),
        "head_dim": size,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in found.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in found.tensors,
    }
    check_sizes(given, other=("attention_bias", "mlp_bias"))
    built = {
        "rope.dimension_count": size,
        "attention.value_length": size,
        "rope.scaling.attn_factor": 1.0,
        "expert_count": 0,
    }
    for key, value in built.items():
        if stored.get(key, value) != value:
            raise ValueError(f"{kind}.{key}={stored[key]!r} is not supported, only {value}.")
    if kind == "llama" and stored.get("attention.sliding_window"):
        given |= {"model_type": "mistral", "sliding_window": stored["attention.sliding_window"]}
    scaling = {
        name: stored[f"rope.scaling.{key}"]
        for name, key in SCALING.items()
        if f"rope.scaling.{key}" in stored
    }
    if "rope.scale_linear" in stored:  # in files of 2023
        scaling = {"rope_type": "linear", "factor": stored["rope.scale_linear"]}
    if scaling.get("rope_type", "none") != "none":
        given["rope_scaling"] = scaling
    if ROPE_FREQS in found.tensors:
        theta = raw.get("rope_theta", THETA)
        given["rope_scaling"] = _llama3(found.tensors[ROPE_FREQS], theta, size)
    return given | (_gemma(kind, raw, found, size) if kind in PERIODS else {})


def _gemma(kind: str, raw: Mapping[str, Any], found: GGUF, size: int) -> dict[str, Any]:
    """The fields of a Gemma; what its file has not is what llama.cpp takes."""
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    key = f"{kind}.attention.sliding_window_pattern"
    pattern = found.fields.get(key, PERIODS[kind])
    if isinstance(pattern, np.ndarray | list):
        local = list(map(bool, pattern))
    elif type(pattern) is int:
        local = [pattern == 0 or (i + 1) % pattern > 0 for i in range(layers)]
    else:
        raise ValueError(
            f"{key}={pattern!r} should be an integer, or a truth value for each layer."
        )
    window = raw.get("sliding_window", gemma.WINDOW if kind == "gemma2" else None) or None
    return {
        "model_type": "gemma2" if kind == "gemma2" else "gemma3_text",
        "pad_token_id": gemma.PAD if raw["pad_token_id"] is None else raw["pad_token_id"],
        "rope_theta": raw.get("rope_theta", THETA),
        "sliding_window": window,
        "layer_types": [gemma.WINDOWED if window and one else gemma.FULL for one in local],
        "query_pre_attn_scalar": raw["hidden_size"] // heads if layers == LARGE[kind] else size,
    }


def _llama3(stored: Tensor, theta: float, size: int) -> dict[str, Any] | None:
    """Find Llama 3's scaling from the factors of all frequencies; None if they are 1."""
    if stored.shape != (size // 2,):
        raise ValueError(f"{ROPE_FREQS} has shape {stored.shape} for heads of {size}.")
    factors = np.empty(stored.shape, np.float32)
    read_into(stored, factors)
    factor = float(factors.max())
    if (factors == 1).all():
        return None
    fits = type(theta) is float and 0 < theta <= LARGEST and 1 < factor <= LARGEST
    if fits:
        expected = frequencies(dataclasses.replace(LLAMA3, theta=theta, factor=factor), size)
        found = factors * expected / frequencies(Rope(theta=theta), size)
        fits = np.allclose(found, 1, rtol=1e-4, atol=0)
    if not fits:
        raise ValueError(f"{ROPE_FREQS} is not as Llama 3 has it, and not supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3.slow,
        "high_freq_factor": LLAMA3.fast,
        "original_max_position_embeddings": LLAMA3.original_length,
    }


def _plain(value: Any) -> Any:
    """A value that an error can show: of an array, the first numbers."""
    return value[:9].tolist() if isinstance(value, np.ndarray) else value


def _named(found: GGUF, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give the tensors Hugging Face's names, and its order of rows and axes."""
    kind: str = found.fields["general.architecture"]
    layout, named = LAYOUTS[kind], {}
    up = "_1" if raw.get("feed_forward_proj") == GATED else ""
    for name, tensor in found.tensors.items():
        match = NAME.fullmatch(name)
        if name == ROPE_FREQS and layout is LLAMA:
            continue
        if match is None or match[3] not in layout.names:
            named[name] = tensor  # surplus
            continue
        stack, layer, part, suffix = match.groups()
        if kind == "llama" and part in INTERLEAVED and isinstance(tensor, GGUFTensor):
            size = raw["head_dim"]
            if size % 2 or tensor.shape[0] != size * raw[INTERLEAVED[part]]:
                raise ValueError(f"{name!r} has the impossible shape {tensor.shape}. {AGAIN}")
            tensor = dataclasses.replace(tensor, head=size)
        if layout is GEMMA and part.endswith("norm") and isinstance(tensor, GGUFTensor):
            tensor = dataclasses.replace(tensor, added=1.0)
        own = layout.names[part].format(last=2 if stack == "dec" else 1, up=up)
        place = f"{stack}oder." if stack else ""
        place += f"{layout.layers}{layer}." if layer else ""
        turned = (place + own + suffix).endswith(layout.turned) if layout.turned else False
        named[place + own + suffix] = Turned.of(tensor) if turned else tensor
    return named
