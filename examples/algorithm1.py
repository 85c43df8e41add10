"""Algorithm 1 of "Fast Inference from Transformers via Speculative Decoding", line by line.

    python examples/algorithm1.py

A model is a function from a list of tokens to the distribution of the next token, (V,) float64.
There is no cache and no batch; `specjax/speculative.py` adds both. The output's distribution is the
target's (Appendix A.1): `tests/core/test_algorithm1.py` enumerates it, here and in the jitted loop.
"""

from collections import Counter
from itertools import product

import numpy as np


def speculative_decoding_step(target, draft, prefix, gamma, rng):
    """The prefix with one to γ + 1 new tokens, for one parallel run of the target."""
    # Sample γ guesses x₁ … x_γ from M_q autoregressively.
    guesses, draft_probs = [], []
    for _ in range(gamma):
        q = draft(prefix + guesses)  #                  q_i(x) ← M_q(prefix + [x₁, …, x_{i−1}])
        draft_probs.append(q)
        guesses.append(rng.choice(len(q), p=q))  #      x_i ∼ q_i(x)

    # Run M_p in parallel: a transformer reads all guesses in one call.
    target_probs = [target(prefix + guesses[:i]) for i in range(gamma + 1)]

    # Determine the number of accepted guesses n.
    r = rng.random(gamma)  #                            r_i ∼ U(0, 1)
    rejected = [i for i, x in enumerate(guesses) if r[i] > target_probs[i][x] / draft_probs[i][x]]
    n = min([*rejected, gamma])  #                      n ← min({i − 1 | r_i > p_i/q_i} ∪ {γ})

    # Adjust the distribution from M_p if needed.
    p = target_probs[n]  #                              p'(x) ← p_{n+1}(x)
    if n < gamma:
        p = np.maximum(p - draft_probs[n], 0.0)  #      p'(x) ← norm(max(0, p_{n+1} − q_{n+1}))
        p = p / p.sum()

    # Return one token from M_p, and n tokens from M_q.
    t = rng.choice(len(p), p=p)  #                      t ∼ p'(x)
    return [*prefix, *guesses[:n], t]


def generate(target, draft, prompt, new_tokens, gamma, rng):
    """Exactly `new_tokens` tokens, and how many runs of the target they took."""
    tokens, runs = list(prompt), 0
    while left := len(prompt) + new_tokens - len(tokens):
        gamma = min(gamma, left - 1)  # the target adds one token of its own
        tokens, runs = speculative_decoding_step(target, draft, tokens, gamma, rng), runs + 1
    return tokens[len(prompt) :], runs


def main(samples=20_000, new_tokens=4, gamma=3):
    """Draw outputs of two toy models and compare their frequencies with the target's own."""
    by_last_token = np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.5, 0.4, 0.1]])

    def target(tokens):
        return by_last_token[tokens[-1]]

    def draft(tokens):  # nearly the target
        return 0.8 * target(tokens) + 0.2 / 3

    rng = np.random.default_rng(0)
    drawn = [generate(target, draft, [0], new_tokens, gamma, rng) for _ in range(samples)]
    counts = Counter(tuple(map(int, output)) for output, _ in drawn)
    exact = {
        output: np.prod([target([last])[x] for last, x in zip((0, *output), output, strict=False)])
        for output in product(range(3), repeat=new_tokens)
    }
    distance = sum(abs(counts[output] / samples - exact[output]) for output in exact) / 2
    runs = sum(runs for _, runs in drawn)
    print(f"{new_tokens * samples / runs:.2f} tokens for each run of the target")
    print(f"total variation from the target's distribution: {distance:.3f}")


if __name__ == "__main__":
    main()
