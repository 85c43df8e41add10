"""A leaderboard of draft-length policies: each against every static γ, in the real loop.

    python -m experiments.adaptive --config=configs/adaptive.py --workdir=runs/adaptive

For each draft and temperature all methods decode the same inputs at batch 1, taking turns. A static
γ has a loop of its own, whose verify pass has γ+1 positions; policies share γ_max and the verify
widths of the config, and those that weigh time get prices that are measured first. Beside what was
measured stands a replay of the same methods on rollouts along the target's outputs, with the
oracle, which drafts exactly what will be accepted, and the share of the time between the best
static γ and the oracle that each policy saves.

Writes results.jsonl (a row for each method, draft and temperature), report.md and figures to the
workdir. A run that was cut off goes on with the first draft and temperature that is not complete.
"""
