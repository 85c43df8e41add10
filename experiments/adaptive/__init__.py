"""A leaderboard of draft-length policies: each against every static γ, in the real loop.

    python -m experiments.adaptive --config=configs/adaptive.py:prose --workdir=runs/prose

For each draft and temperature costs are measured first, in seconds: of plain decoding, calls,
draft steps and rounds. Where they fit badly nothing is raced. Policies that weigh time get them.
Then all methods decode the same inputs at batch 1, taking turns. A static γ has a loop of its
own, whose verify pass has γ+1 positions; policies share γ_max and the verify widths of the config.
At temperatures above 0 the loops are given the draws of a replay, so that all methods decode the
same outputs there too. Every other repeat chooses the best static γ, which the rest compare. Beside
what was measured stands a replay of the same methods on rollouts along the target's outputs, with
the oracle, which no policy can exceed there, and the share of the time between the best static γ
and the oracle that each policy saves. Costs are measured again behind the race: replay is by the
mean of both.

Writes results.jsonl (a row for each method, draft and temperature), report.md and figures to the
workdir. A run that was cut off goes on with the first draft and temperature that is not complete.
"""
