"""The check of acceptance rules: distributions, and an audit if they are exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import autoregressive, loop
from specjax.audit import audit
from specjax.contracts import check_part
from specjax.drafters.base import ModelDrafter
from specjax.rules import AcceptanceRule, exactness, given_noise
from specjax.sampling import Sampling
from specjax.testing.common import (
    BUDGET,
    PROMPT,
    ROWS,
    Varying,
    check_returns,
    keys_of,
    method_of,
    tolerance,
)
from specjax.testing.tables import hopeless, inputs_of, random_table, repeat

DRAFTS, SIZE, LONGEST = 512, 4, 3  # number of random drafts, ids, and most tokens of a draft


def check_rule(rule: AcceptanceRule, *, seed: int = 0) -> None:
    """Check that a rule returns distributions, and that an exact one keeps the target's outputs.

    Target and draft have random distributions with tokens of probability 0, at different ids. A
    rule that declares `exact = True` is audited (`specjax.audit`): every outcome of a round, on
    tables of up to 5 ids and 4 drafted tokens. One whose `given_noise` changes a distribution must
    give the tokens of plain decoding with the same keys instead.

    Args:
      seed: picks the random distributions.

    Raises:
      ValueError: a class or a name is given.
      AssertionError: the message names the error and its size.
    """
    check_part("rule", rule)
    name = type(rule).__name__
    for sampling in (Sampling(1.0), Sampling(0.0)):
        tables = random_table(seed + 1), ModelDrafter(random_table(seed + 2))
        check_returns(method_of(*tables, rule, Varying(), sampling), inputs_of([PROMPT, PROMPT]))
    for sampling in (Sampling(1.0), Sampling(0.0)):
        ruling = rule.under(sampling)
        noisy = _is_noisy(ruling)
        _check_distributions(name, ruling, sampling, noisy, np.random.default_rng(seed))
        exact = exactness(rule, sampling)
        if exact is None:
            raise AssertionError(
                f"{name} overrides how tokens are decided: it must declare whether it is `exact`."
            )
        if exact and noisy:
            _check_tokens(name, rule, sampling, seed)
        elif exact:
            _check_exact(name, ruling, sampling, seed)


def _check_exact(name, rule, sampling, seed) -> None:
    """Audit the rule, on one-hot tables alone if greedy."""
    found = audit(rule, seed=seed)
    each = (one for one in found.findings if one.problem.kind == "T = 0" or not sampling.greedy)
    found = dataclasses.replace(found, findings=tuple(each))
    if not found.exact:
        raise AssertionError(f"{name} declares `exact`, and is {found.verdict}. {found}")


# --- Distributions ------------------------------------------------------------------------------


def _check_distributions(name, rule, sampling, noisy, rng) -> None:
    """Check `stop`, `next_probs` and `acceptance` for random drafts; for one-hot ones if greedy."""
    target = _random(rng, LONGEST + 1, sampling)
    draft = _random(rng, LONGEST, sampling)
    drafts = np.array([[rng.choice(SIZE, p=q) for q in row] for row in draft], np.int32)
    length = np.arange(DRAFTS, dtype=np.int32) % (LONGEST + 1)
    seen = _logs(target)
    if noisy:
        position = jnp.broadcast_to(jnp.arange(LONGEST + 1, dtype=jnp.int32), seen.shape[:2])
        seen = given_noise(rule, seen, keys_of(DRAFTS), position)
    ask = jax.jit(lambda *known: (rule.stop(*known), _next_probs(rule, *known)))
    stop, following = jax.device_get(ask(seen, _logs(draft), drafts, length))
    beyond = np.where(np.arange(LONGEST + 1) > length[:, None], stop, 0.0)
    _require(f"{name}.stop", stop, "the chances of 0 … γ accepted tokens")
    if beyond.max() > tolerance():
        row, count = np.argwhere(beyond == beyond.max())[0]
        raise AssertionError(
            f"{name}.stop accepts {count} tokens of a draft of {length[row]} with probability "
            f"{beyond.max():.3g}."
        )
    possible = stop > 1e-6
    _require(f"{name}.next_probs", following[possible], "the chances of the next token")
    past = np.arange(LONGEST) >= length[:, None]
    other = np.where(past[..., None], _random(rng, LONGEST, sampling), draft)
    tokens = np.where(past, rng.integers(SIZE, size=drafts.shape, dtype=np.int32), drafts)
    again = jax.device_get(ask(seen, _logs(other), tokens, length))
    for what, one, two in (
        ("stop", stop, again[0]),
        ("next_probs", following[possible], again[1][possible]),
    ):
        if not (apart := np.abs(one - two).max()) <= tolerance():
            raise AssertionError(
                f"{name}.{what} changes by {apart:.3g} with the draft's entries from draft_len on, "
                "which are arbitrary."
            )
    alone, first = jax.device_get(
        ask(seen[:, :1], _logs(draft[:, :0]), drafts[:, :0], np.zeros_like(length))
    )
    apart = max(np.abs(alone - 1).max(), np.abs(first[:, 0] - np.exp(seen[:, 0])).max())
    if rule.exact and not apart <= tolerance():
        raise AssertionError(
            f"{name} without a draft is {apart:.3g} off the target's distribution."
        )
    if not noisy:
        _check_acceptance(name, rule, seen[:, :2], draft[:, :1])


def _check_acceptance(name, rule, target, draft) -> None:
    """Compare `acceptance` with the mean of `stop` over all drafts of one token."""
    accepted, one = np.zeros(DRAFTS), jnp.ones(DRAFTS, jnp.int32)
    for token in range(SIZE):
        known = target, _logs(draft), jnp.full((DRAFTS, 1), token, jnp.int32), one
        stop, chance = np.asarray(rule.stop(*known)), draft[:, 0, token]
        accepted += np.where(chance > 0, chance * stop[:, 1], 0.0)
    claimed = np.asarray(rule.acceptance(target[:, 0], _logs(draft[:, 0])))
    off = np.abs(claimed - accepted)
    if not off.max() <= tolerance():
        row = int(np.argmax(off))
        expected = np.exp(np.asarray(target[row, 0], np.float64))
        raise AssertionError(
            f"{name}.acceptance is {claimed[row]:.4g} where `stop` accepts a drafted token with "
            f"probability {accepted[row]:.4g}: target {_shown(expected)}, draft "
            f"{_shown(draft[row, 0])}."
        )


def _next_probs(rule, target, draft, drafts, length) -> Array:
    """`next_probs` (B, γ+1, V) after each accepted count up to the draft's length."""
    ends = [jnp.minimum(jnp.int32(i), length) for i in range(draft.shape[1] + 1)]
    return jnp.stack([rule.next_probs(target, draft, drafts, length, end) for end in ends], axis=1)


