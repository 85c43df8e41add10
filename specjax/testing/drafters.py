"""The check of drafters: distributions depend on the source and the known tokens alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.contracts import check_part
from specjax.drafters import abilities, sharing
from specjax.drafters.base import Drafter, prefill
from specjax.rules import AcceptanceRule, Token
from specjax.sampling import Sampling
from specjax.testing.common import (
    GAMMA,
    PROMPT,
    Varying,
    check_output,
    check_returns,
    method_of,
    quickly,
)
from specjax.testing.tables import inputs_of, random_table, repeat
from specjax.types import Inputs, Model

ROWS, LENGTH = 4, 9  # number of test texts, and their tokens after the prompt
CLOSE = 1e-4  # tolerance between probabilities of calls of different shapes


def check_drafter(
    drafter: Drafter,
    *,
    target: Model | None = None,
    inputs: Inputs | None = None,
    guesses: bool | None = None,
    rule: AcceptanceRule | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> None:
    """Check that a drafter's logits depend on the known tokens alone, and enumerate its outputs.

    - `begin`, `extend` and `observe` keep the state's shapes and dtypes; logits are (B, V).
    - The same text gives the same distribution, whatever was drafted and rejected before, and
      however many rounds passed without a draft.
    - `extend` after a token and `begin` once the token is known give the same, unless the drafter
      `guesses`.
    - Rows do not depend on each other.
    - Logits are finite or −inf. A row of −inf throughout proposes nothing.
    - Every outcome of every round gives the target's distribution.

    Args:
      drafter: a drafter over 3 to 5 ids: enumeration takes V² drafts. Id 2 ends an output.
      target: a model over the same ids, whose hidden states the drafter observes; default: a random
        table, whose hidden states are its logits.
      inputs: the first row is used; default: a prompt of two tokens. Give a source if the drafter
        or the target reads one.
      guesses: whether distributions after a drafted token depend on where the round began;
        default: as the drafter declares.
      rule, sampling: used for enumerated outputs; default: `Token()` at temperature 0.7.
      seed: picks texts, drafts and the default target.

    Raises:
      ValueError: a class or a name is given.
      AssertionError: the message names the error and its size.
    """
    check_part("drafter", drafter)
    name = type(drafter).__name__
    target = random_table(seed + 1, drafter.vocab_size) if target is None else target
    inputs = inputs_of([PROMPT]) if inputs is None else inputs
    rows = repeat(inputs, ROWS)
    sampling = sampling or Sampling(0.7)
    method = method_of(target, drafter, rule or Token(), Varying(), sampling)
    check_returns(method, rows)
    if guesses is None:
        guesses = abilities.guesses(drafter)
    _check_histories(name, drafter, target, rows, guesses, np.random.default_rng(seed))
    check_output(f"{name} with {sampling}", method, inputs)


class Asked(NamedTuple):
    """A drafter's distribution of the token after a text."""

    call: str  # "begin" or "extend"
    row: int
    length: int  # known tokens, drafted ones included
    probs: np.ndarray  # (V,); all 0 where it proposed nothing
    rounds: str  # what came before, for messages


class Verified(NamedTuple):
    """Contexts and states of both models after some tokens."""

    contexts: sharing.Contexts
    cache: Any
    state: Any


def _room(inputs: Inputs) -> int:
    return inputs.prompt.shape[1] + LENGTH + GAMMA + 1


@quickly
def _start(drafter, target, inputs: Inputs) -> Verified:
    contexts, cache, state = sharing.started(target, drafter, inputs, _room(inputs))
    hidden, cache = prefill(target, inputs, contexts.target, cache)
    if hidden is not None:
        zeros = jnp.zeros_like(inputs.prompt_len)
        known = inputs.prompt_len - 1
        read = inputs.prompt[:, :-1], zeros, hidden, known
        state = drafter.observe(*read, contexts.drafter, state)
    return Verified(contexts, cache, state)


@quickly
def _begin(drafter, read: Verified, tokens, length):
    hidden, state = drafter.begin(tokens, length, read.contexts.drafter, read.state)
    return drafter.logits(hidden), read._replace(state=state)


@quickly
def _extend(drafter, read: Verified, token, position):
    hidden, state = drafter.extend(token, position, read.contexts.drafter, read.state)
    return drafter.logits(hidden), read._replace(state=state)


@quickly
def _observe(drafter, target, read: Verified, tokens, start, count):
    hidden, cache = target(tokens, start, read.contexts.target, read.cache)
    state = drafter.observe(tokens, start, hidden, count, read.contexts.drafter, read.state)
    return read._replace(cache=cache, state=state)


