"""Samplers in the form that an audit takes: exact ones, and errors that others have made.

`seen` says where a kind of error was seen or discussed in public.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A shipped sampler.

    Attributes:
      function: in the signature of its kind.
      kind: one of `KINDS`.
      exact: whether its output has the target's distribution.
      seen: where the error, or the algorithm, was published.
    """

    function: Callable[..., Any]
    kind: str
    exact: bool
    seen: str


CASES: dict[str, Case] = {}


def case(kind: str, exact: bool, seen: str) -> Callable[[Callable], Callable]:
    """Register a function as a case."""

    def register(function: Callable) -> Callable:
        CASES[function.__name__] = Case(function, kind, exact, seen)
        return function

    return register


# --- Exact ones -----------------------------------------------------------------------------------


@case("verify", True, "arXiv 2211.17192, Algorithm 1")
def algorithm1(drafts, draft_probs, target_probs, rng):
    """Keep x with probability min(1, p/q); draw from norm(max(0, p − q)) after a rejection."""
    for i, x in enumerate(drafts):
        p, q = target_probs[i], draft_probs[i]
        if not rng.random() * q[x] < p[x]:
            left = np.maximum(p - q, 0)
            return [*drafts[:i], rng.choice(len(p), p=left / left.sum())]
    return [*drafts, rng.choice(len(q), p=target_probs[-1])]


@case("verify", True, "arXiv 2403.10444")
def block_verification(drafts, draft_probs, target_probs, rng):
    """Keep the longest prefix that the draft as a whole allows."""
    kept, chance, left = 0, 1.0, target_probs[0]
    draft_probs = [*draft_probs, np.zeros_like(left)]  # q = 0 behind the draft
    for i in range(len(drafts) + 1):
        rest = np.maximum(chance * target_probs[i] - draft_probs[i], 0)
        mass = rest.sum()
        if i == 0 or rng.random() <= (mass / (mass + 1 - chance) if mass + 1 > chance else 1.0):
            kept, left = i, (rest if mass > 0 else target_probs[i])
        if i < len(drafts):
            x = drafts[i]
            chance = min(1.0, chance * target_probs[i][x] / draft_probs[i][x])
    return [*drafts[:kept], rng.choice(len(left), p=left / left.sum())]


@case("verify", True, "llama.cpp, and many greedy verifiers")
def sample_and_match(drafts, draft_probs, target_probs, rng):
    """Draw each token from the target; go on while it is the drafted one."""
    tokens = []
    for i, p in enumerate(target_probs):
        tokens.append(rng.choice(len(p), p=p))
        if i == len(drafts) or tokens[i] != drafts[i]:
            break
    return tokens


@case("batch", True, "each row by itself")
def rows_alone(drafts, draft_probs, target_probs, rng):
    """Verify each row by Algorithm 1."""
    rows = zip(drafts, draft_probs, target_probs, strict=True)
    return [algorithm1(*row, rng) for row in rows]


CONFIDENCE = 0.55  # of the length rules below


@case("lengths", True, "a rule that decides before the draw")
def stop_before_the_draw(drafts, draft_probs, rng):
    """End a draft before the first token whose distribution is flat."""
    flat = draft_probs.max(axis=2) < CONFIDENCE
    return np.where(flat.any(axis=1), flat.argmax(axis=1), drafts.shape[1])


SLOWER = 0.25  # a drafted token's share of the time of a round without one, in the budgets below


