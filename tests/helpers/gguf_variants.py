"""Writes tiny checkpoints as GGUF files, as llama.cpp's converter does.

Names come from the package's own map; permutation, transposition and factors of frequencies follow
`convert_hf_to_gguf.py` of llama.cpp.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import gemma_variants
import gpt_variants
import llama_variants
import t5_variants

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "rope_theta": 100.0}
LLAMA3_SIZES = {**WIDE, "rope_scaling": LLAMA3, "head_dim": 16, "rope_theta": 5e5}
# As transformers has them where it reads no more of the file: queries by their head's size, one
# window of two or of six, and, of a Gemma 2, the published caps.
GEMMA2 = {"hidden_size": 64, "head_dim": 6, "query_pre_attn_scalar": 6, "num_hidden_layers": 3}
GEMMA3 = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 8,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0,
}
DISTANCE = {"relative_attention_max_distance": 128}  # of all T5s; the format has no field for it


def changed(variant: Any, **config: Any) -> Any:
    """A variant with other fields of config.json."""
    return dataclasses.replace(variant, config={**variant.config, **config})


# Widths are whole blocks of 32 numbers where a variant is quantised.
MODELS = {
    "llama": (
        llama_variants,
        changed(llama_variants.VARIANTS["llama3"], **LLAMA3_SIZES),
    ),
    "llama, biased": (llama_variants, llama_variants.VARIANTS["llama_biased"]),
    "mistral": (llama_variants, llama_variants.VARIANTS["mistral"]),
    "qwen2": (
        llama_variants,
        changed(llama_variants.VARIANTS["qwen2"], **WIDE, bos_token_id=3),
    ),
    "qwen3": (
        llama_variants,
        changed(llama_variants.VARIANTS["qwen3"], **WIDE, rope_parameters=None, rope_scaling=YARN),
    ),
    "gemma2": (
        gemma_variants,
        changed(gemma_variants.VARIANTS["gemma2"], **GEMMA2),
    ),
    "gemma3": (gemma_variants, changed(gemma_variants.VARIANTS["gemma3"], **GEMMA3)),
    "gemma3, untied": (gemma_variants, gemma_variants.VARIANTS["gemma3_untied"]),
    "gpt2": (gpt_variants, changed(gpt_variants.VARIANTS["tied"], n_embd=32)),
    "gpt2, untied": (gpt_variants, gpt_variants.VARIANTS["untied"]),
    "t5 v1.0": (t5_variants, changed(t5_variants.VARIANTS["v1_0"], **DISTANCE)),
    "t5 v1.1": (
        t5_variants,
        changed(t5_variants.VARIANTS["v1_1"], **DISTANCE, d_model=32, d_ff=64, d_kv=16),
    ),
    "t5, deep": (t5_variants, changed(t5_variants.VARIANTS["deep_decoder"], **DISTANCE)),
    "umt5": (t5_variants, changed(t5_variants.OTHERS["umt5"], **DISTANCE)),
}


def write(
    path: Path,
    variant: Any,
    arrays: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model under llama.cpp's names.

    Args:
      variant: of one of the modules of variants; its `raw` gives the metadata.
      arrays: under Hugging Face's names.
      kind: the type of matrices whose rows are whole blocks; all else is F32.
      vocabulary: metadata of the tokenizer, by the names after "tokenizer.ggml.".
    """
    raw = variant.raw
    named = {"mistral": "llama", "mt5": "t5", "umt5": "t5", "gemma3_text": "gemma3"}
    architecture = named.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, architecture, raw)
    add_vocabulary(writer, vocabulary or {})
    for name, array in as_in_gguf(architecture, raw, arrays).items():
        add(writer, name, array, kind)
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    """Add a tensor in a type that fits it."""
    chosen = gguf.GGMLQuantizationType[kind]
    if array.ndim < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
        chosen = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), chosen), raw_dtype=chosen)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what a writer has, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, architecture: str, raw: Mapping[str, Any]) -> None:
    """The sizes, as each architecture's class of the converter writes them."""
    if architecture == "gpt2":
        writer.add_context_length(raw["n_positions"])
        writer.add_embedding_length(raw["n_embd"])
        writer.add_block_count(raw["n_layer"])
        writer.add_feed_forward_length(raw.get("n_inner") or 4 * raw["n_embd"])
        writer.add_head_count(raw["n_head"])
        writer.add_layer_norm_eps(raw.get("layer_norm_epsilon", 1e-5))
    elif architecture == "t5":
        writer.add_context_length(512)
        writer.add_embedding_length(raw["d_model"])
        writer.add_feed_forward_length(raw["d_ff"])
        writer.add_block_count(raw["num_layers"])
        if raw["num_decoder_layers"] != raw["num_layers"]:
            writer.add_decoder_block_count(raw["num_decoder_layers"])
        writer.add_head_count(raw["num_heads"])
        writer.add_key_length(raw["d_kv"])
        writer.add_value_length(raw["d_kv"])
        writer.add_layer_norm_eps(1e-6)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_relative_attn_buckets_count(raw["relative_attention_num_buckets"])
        writer.add_decoder_start_token_id(raw["decoder_start_token_id"])
    else:
        heads = raw["num_attention_heads"]
        size = raw.get("head_dim") or raw["hidden_size"] // heads
        writer.add_context_length(raw["max_position_embeddings"])
        writer.add_embedding_length(raw["hidden_size"])
        writer.add_block_count(raw["num_hidden_layers"])
        writer.add_feed_forward_length(raw["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(raw["num_key_value_heads"] or heads)
        writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps", 1e-6))
        whole = (raw.get("rope_parameters") or {}).get(gemma_variants.WHOLE, raw)
        writer.add_rope_freq_base(whole.get("rope_theta", 10_000.0))
        writer.add_rope_dimension_count(size)
        if raw.get("head_dim"):
            writer.add_key_length(size)
            writer.add_value_length(size)
        if raw.get("sliding_window"):
            writer.add_sliding_window(raw["sliding_window"])
        if architecture.startswith("gemma"):
            write_gemma(writer, raw)
        scaling = raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    for name, add_id in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if raw.get(name) is not None:
            add_id(raw[name])


def write_gemma(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """The caps, and what differs from llama.cpp's defaults."""
    if raw.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if "layer_types" in raw:
        local = [kind == gemma_variants.LOCAL for kind in raw["layer_types"]]
        writer.add_sliding_window_pattern(local)
    if "rope_parameters" in raw:
        base = raw["rope_parameters"][gemma_variants.LOCAL]["rope_theta"]
        writer.add_rope_freq_base_swa(base)


def as_in_gguf(
    architecture: str, raw: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Names and order of numbers in the file."""
    layers = max(raw.get(x, 0) for x in ("num_hidden_layers", "n_layer", "num_decoder_layers"))
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, found = gguf.get_tensor_name_map(kind, max(layers, raw.get("num_layers", 0))), {}
    for name, array in arrays.items():
        if architecture == "gpt2" and ".c_" in name and name.endswith(".weight"):
            array = array.T
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "llama" and ".q_proj." in name:
            array = permute(array, raw["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            array = permute(array, raw["num_key_value_heads"] or raw["num_attention_heads"])
        found[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = array
    if architecture == "gpt2":
        found.setdefault("output.weight", found["token_embd.weight"])
    if (raw.get("rope_scaling") or {}).get("rope_type") == "llama3":
        found["rope_freqs.weight"] = rope_factors(raw)
    return found


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute`: the halves of each head, interleaved."""
    halves = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(halves).swapaxes(1, 2).reshape(weights.shape)


def rope_factors(raw: Mapping[str, Any]) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors`: Llama 3's factor of each frequency."""
    scaling, size = raw["rope_scaling"], raw["head_dim"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factors = scaling["original_max_position_embeddings"], []
    for pair in range(0, size, 2):
        turns = length * raw["rope_theta"] ** (-pair / size) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


# --- tokenizers ----------------------------------------------------------------------------------

TYPES = {"normal": 1, "unknown": 2, "control": 3, "user defined": 4, "unused": 5, "byte": 6}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def bpe() -> dict[str, Any]:
    """A vocabulary of bytes, as GPT-2, Llama 3 and Qwen have it: 300 tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = list(bytes_to_unicode().values())
    merges = ["Ġ t", "h e", "Ġt he", "r e", "1 2", "a b", "Ġ Ġ", "Ċ Ċ", "i n", "Ġ a", "Ġa n"]
    tokens += [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [TYPES["normal"]] * len(tokens) + [TYPES["control"]] * 3 + [TYPES["user defined"]]
    tokens += special
    tokens += [f"[PAD{i}]" for i in range(len(tokens), 300)]
    types += [TYPES["unused"]] * (300 - len(types))
    ends = {name: tokens.index(token) for name, token in zip(("bos", "eot"), special, strict=False)}
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": ends["bos"],
        "eos_token_id": tokens.index("<|im_end|>"),
        "eot_token_id": tokens.index("<|endoftext|>"),
        "padding_token_id": tokens.index("<|endoftext|>"),
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }


def sentencepiece() -> dict[str, Any]:
    """A vocabulary as Llama 2 has it: scores instead of merges, and bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [TYPES["unknown"], TYPES["control"], TYPES["control"], *[TYPES["byte"]] * 256]
    pieces = [*"▁abcdefghijklmnopqrstuvwxyz0123456789", "th", "▁th", "▁the", "in", "▁a", "re"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    return {
        "model": "llama",
        "tokens": tokens + pieces,
        "scores": scores,
        "token_type": types + [TYPES["normal"]] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }


def gemma() -> dict[str, Any]:
    """A vocabulary as Gemma has it: other special tokens before bytes and scores."""
    found, special = sentencepiece(), ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    types = [TYPES["unknown"] if token == "<unk>" else TYPES["control"] for token in special]
    return {
        **found,
        "tokens": special + found["tokens"][3:],
        "scores": [0.0] * len(special) + found["scores"][3:],
        "token_type": types + found["token_type"][3:],
        "add_space_prefix": False,
        **{
            f"{role}_token_id": special.index(f"<{token}>")
            for token, role in {
                "eos": "eos",
                "bos": "bos",
                "pad": "padding",
                "unk": "unknown",
            }.items()
        },
    }


def unigram() -> dict[str, Any]:
    """A vocabulary as T5 has it, with 100 rows for `<extra_id_…>`."""
    pieces = ["▁", "▁the", "▁a", "in", *"abcdefghijklmnopqrstuvwxyz0123456789.", "re", "th"]
    tokens = ["<pad>", "</s>", "<unk>", *pieces]
    types = [TYPES["control"], TYPES["control"], TYPES["unknown"], *[TYPES["normal"]] * len(pieces)]
    count = len(tokens)
    return {
        "model": "t5",
        "tokens": tokens + [f"[PAD{i}]" for i in range(count, count + 100)],
        "scores": [0.0] * 3 + [-2.0 - i / 8 for i in range(len(pieces))] + [-10_000.0] * 100,
        "token_type": types + [TYPES["unused"]] * 100,
        "eos_token_id": 1,
        "unknown_token_id": 2,
        "padding_token_id": 0,
        "add_bos_token": False,
        "add_eos_token": True,
    }


VOCABULARIES = {
    "bpe": ("qwen2", bpe),
    "bpe of gpt2": ("gpt2", lambda: {**bpe(), "pre": "gpt-2"}),
    "sentencepiece": ("llama", sentencepiece),
    "sentencepiece of gemma2": ("gemma2", gemma),
    "unigram": ("t5 v1.1", unigram),
}
TEXTS = [
    "the thing in a there",
    "  two  spaces\tand a tab\n\n\nlines ",
    "1234567 3.14 12",
    "язык 语言 👩\u200d👧 é e\u0301 ﬁ",
    "def f(x):\n    return x[0]",
    "<|im_start|>the<|im_end|>",
    "a<think>b</s><s>",
    "",
]


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Mapping[str, Any]) -> None:
    """Write the metadata of a tokenizer."""
    for key, value in vocabulary.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if name in writer.kv_data[0]:
            del writer.kv_data[0][name]  # `write_metadata` took it from config.json
        if key == "token_type":
            writer.add_token_types(value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)


def with_vocabulary(path: Path, name: str) -> Path:
    """Write a tiny model with a tokenizer."""
    family, make = VOCABULARIES[name]
    module, variant = MODELS[family]
    vocabulary = make()
    variant = changed(variant, vocab_size=len(vocabulary["tokens"]))
    return write(path, variant, module.tensors(variant), vocabulary=vocabulary)


def write_model(path: Path, model: str = "llama", **options: Any) -> Path:
    """Write a file of one of the families."""
    module, variant = MODELS[model]
    return write(path, variant, module.tensors(variant), **options)


# --- headers, byte by byte ----------------------------------------------------------------------


def length(count: int) -> bytes:
    """A number of the header, in 8 bytes."""
    return count.to_bytes(8, "little")


def entry(kind: int, value: bytes, key: bytes = b"x") -> bytes:
    """A field of the metadata, byte by byte."""
    return length(len(key)) + key + kind.to_bytes(4, "little") + value


def header(*fields: bytes, tensors=(), version: int = 3, counts=None) -> bytes:
    """The header of a file, with the counts of its parts or others."""
    count = counts or (len(tensors), len(fields))
    start = b"GGUF" + version.to_bytes(4, "little") + length(count[0]) + length(count[1])
    return start + b"".join(fields) + b"".join(tensors)


def info(shape, kind: int = 0, offset: int = 0, name: bytes = b"t", axes=None) -> bytes:
    """What a header says of a tensor."""
    axes = len(shape) if axes is None else axes
    return (
        length(len(name)) + name + axes.to_bytes(4, "little")
        + b"".join(map(length, shape)) + kind.to_bytes(4, "little") + length(offset)
    )  # fmt: skip


def some_file(architecture: str | None, kind: str | None) -> bytes:
    """A file with one tensor."""
    named = {"architecture": architecture, "type": kind}
    fields = [
        entry(8, length(len(value)) + value.encode(), key=f"general.{key}".encode())
        for key, value in named.items()
        if value
    ]
    data = header(*fields, tensors=(info([8]),))
    return data + bytes(-len(data) % 32 + 32)