def _check_histories(name, drafter, target, inputs: Inputs, guesses: bool, rng) -> None:
    """Check that the same texts give the same in other rounds: one token each, then random ones."""
    texts = rng.integers(drafter.vocab_size, size=(ROWS, LENGTH), dtype=np.int32)
    known: dict[tuple, Asked] = {}
    for history in range(6):
        here = texts.copy()
        if history == 5:  # row 0 again, beside other texts
            here[1:] = rng.integers(drafter.vocab_size, size=here[1:].shape)
        for asked in _along(drafter, target, inputs, here, rng, plain=history == 0):
            if history == 5 and asked.row:
                continue
            if asked.call == "extend" and guesses:
                continue
            if np.isnan(asked.probs).any():
                raise AssertionError(
                    f"{name}.{asked.call}: logits are NaN or +inf after {asked.rounds}."
                )
            first = known.setdefault((asked.row, asked.length), asked)
            apart = np.abs(first.probs - asked.probs)
            if apart.max() > CLOSE:
                token = int(np.argmax(apart))
                text = here[asked.row, : asked.length - int(inputs.prompt_len[0])]
                why = "other rows of the batch" if history == 5 else "more than the known tokens"
                raise AssertionError(
                    f"{name}: after {' '.join(map(str, text)) or 'the prompt'}, "
                    f"P({token}) is {first.probs[token]:.4g} by {first.call} once {first.rounds}, "
                    f"and {asked.probs[token]:.4g} by {asked.call} once {asked.rounds}. Its logits "
                    f"depend on {why}."
                )


def _along(drafter, target, inputs, texts, rng, *, plain) -> Iterator[Asked]:
    """Decode along known texts, and yield the drafter's distribution after each prefix.

    Args:
      plain: one token in each round, and no rejections. Otherwise drafted tokens and accepted
        counts are random, and in a third of the rounds nothing is drafted: `begin` is not called.
    """
    size, first = drafter.vocab_size, int(inputs.prompt_len[0])
    whole = np.concatenate([np.asarray(inputs.prompt[:, :first]), texts], axis=1)
    whole = np.pad(whole, ((0, 0), (0, GAMMA)))
    end, rows = first + LENGTH, np.arange(ROWS)
    length, before = np.full(ROWS, first, np.int32), [["the prompt was read"] for _ in rows]
    read = _start(drafter, target, inputs)
    while length.min() < end:
        # Random tokens, which must not be read, follow the known ones.
        tokens = rng.integers(size, size=(ROWS, _room(inputs)), dtype=np.int32)
        known = np.arange(_room(inputs)) < length[:, None]
        tokens = np.where(
            known, np.pad(whole, ((0, 0), (0, tokens.shape[1] - whole.shape[1]))), tokens
        )
        drafts = whole[rows[:, None], length[:, None] + np.arange(GAMMA)]
        right = np.full(ROWS, GAMMA) if plain else rng.integers(GAMMA + 1, size=ROWS)
        wrong = (drafts + 1 + rng.integers(size - 1, size=drafts.shape)) % size
        drafts = np.where(np.arange(GAMMA) < right[:, None], drafts, wrong).astype(np.int32)
        right = np.minimum(right, np.maximum(end - 1 - length, 0))
        idle, turns = not plain and rng.random() < 1 / 3, 1 if plain else GAMMA
        if not idle:
            logits, read = _begin(drafter, read, tokens, length)
            for i in range(turns):
                probs, call = _probs(logits), "extend" if i else "begin"
                for row in np.flatnonzero((i <= right) & (length < end)):
                    rounds = "; ".join(before[row])
                    yield Asked(call, int(row), int(length[row]) + i, probs[row], rounds)
                if i + 1 < turns:
                    logits, read = _extend(drafter, read, drafts[:, i], length + np.int32(i))
        accepted = np.zeros(ROWS, np.int32)
        if not (plain or idle):  # a right token may also be rejected, and then come from the target
            accepted = rng.integers(right + 1, dtype=np.int32)
        verified = np.concatenate([whole[rows, length - 1][:, None], drafts], axis=1)
        read = _observe(drafter, target, read, verified, length - 1, accepted + 1)
        for row in rows:
            ids = " ".join(map(str, drafts[row]))
            drafted = f"a round drafted {ids}, of which {accepted[row]} were accepted"
            bare = plain or idle
            before[row] = [*before[row][-2:], "a round without a draft" if bare else drafted]
        # A row at its end waits for the others.
        length = np.where(length < end, length + accepted + 1, length).astype(np.int32)


def _probs(logits: Array) -> np.ndarray:
    """Compute probabilities (B, V); 0 throughout where logits are −inf throughout."""
    found = np.asarray(logits, np.float64)
    silent = (found == -np.inf).all(axis=1, keepdims=True)
    top = np.where(silent, 0.0, found.max(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        weights = np.exp(found - top)
        return weights / np.where(silent, 1.0, weights.sum(axis=1, keepdims=True))
