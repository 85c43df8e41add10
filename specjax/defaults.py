"""The defaults that functions and commands share, each written once."""

GAMMA = 4  # drafted tokens per target call
LONGEST = 8  # the largest γ that `tune` tries
NEW_TOKENS = 128  # the longest output, in tokens
BATCH_SIZE = 8  # rows decoded at once

# Sampling: greedy; at temperatures above 0 no token is filtered out.
TEMPERATURE = 0.0
TOP_K = 0
TOP_P = 1.0

# `select`: the γ that it tries, the inputs that it times, and how often.
GAMMAS = (1, 2, 3, 5, 7, 10)
TIMED_INPUTS = 16
REPEATS = 5

MINUTES = 2.5  # of measurements by `select` and `tune`
