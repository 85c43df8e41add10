"""Turns a GGUF file into what Hugging Face's directories hold: a config and names of tensors.

Read are the architectures llama (Mistral too), qwen2, qwen3, gemma2, gemma3, gpt2 and t5 (mT5 and
umT5 too), as llama.cpp's converter writes them. It interleaves the halves of each head in a Llama's
queries and keys, adds 1 to a Gemma's norms, transposes a GPT-2's projections, and stores Llama 3's
scaling of positions as factors of all frequencies.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints import gemma
from specjax.checkpoints.config_json import ID, check_fields, check_sizes
from specjax.checkpoints.families import FAMILIES
from specjax.checkpoints.formats import gguf_files
from specjax.checkpoints.formats.gguf_files import CONVERT, GGUF, GGUFTensor
from specjax.checkpoints.formats.gguf_tokenizers import ENDS, TOKENS, mark_ids
from specjax.checkpoints.tensors import Tensor, Turned, read_into
from specjax.models.llama import Rope, frequencies
from specjax.support.ranges import LARGEST

LLAMA = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv?",
    "head_dim": "attention.key_length?",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base?",
}
GEMMA2 = LLAMA | {
    "sliding_window": "attention.sliding_window?",
    "attn_logit_softcapping": "attn_logit_softcapping?",
    "final_logit_softcapping": "final_logit_softcapping?",
}
METADATA: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMA),
    "gemma2": GEMMA2,
    # ollama's converter has other names of the bases, and leaves out what all Gemma 3 share.
    "gemma3": GEMMA2
    | {
        "rms_norm_eps": "attention.layer_norm_rms_epsilon?",
        "rope_theta": "rope.freq_base|rope.global.freq_base?",
        "rope_local_base_freq": "rope.freq_base_swa|rope.local.freq_base?",
    },
    "gpt2": {
        "n_embd": "embedding_length",
        "n_inner": "feed_forward_length?",
        "n_layer": "block_count",
        "n_head": "attention.head_count",
        "n_positions": "context_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    },
    "t5": {
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
}
"""Fields of config.json by architecture, and their metadata: a "|" parts two writers' names of it,
and a "?" marks what may be absent."""
NAME = re.compile(r"(.+)(\.(?:weight|bias))")
EMBEDDING, HEAD, ROPE_FREQS = "token_embd.weight", "output.weight", "rope_freqs.weight"
GATED = "gated-gelu"
INTERLEAVED = {"blk.N.attn_q": "num_attention_heads", "blk.N.attn_k": "num_key_value_heads"}
YARN = {  # in `rope_scaling` and in the metadata
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # 0: none
# Metadata that is not followed: what has to be the size of a head, and other values that change
# nothing.
LENGTHS = [f"attention.{part}_length{of}" for part in ("key", "value") for of in ("", "_swa")]
TURNED = ("rope.dimension_count", "rope.dimension_count_swa")
NEUTRAL: dict[str, tuple] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    **dict.fromkeys(
        (
            *CAPS,
            "attention.scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "attention.temperature_scale",
            "attention.shared_kv_layers",
            "rope.scaling.yarn_log_multiplier",
        ),
        (0,),
    ),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.alpha"), (0, 1)),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.freq_base_per_layer": (),
}
OTHER = ("rope_theta", "sliding_window")  # fields that no size is, or may be 0
THETA = 10_000.0  # where the metadata has none
# ollama's converter leaves out how the Gemma 3 of this many positions scale them.
LONG, LONG_SCALING = 131072, {"rope_type": "linear", "factor": 8.0}
PERIODS = {"gemma2": 2, "gemma3": 6}  # of layers that see all tokens
LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which scales queries by its width
LLAMA3 = Rope("llama3", original_length=8192, slow=1.0, fast=4.0)  # of all sizes of Llama 3


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
    if not isinstance(kind, str) or kind not in METADATA:
        raise ValueError(
            f"general.architecture={kind!r} is not supported; supported are "
            f"{', '.join(map(repr, METADATA))}."
        )
    start = f"{kind}.decoder_start_token_id"
    check_fields({start: _plain(fields.get(start, 0))}, {start: ID})
    stored = _stored(kind, fields)
    raw: dict[str, Any] = {}
    for name, given in METADATA[kind].items():
        keys = _keys(given)
        value = next((stored[key] for key in keys if key in stored), None)
        if value is None and not given.endswith("?"):
            raise ValueError(f"its metadata has no {f'{kind}.{keys[0]}'!r}. {CONVERT}")
        if value is not None:
            raw[name] = None if name in CAPS and value == 0 else value
    check_sizes({key: value for key, value in raw.items() if key not in OTHER})
    rows = there[EMBEDDING].shape[0] if EMBEDDING in there else 0
    tokens = fields.get(TOKENS, ())
    if not isinstance(tokens, list | tuple) or len(tokens) not in ((rows,) if tokens else (0,)):
        raise ValueError(f"{TOKENS} are not as many as the rows of {EMBEDDING}, {rows}. {CONVERT}")
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
        raw |= _llama(kind, raw, stored, found)
    _check_followed(kind, stored, raw)
    return raw


def _keys(given: str) -> list[str]:
    """The metadata of a field of `METADATA`."""
    return given.removesuffix("?").split("|")


def _stored(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an architecture; what is equal in all layers is one value."""
    layers, found = _plain(fields.get(f"{kind}.block_count")), {}
    for key, value in fields.items():
        if not key.startswith(f"{kind}."):
            continue
        if isinstance(value, np.ndarray) and len(value) == layers and len(set(value.tolist())) == 1:
            found[key.removeprefix(f"{kind}.")] = value[0].item()
        else:
            found[key.removeprefix(f"{kind}.")] = _plain(value)
    return found


