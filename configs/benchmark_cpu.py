"""The loops on a CPU, beside the memory's bandwidth and beside transformers.

    python -m experiments.benchmark --config=configs/benchmark_cpu.py --workdir=runs/benchmark
    python -m experiments.benchmark --config=configs/benchmark_cpu.py:batch --workdir=runs/benchmark

Base case: T5-base v1.1 with T5-small as draft, γ=3, α=.8, batch 1, float32. Needs 12 GB of memory,
and as much again where torch is installed for the peers. Parts: base, gamma, batch, buffer, source,
shape, frequent, agree, silent; all of them by default, 25 cases. 20 of them took half an hour on 2
idle cores with one key each; 20 keys take longer.
"""

import ml_collections

from experiments.benchmark.cases import PARTS

CHOICES = ("all", *PARTS)


def get_config(part: str = "all") -> ml_collections.ConfigDict:
    """`part` is one of `CHOICES`."""
    if part not in CHOICES:
        raise ValueError(f"a part {part!r} is not known: choose one of {', '.join(CHOICES)}.")
    config = ml_collections.ConfigDict()
    config.part = part
    config.minutes = 0.0  # after which no further case is begun; 0: no limit
    config.repeats = 5  # of each timing, methods and peers taking turns
    config.keys_per_repeat = (
        4  # of every repeat, each its own: 20 in all, over which τ and speedups are averaged
    )
    config.steps = 16  # of a phase in one timing
    config.peers = True  # where torch is installed
    config.bandwidth_mb = 512  # of the buffer by which the memory's bandwidth is measured
    config.base = {
        "target": "t5-base",
        "draft": "t5-small",
        "gamma": 3,
        "alpha": 0.8,
        "batch": 1,
        "buffer": 128,
        "source": 64,
        "tokens": 48,
        "dtype": "float32",
        "temperature": 0.0,
    }
    # One factor at a time.
    config.gammas = (3, 5, 7)
    config.batches = (1, 2, 4, 8, 16)
    config.buffers = (128, 512, 2048)
    config.buffer_batches = (1, 8)
    config.sources = (32, 128, 512, 1024)
    config.shapes = (
        ("embedded", "embedded-draft"),
        ("t5-small", ""),
        ("t5-large", "t5-small"),
    )
    config.shares = (0.25,)  # of the ids that the draft's head reads
    config.agreeing = (("t5-large", "t5-small"),)
    config.silent = (("t5-base", "t5-small"), ("embedded", "embedded-draft"))
    config.paper_target = "t5-xxl"  # of Tables 2 and 4, with these drafts
    config.paper_drafts = ()
    return config
