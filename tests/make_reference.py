"""Writes tests/data/*_reference.npz: what transformers' own models say, for tests without torch.

    pip install torch==2.13.0 && python tests/make_reference.py

Holds float32 logits for each of `t5_variants.VARIANTS` and `gpt_variants.VARIANTS`, and T5's
relative-position buckets.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

import gpt_variants
import t5_variants

DATA = Path(__file__).parent / "data"
BUCKETS = ((True, 32, 128), (False, 32, 128), (True, 8, 20), (False, 8, 20), (False, 32, 200))


def torch_logits(directory: Path, source, lengths, tokens) -> np.ndarray:
    """(B, T, V) float32, computed without a cache in float32."""
    model = T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    mask = np.arange(source.shape[1])[None, :] < lengths[:, None]
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(tokens, dtype=torch.long),
            use_cache=False,
        ).logits.numpy()


def torch_gpt_logits(directory: Path, tokens) -> np.ndarray:
    """(B, T, V) float32 of whole texts, computed without a cache in float32."""
    model = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor(tokens, dtype=torch.long)
        return model(input_ids=ids, use_cache=False).logits.numpy()


def torch_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> np.ndarray:
    """Buckets of all offsets from −2048 to 2048."""
    offsets = torch.arange(-2048, 2049)
    return T5Attention._relative_position_bucket(
        offsets, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    ).numpy()


def main() -> None:
    """Write the files."""
    values = {}
    for name, variant in t5_variants.VARIANTS.items():
        with tempfile.TemporaryDirectory() as place:
            directory = t5_variants.write(Path(place), variant)
            logits = torch_logits(directory, *t5_variants.inputs(variant))
        values[name] = logits[:, :: variant.every]
    for case in BUCKETS:
        values["buckets_{:d}_{}_{}".format(*case)] = torch_buckets(*case).astype(np.uint8)
    _store(DATA / "t5_reference.npz", values)
    values = {}
    for name, gpt_variant in gpt_variants.VARIANTS.items():
        with tempfile.TemporaryDirectory() as place:
            directory = gpt_variants.write(Path(place), gpt_variant)
            values[name] = torch_gpt_logits(directory, gpt_variants.texts())
    _store(DATA / "gpt_reference.npz", values)


def _store(file: Path, values: dict[str, np.ndarray]) -> None:
    np.savez_compressed(file, **values)
    print(f"{file}: {file.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
