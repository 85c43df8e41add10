"""Writes tests/data/t5_reference.npz: what transformers' own T5 says, for tests without torch.

    pip install torch==2.13.0 && python tests/make_reference.py

Holds float32 logits for each of `t5_variants.VARIANTS`, and relative-position buckets.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

import t5_variants

FILE = Path(__file__).parent / "data" / "t5_reference.npz"
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


def torch_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> np.ndarray:
    """Buckets of all offsets from −2048 to 2048."""
    offsets = torch.arange(-2048, 2049)
    return T5Attention._relative_position_bucket(
        offsets, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    ).numpy()


def main() -> None:
    """Write the file."""
    values = {}
    for name, variant in t5_variants.VARIANTS.items():
        with tempfile.TemporaryDirectory() as place:
            directory = t5_variants.write(Path(place), variant)
            logits = torch_logits(directory, *t5_variants.inputs(variant))
        values[name] = logits[:, :: variant.every]
    for case in BUCKETS:
        values["buckets_{:d}_{}_{}".format(*case)] = torch_buckets(*case).astype(np.uint8)
    np.savez_compressed(FILE, **values)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
