"""The loops on one GPU at the paper's shapes, T5-XXL v1.1 in bfloat16, and Tables 2 and 4.

    python -m experiments.benchmark --config=configs/benchmark_gpu.py:paper-small --workdir=runs/gpu

Three of its cases have run, on an H200 (experiments/benchmark/README.md). A command begins no case
that would pass 8 minutes; the same command again goes on, and all parts may share a workdir. Parts:
those of configs/benchmark_cpu.py, and paper-small, paper-base and paper-large, the rows of the
paper's tables by draft. Needs 40 GB of the GPU's memory, twice that where torch is installed for
the peers, and then 30 GB of disk. On a TPU, which the paper used (a TPU-v4), it runs without peers.
"""

import ml_collections

from configs import benchmark_cpu

DRAFTS = ("t5-small", "t5-base", "t5-large")
CHOICES = (*benchmark_cpu.CHOICES, *(f"paper-{draft.removeprefix('t5-')}" for draft in DRAFTS))


def get_config(part: str = "all") -> ml_collections.ConfigDict:
    """`part` is one of `CHOICES`."""
    if part not in CHOICES:
        raise ValueError(f"a part {part!r} is not known: choose one of {', '.join(CHOICES)}.")
    name, _, draft = part.partition("-")
    config = benchmark_cpu.get_config(name)
    config.minutes = 8.0
    config.repeats = 9
    config.steps = 20
    config.bandwidth_mb = 2048
    config.base.update(
        target="t5-xxl", gamma=7, alpha=0.75, source=128, tokens=64, dtype="bfloat16"
    )
    config.gammas = (3, 5, 7)
    config.shapes = (
        ("t5-small", ""),
        ("t5-base", "t5-small"),
        ("t5-large", "t5-small"),
        ("t5-xl", "t5-small"),
    )
    config.agreeing = (("t5-xxl", "t5-small"),)
    config.silent = (("t5-xxl", "t5-small"),)
    config.paper_drafts = (f"t5-{draft}",) if draft else DRAFTS
    return config
