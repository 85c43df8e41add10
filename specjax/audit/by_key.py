"""Audits of jax functions that take a key: samples are drawn, in one vmap for each problem."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specjax.audit.findings import Finding, compared, completed, margin, watched, words
from specjax.audit.kinds import Fault, Problem, Rows, called
from specjax.audit.tables import Table


def findings(
    function, kind: str, problems: list[Problem], draws: int, dtype: str, seed: int
) -> Iterator[Finding]:
    """Draw samples of every problem.

    Raises:
      ValueError: a kind that is not drawn by keys.
    """
    if kind not in ("verify", "sampler"):
        raise ValueError(
            f"rng='key' goes with kinds verify and sampler, not with {kind}: take rng='generator', "
            "and make a key inside of it from rng.integers(1 << 31)."
        )
    drawer = functools.cache(functools.partial(_drawer, function))
    for index, problem in enumerate(problems):
        (table,) = problem.tables
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), draws)
        try:
            with watched(problem):
                if kind == "sampler":
                    logits, temperature = problem.more
                    tokens = _samples(function, np.asarray(logits, dtype), temperature, keys)
                else:
                    tokens = _outputs(drawer(table.size, table.gamma), table, dtype, keys)
        except Fault as fault:
            yield Finding(problem, fault=f"{fault} ({words(problem)})")
            continue
        law = completed(problem, _shares(tokens, table.size))
        yield compared(problem, law, margin(law.size, draws, len(problems)))


def _shares(tokens: np.ndarray, size: int) -> dict[Rows, float]:
    """The share of each output among samples (draws, γ+1); −1 fills up shorter ones."""
    codes = (tokens + 1) @ (size + 1) ** np.arange(tokens.shape[1])
    _, places, counts = np.unique(codes, return_index=True, return_counts=True)
    outputs = [tuple(row[row >= 0].tolist()) for row in tokens[places]]
    return {(row,): count / len(tokens) for row, count in zip(outputs, counts, strict=True)}


def _samples(function, logits, temperature: float, keys) -> np.ndarray:
    logits = jnp.asarray(logits)
    tokens = called(jax.vmap(lambda key: function(logits, temperature, key)), keys)
    return _valid(np.asarray(tokens).reshape(len(keys), -1), len(logits))


def _outputs(draw, table: Table, dtype: str, keys) -> np.ndarray:
    """Draw tokens (draws, γ+1), and check them; −1 stands behind those that count."""
    target, draft = (
        jnp.asarray(np.array([law[prefix] for prefix in table.target], dtype))
        for law in (table.target, table.draft)
    )
    most = table.gamma + 1
    tokens, count = map(np.asarray, called(draw, keys, target, draft))
    if tokens.shape[1:] != (most,) or count.ndim != 1:
        raise Fault(f"returns tokens of shape {tokens.shape[1:]}, not ({most},) and their number")
    _check_integers(count)
    if count.min() < 1 or count.max() > most:
        raise Fault(f"emits {count.min()} to {count.max()} tokens; a round has 1 to {most}")
    counts = np.arange(most) < count[:, None]
    _valid(tokens[counts], table.size)
    return np.where(counts, tokens.astype(np.int64), -1)


def _drawer(function, size: int, gamma: int):
    """Compile: keys, target and draft after every prefix → tokens, count."""
    starts = np.cumsum([0] + [size**n for n in range(gamma + 1)])

    def after(law, tokens, count):
        """The distribution after the first `count` tokens; prefixes lie in lexical order."""
        places = [tokens[i] * size ** (count - 1 - i) for i in range(count)]
        return law[starts[count] + sum(places, 0)]

    def one(key, target, draft):
        drafting, own = jax.random.split(key)
        drafts = jnp.zeros(gamma, jnp.int32)
        for i, draw in enumerate(jax.random.split(drafting, gamma)):
            token = jax.random.categorical(draw, jnp.log(after(draft, drafts, i)))
            drafts = drafts.at[i].set(token.astype(jnp.int32))
        q = jnp.stack([after(draft, drafts, i) for i in range(gamma)])
        p = jnp.stack([after(target, drafts, i) for i in range(gamma + 1)])
        tokens, count = function(drafts, q, p, own)
        return jnp.asarray(tokens), count

    return jax.jit(jax.vmap(one, in_axes=(0, None, None)))


def _check_integers(array: np.ndarray) -> None:
    if not np.issubdtype(array.dtype, np.integer):
        raise Fault(f"returns numbers of dtype {array.dtype}, where integers are due")


def _valid(tokens: np.ndarray, size: int) -> np.ndarray:
    _check_integers(tokens)
    wrong = tokens[(tokens < 0) | (tokens >= size)]
    if wrong.size:
        raise Fault(f"emits id {wrong[0]}, outside the vocabulary of {size} ids")
    return tokens