def likeliest(chances, count):
    """The length of each row where the slots (row, token) with the largest chances are verified."""
    slots = np.argsort(-chances, axis=None, kind="stable")[:count]
    return np.bincount(slots // chances.shape[1], minlength=len(chances))


def early_stop(chances):
    """Take slots in falling order of their chance, as long as one more raises tokens per time."""
    tokens = len(chances) + np.cumsum([0, *-np.sort(-chances, axis=None)])
    speed = tokens / (1 + SLOWER * np.arange(len(tokens)))
    return likeliest(chances, np.argmin([*(speed[1:] > speed[:-1]), False]))


def drawn(drafts, draft_probs):
    """The probability of each drafted token."""
    return np.take_along_axis(draft_probs, drafts[:, :, None], axis=2)[:, :, 0]


@case("lengths", True, "specjax.policies; vLLM pull request 52228 reads max q too")
def budget_before_the_draw(drafts, draft_probs, rng):
    """The two likeliest slots of the batch; a slot's chance is max q along its row."""
    return likeliest(np.cumprod(draft_probs.max(axis=2), axis=1), 2)


@case("lengths", True, "specjax.policies")
def early_stop_before_the_draw(drafts, draft_probs, rng):
    """An early stop; a slot's chance is max q along its row."""
    return early_stop(np.cumprod(draft_probs.max(axis=2), axis=1))


@case("sampler", True, "the Gumbel-max trick")
def gumbel_max(logits, temperature, rng):
    """Take the argmax of logits plus noise; without noise at temperature 0."""
    if temperature == 0:
        return np.argmax(logits)
    return np.argmax(logits / temperature + rng.gumbel(size=len(logits)))


@case("tree", True, "arXiv 2305.09781, SpecInfer")
def recursive_rejection(parents, tokens, draft_probs, target_probs, rng):
    """Try a node's children in turn; each rejection subtracts the draft from the target."""
    node, output = -1, []
    while True:
        p, q = target_probs[node + 1], draft_probs[node + 1]
        for child in np.flatnonzero(parents == node):
            if rng.random() * q[tokens[child]] < p[tokens[child]]:
                node = int(child)
                output.append(tokens[child])
                break
            p = np.maximum(p - q, 0)
            p = p / p.sum()
        else:
            return [*output, rng.choice(len(p), p=p)]


# --- Errors ---------------------------------------------------------------------------------------


@case("round", False, "transformers issue 32867; keras-hub, speculative_sampler.py")
def argmax_draft(target, draft, prefix, gamma, rng):
    """The draft takes its argmax, and q is its softmax."""
    drafts: list[int] = []
    for _ in range(gamma):
        drafts.append(int(np.argmax(draft([*prefix, *drafts]))))
    q, p = _both(target, draft, prefix, drafts)
    return [*prefix, *algorithm1(drafts, q, p, rng)]


@case("round", False, "transformers issue 47932")
def top_k_on_one_side(target, draft, prefix, gamma, rng):
    """The draft is drawn within its top two ids, and q is the whole distribution."""
    drafts: list[int] = []
    for _ in range(gamma):
        q = draft([*prefix, *drafts])
        q = np.where(q >= np.sort(q)[-2], q, 0)
        drafts.append(rng.choice(len(q), p=q / q.sum()))
    q, p = _both(target, draft, prefix, drafts)
    return [*prefix, *algorithm1(drafts, q, p, rng)]


@case("round", False, "vLLM pull request 47386")
def noise_shared_with_the_draft(target, draft, prefix, gamma, rng):
    """The token after a rejection is drawn with the noise that drew the rejected one."""
    drafts: list[int] = []
    noise = rng.random(gamma + 1)
    for u in noise[:gamma]:
        drafts.append(inverse(draft([*prefix, *drafts]), u))
    q, p = _both(target, draft, prefix, drafts)
    for i, x in enumerate(drafts):
        if not rng.random() * q[i][x] < p[i][x]:
            return [*prefix, *drafts[:i], inverse(np.maximum(p[i] - q[i], 0), noise[i])]
    return [*prefix, *drafts, inverse(p[-1], noise[-1])]


@case("verify", False, "asked for in eth-sri/language-model-arithmetic issue 14")
def residual_from_p(drafts, draft_probs, target_probs, rng):
    """The token after a rejection is drawn from p, not from norm(max(0, p − q))."""
    for i, x in enumerate(drafts):
        p, q = target_probs[i], draft_probs[i]
        if not rng.random() * q[x] < p[x]:
            return [*drafts[:i], rng.choice(len(p), p=p)]
    return [*drafts, rng.choice(len(q), p=target_probs[-1])]


@case("verify", False, "a generator that is seeded inside the acceptance loop")
def noise_shared_by_positions(drafts, draft_probs, target_probs, rng):
    """One uniform number decides about all positions."""
    u = rng.random()
    for i, x in enumerate(drafts):
        p, q = target_probs[i], draft_probs[i]
        if not u * q[x] < p[x]:
            left = np.maximum(p - q, 0)
            return [*drafts[:i], rng.choice(len(p), p=left / left.sum())]
    return [*drafts, rng.choice(len(q), p=target_probs[-1])]


@case("batch", False, "keras-hub, speculative_sampler.py")
def cut_to_the_smallest(drafts, draft_probs, target_probs, rng):
    """All rows end where the first of them rejects; each draws its residual there."""
    rows = [algorithm1(*row, rng) for row in zip(drafts, draft_probs, target_probs, strict=True)]
    least = min(map(len, rows)) - 1
    outputs = []
    for row, tokens in enumerate(rows):
        left = target_probs[row][least]
        if least < drafts.shape[1]:
            left = np.maximum(left - draft_probs[row][least], 0)
        left = left if left.sum() > 0 else target_probs[row][least]
        outputs.append([*tokens[:least], rng.choice(len(left), p=left / left.sum())])
    return outputs


@case("lengths", False, "llama.cpp pull request 22506; harmless with sample-and-match")
def peek_and_drop(drafts, draft_probs, rng):
    """A draft ends before the first drawn token that is improbable."""
    dropped = drawn(drafts, draft_probs) < CONFIDENCE
    return np.where(dropped.any(axis=1), dropped.argmax(axis=1), drafts.shape[1])


@case("lengths", False, "arXiv 2502.15197 (TETRIS), in its code")
def budget_by_own_token(drafts, draft_probs, rng):
    """The two likeliest slots; a slot's chance is the probability of the tokens up to its own."""
    return likeliest(np.cumprod(drawn(drafts, draft_probs), axis=1), 2)


@case("lengths", False, "the chances of TETRIS, with an early stop")
def early_stop_by_own_token(drafts, draft_probs, rng):
    """An early stop; a slot's chance is the probability of the tokens up to its own."""
    return early_stop(np.cumprod(drawn(drafts, draft_probs), axis=1))


@case("lengths", False, "the example of arXiv 2607.05147 (DSpark)")
def global_maximum(drafts, draft_probs, rng):
    """The best number of slots in the batch, by chances that read the tokens before each slot."""
    first = np.full(len(drafts), 0.8)
    second = first * np.where(drafts[:, 0] == 0, 0.9, 0.0)
    chances = np.stack([first, second], axis=1)[:, : drafts.shape[1]]
    tokens = len(drafts) + np.cumsum([0, *-np.sort(-chances, axis=None)])
    speed = np.array([1, 0.5, 0.5, 0.45, 0.45])[: len(tokens)]
    return likeliest(chances, np.argmax(tokens * speed))


@case("sampler", False, "a wrapper that loses the temperature")
def temperature_lost(logits, temperature, rng):
    """A softmax at temperature 1, whatever is asked for."""
    p = np.exp(logits - logits.max())
    return rng.choice(len(p), p=p / p.sum())


@case("tree", False, "foundation-model-stack/fms-extras issue 12")
def longest_path(parents, tokens, draft_probs, target_probs, rng):
    """Every path is verified by draws of its own, and the longest output is taken."""
    outputs = []
    for node in set(range(len(parents))) - set(parents.tolist()):
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = int(parents[node])
        q, p = (
            draft_probs[[0, *(n + 1 for n in path[:-1])]],
            target_probs[[0, *(n + 1 for n in path)]],
        )
        outputs.append(algorithm1(tokens[path], q, p, rng))
    return max(outputs, key=len)


def inverse(weights, u):
    """Draw by the inverse of the cumulative distribution."""
    return int(np.argmax(np.cumsum(weights) / weights.sum() > u))


def _both(target, draft, prefix, drafts):
    """Both models' distributions along a draft."""
    prefixes = [[*prefix, *drafts[:i]] for i in range(len(drafts) + 1)]
    return [draft(tokens) for tokens in prefixes[:-1]], [target(tokens) for tokens in prefixes]