def _random(rng, count: int, sampling: Sampling) -> np.ndarray:
    """Make random distributions (DRAFTS, count, SIZE) with zeros; one-hot if greedy."""
    probs = rng.exponential(size=(DRAFTS, count, SIZE)) ** 2
    if sampling.greedy:
        return np.eye(SIZE)[probs.argmax(axis=-1)]
    keep = rng.random(probs.shape) > 0.25
    keep |= probs == probs.max(axis=-1, keepdims=True)
    probs = np.where(keep, probs, 0.0)
    return probs / probs.sum(axis=-1, keepdims=True)


def _logs(probs: np.ndarray) -> Array:
    return jnp.log(jnp.asarray(probs, float))


def _require(name: str, probs: np.ndarray, what: str) -> None:
    """Raise AssertionError if the last axis holds no distribution."""
    for wrong, problem in (
        (~np.isfinite(probs), "are not finite"),
        (probs < -tolerance(), "are negative"),
        (np.abs(probs.sum(axis=-1, keepdims=True) - 1) > tolerance(), "do not sum to 1"),
    ):
        if wrong.any():
            row = probs.reshape(-1, probs.shape[-1])[
                np.flatnonzero(wrong.reshape(-1, wrong.shape[-1]).any(axis=1))[0]
            ]
            raise AssertionError(f"{name}: {what} {problem}: {row} (sum {row.sum():.6g}).")


def _shown(probs: np.ndarray) -> str:
    return "[" + " ".join(f"{p:.3g}" for p in probs) + "]"


# --- Noise that both models share ---------------------------------------------------------------


def _is_noisy(rule) -> bool:
    """Whether the rule changes a distribution by the noise of its position."""
    flat = jnp.log(jnp.full((8, 3), 1 / 3))
    position = jnp.arange(8, dtype=jnp.int32)
    return not np.array_equal(rule.given_noise(flat, keys_of(8), position), flat)


def _check_tokens(name, rule, sampling, seed) -> None:
    """Check tokens against those of plain decoding with the same keys, and the noise's mean."""
    target, inputs = random_table(seed + 1), repeat(inputs_of([PROMPT]), ROWS)
    for draft in (random_table(seed + 2), target, hopeless(target)):
        method = method_of(target, ModelDrafter(draft), rule, Varying(), sampling)
        plain = autoregressive.Autoregressive(target, sampling, method.eos_ids, rule)
        found, expected = (_decode(way, inputs, seed) for way in (method, plain))
        wrong = sum(one != two for one, two in zip(found, expected, strict=True))
        if wrong:
            raise AssertionError(
                f"{name} has noise of its own (`given_noise`), but {wrong} of {ROWS} outputs are "
                "not those of plain decoding with the same keys."
            )
    probs, count = np.array([0.5, 0.3, 0.15, 0.05]), 1 << 14
    logprobs = jnp.broadcast_to(_logs(probs), (count, len(probs)))
    noisy = rule.given_noise(logprobs, keys_of(count, seed), jnp.zeros(count, jnp.int32))
    mean = np.exp(np.asarray(noisy, np.float64)).mean(axis=0)
    errors = np.abs(mean - probs) / np.sqrt(probs * (1 - probs) / count)
    if not errors.max() <= 5:
        raise AssertionError(
            f"{name}.given_noise: the mean over {count:,} keys is {_shown(mean)}, the distribution "
            f"is {_shown(probs)}: {errors.max():.1f} standard errors apart."
        )


def _decode(method, inputs, seed) -> list[tuple[int, ...]]:
    budget = jnp.full((ROWS,), BUDGET, jnp.int32)
    room = inputs.prompt.shape[1] + BUDGET + method.slots
    contexts, state = loop.start(method, inputs, keys_of(ROWS, seed), budget, buffer_len=room)
    state = loop.decode(method, contexts, state)
    return [
        tuple(row[:length].tolist())
        for row, length in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    ]
