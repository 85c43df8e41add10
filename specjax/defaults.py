"""The defaults that functions and commands share, each written once."""

GAMMA = 4  # drafted tokens per target call
LONGEST = 8  # γ that `tune` tries
NEW_TOKENS = 128  # of an output, at most
BATCH_SIZE = 8  # rows decoded at once

# Sampling: greedy, and where it is not, no token left out.
TEMPERATURE = 0.0
TOP_K = 0
TOP_P = 1.0

# `select`: what it tries, and how often it times that.
GAMMAS = (1, 2, 3, 5, 7, 10)
TIMED_INPUTS = 16
REPEATS = 5