def _check_followed(kind: str, stored: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Raise ValueError that names metadata which changes the model and is not followed."""
    size = raw.get("head_dim") or raw.get("d_kv") or raw["n_embd"] // raw["n_head"]
    neutral = NEUTRAL | dict.fromkeys(LENGTHS, (size,))
    if "head_dim" in raw:  # the others do not turn positions
        neutral |= dict.fromkeys(TURNED, (size,))
        neutral["rope.freq_base_swa"] = (raw.get("rope_theta", THETA),)
        neutral["attention.scale"] = (0, raw.get("query_pre_attn_scalar", size) ** -0.5)
    for given in METADATA[kind].values():
        for key in _keys(given):
            neutral.pop(key, None)
    for key, values in neutral.items():
        value = stored.get(key)
        numbers = [one for one in values if type(one) in (int, float)]
        close = type(value) is float and any(math.isclose(value, v, rel_tol=1e-6) for v in numbers)
        if key in stored and value not in values and not close:
            only = f", only {' or '.join(map(str, values))}" if values else ""
            raise ValueError(f"{kind}.{key}={value!r} is not supported{only}.")


def _llama(
    kind: str, raw: Mapping[str, Any], stored: Mapping[str, Any], found: GGUF
) -> dict[str, Any]:
    """The fields that the Llama layout has beyond `LLAMA`."""
    heads = raw["num_attention_heads"]
    size = raw.get("head_dim") or raw["hidden_size"] // heads
    given: dict[str, Any] = {
        "num_key_value_heads": raw.get("num_key_value_heads", heads),
        "head_dim": size,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in found.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in found.tensors,
    }
    check_sizes(given)
    if kind == "llama" and stored.get("attention.sliding_window"):
        given |= {"model_type": "mistral", "sliding_window": stored["attention.sliding_window"]}
    scaling, theta = _scaling(kind, stored), raw.get("rope_theta", THETA)
    if ROPE_FREQS in found.tensors:
        llama3 = _llama3(found.tensors[ROPE_FREQS], theta, size)
        if llama3 and scaling:
            raise ValueError(
                f"{kind}.rope.scaling.factor={scaling['factor']} and {ROPE_FREQS}, which also "
                "scales positions, are not supported together."
            )
        scaling = llama3 or scaling
    given["rope_scaling"] = scaling
    return given | (_gemma(kind, raw, found, size) if kind in PERIODS else {})


def _scaling(kind: str, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read `rope_scaling`, with llama.cpp's defaults: linear, and a factor of 1."""
    form = stored.get("rope.scaling.type", "linear")
    factor = stored.get("rope.scaling.factor", stored.get("rope.scale_linear"))
    key = f"{kind}.rope.scaling.factor"
    check_fields({key: factor}, {key: "a finite number ≥ 0"})
    factor = factor or 1.0
    if form not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{kind}.rope.scaling.type={form!r} is not supported, only 'none', 'linear' and 'yarn'."
        )
    if form == "none" or (form == "linear" and factor == 1):
        return None
    yarn = {name: stored.get(f"rope.scaling.{key}") for name, key in YARN.items()}
    return {"rope_type": form, "factor": factor, **(yarn if form == "yarn" else {})}


