"""Writes tests/data/*_reference.npz: what transformers' own models say, for tests without torch.

    pip install torch==2.13.0 && python tests/helpers/make_reference.py

Holds float32 logits for each of `t5_variants.VARIANTS`, `gpt_variants.VARIANTS` and
`llama_variants.VARIANTS`, and T5's relative-position buckets.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention

import gpt_variants
import llama_variants
import t5_variants

DATA = Path(__file__).parents[1] / "data"
BUCKETS = ((True, 32, 128), (False, 32, 128), (True, 8, 20), (False, 8, 20), (False, 32, 200))


def torch_logits(directory: Path, source, lengths, tokens) -> np.ndarray:
    """(B, T, V) float32, computed without a cache in float32."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    mask = np.arange(source.shape[1])[None, :] < lengths[:, None]
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(tokens, dtype=torch.long),
            use_cache=False,
        ).logits.numpy()


def torch_causal_logits(directory: Path, tokens) -> np.ndarray:
    """(B, T, V) float32 of whole texts of a decoder-only model, without a cache in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
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
    for family, variants in (("gpt", gpt_variants), ("llama", llama_variants)):
        values = {}
        for name, variant in variants.VARIANTS.items():
            with tempfile.TemporaryDirectory() as place:
                directory = variants.write(Path(place), variant)
                values[name] = torch_causal_logits(directory, variants.texts())
        _store(DATA / f"{family}_reference.npz", values)


def _store(file: Path, values: dict[str, np.ndarray]) -> None:
    np.savez_compressed(file, **values)
    print(f"{file}: {file.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
