"""The suite of configs/benchmark_gpu.py on one TPU, which is what the paper used (a TPU-v4).

    python -m experiments.benchmark --config=configs/benchmark_tpu.py:paper-small --workdir=runs/tpu

NOT RUN: there was no TPU to run it on. No peer runs there, so bars against transformers stay "not
measured". T5-XXL in bfloat16 takes 24 GB, which one TPU-v4 chip holds.
"""

import ml_collections

from configs import benchmark_gpu

CHOICES = benchmark_gpu.CHOICES


def get_config(part: str = "all") -> ml_collections.ConfigDict:
    """`part` as in configs/benchmark_gpu.py."""
    config = benchmark_gpu.get_config(part)
    config.peers = False
    return config
