"""Audits of jax functions that take a key: samples are drawn, in one vmap for each problem."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specjax.audit.findings import Finding, apart, margin, words
from specjax.audit.kinds import Fault, Problem, called
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
            if kind == "sampler":
                logits, temperature = problem.more
                tokens = _samples(function, jnp.asarray(logits, dtype), temperature, keys)
            else:
                tokens = _outputs(drawer(table.size, table.gamma), table, dtype, keys)
        except Fault as fault:
            yield Finding(problem, fault=f"{fault} ({words(problem)})")
            continue
        law = np.zeros_like(problem.expected)
        np.add.at(law, tuple(tokens.T), 1 / draws)
        yield Finding(problem, apart(law, problem), margin(law.size, draws, len(problems)), law)


def _samples(function, logits, temperature: float, keys) -> np.ndarray:
    tokens = called(jax.vmap(lambda key: function(logits, temperature, key)), keys)
    return _valid(np.asarray(tokens).reshape(len(keys), -1), len(logits))


def _outputs(draw, table: Table, dtype: str, keys) -> np.ndarray:
    """Draw tokens (draws, γ+1), and check them."""
    target, draft = (
        jnp.asarray(np.array([law[prefix] for prefix in table.target]), dtype)
        for law in (table.target, table.draft)
    )
    most = table.gamma + 1
    output, tokens, count = map(np.asarray, called(draw, keys, target, draft))
    if tokens.shape[1:] != (most,) or count.ndim != 1:
        raise Fault(f"returns tokens of shape {tokens.shape[1:]}, not ({most},) and their number")
    if count.min() < 1 or count.max() > most:
        raise Fault(f"emits {count.min()} to {count.max()} tokens; a round has 1 to {most}")
    _valid(np.where(np.arange(most) < count[:, None], tokens, 0), table.size)
    return output


def _drawer(function, size: int, gamma: int):
    """Compile: keys, target and draft after every prefix → completed output, tokens, count."""
    starts = np.cumsum([0] + [size**n for n in range(gamma + 1)])

    def after(law, tokens, count):
        """The distribution after the first `count` tokens; prefixes lie in lexical order."""
        places = [tokens[i] * size ** (count - 1 - i) for i in range(count)]
        return law[starts[count] + sum(places, 0)]

    def one(key, target, draft):
        drafting, own, completing = jax.random.split(key, 3)
        drafts = jnp.zeros(gamma, jnp.int32)
        for i, draw in enumerate(jax.random.split(drafting, gamma)):
            drafts = drafts.at[i].set(_categorical(draw, after(draft, drafts, i)))
        q = jnp.stack([after(draft, drafts, i) for i in range(gamma)])
        p = jnp.stack([after(target, drafts, i) for i in range(gamma + 1)])
        tokens, count = function(drafts, q, p, own)
        output = tokens = jnp.asarray(tokens, jnp.int32)
        for i, draw in enumerate(jax.random.split(completing, gamma + 1)):
            rest = _categorical(draw, after(target, output, i))
            output = output.at[i].set(jnp.where(i < count, output[i], rest))
        return output, tokens, count

    return jax.jit(jax.vmap(one, in_axes=(0, None, None)))


def _categorical(key, probs):
    return jax.random.categorical(key, jnp.log(probs)).astype(jnp.int32)


def _valid(tokens: np.ndarray, size: int) -> np.ndarray:
    wrong = tokens[(tokens < 0) | (tokens >= size)]
    if wrong.size:
        raise Fault(f"emits id {wrong[0]}, outside the vocabulary of {size} ids")
    return tokens
