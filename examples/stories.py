"""Converts a model of llama2.c into a directory that specjax and transformers load.

    python examples/stories.py stories260K.bin tok512.bin stories260K

The files of https://huggingface.co/karpathy/tinyllamas (MIT) are trained Llamas; stories260K has
260,000 parameters. Model: seven int32 (width, feed-forward width, layers, heads, key-value heads,
ids, positions), then float32 matrices, each for all layers. Tokenizer: int32 longest piece, then
for each id a float32 score, an int32 length and the piece's bytes.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"  # ids 0 to 2; a story ends where the next begins
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # ids 3 to 258


def read_model(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Read config.json's fields, and the tensors under Hugging Face's names."""
    data = path.read_bytes()
    width, inner, layers, heads, kv_heads, ids, positions = struct.unpack_from("<7i", data)
    if ids < 0:
        raise ValueError(f"{path} has a head of its own, and this reads models with a tied one.")
    keys, at = width // heads * kv_heads, 28
    layouts = {
        "embed_tokens": (ids, width),
        "input_layernorm": (layers, width),
        "self_attn.q_proj": (layers, width, width),
        "self_attn.k_proj": (layers, keys, width),
        "self_attn.v_proj": (layers, keys, width),
        "self_attn.o_proj": (layers, width, width),
        "post_attention_layernorm": (layers, width),
        "mlp.gate_proj": (layers, inner, width),
        "mlp.down_proj": (layers, width, inner),
        "mlp.up_proj": (layers, inner, width),
        "norm": (width,),
    }
    tensors = {}
    for name, shape in layouts.items():
        array = np.frombuffer(data, "<f4", int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        if name in ("self_attn.q_proj", "self_attn.k_proj"):
            # Rotated pairs are neighbours here, and in Hugging Face's layout a head's two halves.
            pairs = array.reshape(layers, -1, width // heads // 2, 2, width)
            array = pairs.swapaxes(2, 3).reshape(shape)
        if name in ("embed_tokens", "norm"):
            tensors[f"model.{name}.weight"] = array
        else:
            for layer in range(layers):
                tensors[f"model.layers.{layer}.{name}.weight"] = array[layer]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": ids,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
    }
    return config, {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def read_tokenizer(path: Path, count: int) -> PreTrainedTokenizerFast:
    """Read the tokenizer: pairs of pieces merge by the score of what they make, the best first."""
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    for _ in range(count):
        score, length = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + length].decode().replace(" ", "▁"))
        scores.append(score)
        at += 8 + length
    pieces[: 3 + len(BYTES)] = [UNKNOWN, BEGIN, END, *BYTES]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces[3 + len(BYTES) :], key=lambda piece: -scores[ids[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    made = Tokenizer(models.BPE(ids, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END
    )


def convert(model: Path, tokenizer: Path, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    config, tensors = read_model(model)
    directory.mkdir(parents=True, exist_ok=True)
    read_tokenizer(tokenizer, config["vocab_size"]).save_pretrained(str(directory))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/stories.py MODEL.bin TOKENIZER.bin DIRECTORY")
    convert(*map(Path, sys.argv[1:]))