def _gemma(kind: str, raw: Mapping[str, Any], found: GGUF, size: int) -> dict[str, Any]:
    """The fields of a Gemma. What its file lacks is llama.cpp's default, or ollama's."""
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    key = f"{kind}.attention.sliding_window_pattern"
    pattern = found.fields.get(key, PERIODS[kind])
    if isinstance(pattern, np.ndarray) and len(pattern) == layers and pattern.dtype.kind in "bui":
        local = list(map(bool, pattern))
    elif type(pattern) is int and pattern >= 0:
        local = [pattern == 0 or (i + 1) % pattern > 0 for i in range(layers)]
    else:
        raise ValueError(
            f"{key}={_plain(pattern)!r} should be an integer ≥ 0, or {layers} truth values."
        )
    window = raw.get("sliding_window", gemma.WINDOW if kind == "gemma2" else None) or None
    from_ollama = "rms_norm_eps" not in raw
    scaled = any(key.startswith(f"{kind}.rope.scal") for key in found.fields)
    long = from_ollama and not scaled and raw["max_position_embeddings"] >= LONG
    return {
        **({"rope_scaling": LONG_SCALING} if long else {}),
        "model_type": "gemma2" if kind == "gemma2" else "gemma3_text",
        "pad_token_id": gemma.PAD if raw["pad_token_id"] is None else raw["pad_token_id"],
        "rope_theta": raw.get("rope_theta", gemma.GLOBAL_THETA if kind == "gemma3" else THETA),
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
    family = FAMILIES[raw["model_type"]]
    names, named = family.gguf_names(), {}
    for name, tensor in found.tensors.items():
        match = NAME.fullmatch(name)
        if name == ROPE_FREQS and METADATA[kind] is LLAMA:
            continue
        layer = re.search(r"\bblk\.(\d+)\.", name)
        part = re.sub(r"\bblk\.\d+\.", "blk.N.", match[1]) if match else ""
        if match is None or part not in names:
            named[name] = tensor  # surplus
            continue
        if kind == "llama" and part in INTERLEAVED and isinstance(tensor, GGUFTensor):
            size = raw["head_dim"]
            if size % 2 or tensor.shape[0] != size * raw[INTERLEAVED[part]]:
                raise ValueError(f"{name!r} has the impossible shape {tensor.shape}. {CONVERT}")
            tensor = dataclasses.replace(tensor, head=size)
        if kind in PERIODS and part.endswith("norm") and isinstance(tensor, GGUFTensor):
            tensor = dataclasses.replace(tensor, added=1.0)
        own = names[part].replace("N.", f"{layer[1]}." if layer else "") + match[2]
        if raw.get("feed_forward_proj") == "relu":
            own = own.replace(".wi_1.", ".wi.")  # one name of GGUF for both
        named[own] = Turned.of(tensor) if own.endswith(family.turned) else tensor
    return named
