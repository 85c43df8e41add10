"""How fast the loops are, beside what the machine allows and beside transformers.

    python -m experiments.benchmark --config=configs/benchmark_cpu.py --workdir=runs/benchmark

A case is one setting: shapes, batch, buffer, source, γ, α. One factor varies at a time around a
base case (`cases.py`). Each case is timed in turns with its peers and with the memory's bandwidth,
and gives a row of results.jsonl; report.md has the tables.
A part of the suite is chosen after a colon, as in `configs/benchmark_cpu.py:batch`.
Rows that are there are kept: a run that was cut off, or had its `--config.minutes`, goes on where
it was.

Weights are random and made on the spot, so α is an input (`forced.py`).
"""
