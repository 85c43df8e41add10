"""The target's distribution by teacher forcing, and a test of draws against it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax import sampling as smp
from specjax.decoding.texts import pack_for
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.types import Inputs, Model

LIKELY = 8  # first tokens after which the second one is tested


@jax.jit
def forced(model: Model, inputs: Inputs, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Compute logits after every prefix of the tokens, prompt included, in one call."""
    context, cache = model.start(inputs, tokens.shape[1] + 1)
    hidden, _ = model(tokens, jnp.zeros((tokens.shape[0],), jnp.int32), context, cache)
    return model.logits(hidden)


def over_output(
    model: Model, target: Checkpoint, shape: tuple[int, int], source: Sequence[int], output
) -> np.ndarray:
    """Compute a model's logits for each token of an output: (len(output), V), float32.

    Args:
      target: sets how a source or prompt is packed.
      shape: width of sources, and length of a prompt with its output; one for all texts, so that
        each model is compiled once.
      source, output: ids, at least one of each.
    """
    width, length = shape
    inputs = pack_for(target, [source], rows=1, width=width)
    known = int(inputs.prompt_len[0])
    tokens = np.zeros((1, length), np.int32)
    tokens[0, :known] = np.asarray(inputs.prompt)[0, :known]
    tokens[0, known : known + len(output)] = output
    read = forced(model, inputs, jnp.asarray(tokens))
    return np.asarray(read, np.float32)[0, known - 1 : known - 1 + len(output)]


def gap(logits: np.ndarray, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Compute how far a model's logits separate the first two tokens that differ.

    The unit is the model's largest logit. Infinite if one output ends where the other continues.

    Args:
      logits: from `over_output` for `ours`.
    """
    pairs = list(zip(ours, theirs, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        return math.inf
    row = logits[same]
    return float(abs(row[ours[same]] - row[theirs[same]]) / np.abs(row).max())


def outcome(tokens: Sequence[int], likely: set[int]) -> tuple[int, ...]:
    """Reduce an output to its counted outcome: two tokens if the first is likely, else one."""
    return tuple(tokens[:2] if tokens[0] in likely else tokens[:1])


def distribution_of_two(
    method: Method, target: Checkpoint, source: Sequence[int]
) -> tuple[set[int], dict[tuple[int, ...], float]]:
    """Compute the likeliest first tokens that end no row, and each `outcome`'s probability."""
    count = min(LIKELY, method.target.vocab_size)
    inputs = pack_for(target, [source] * count, rows=count)
    known = int(inputs.prompt_len[0])
    prompt = np.asarray(inputs.prompt)[:, :known]

    def distributions(first: np.ndarray) -> np.ndarray:
        """Compute distributions of the first token, and of the one after `first`: (count, 2, V)."""
        tokens = jnp.asarray(np.column_stack([prompt, first]))
        read = forced(method.target, inputs, tokens)[:, known - 1 :]
        return np.exp(np.asarray(smp.standardize(read, method.sampling), np.float64))

    firsts = distributions(np.zeros(count, np.int32))[0, 0]
    order = np.argsort(-firsts, kind="stable")[:count].astype(np.int32)
    seconds = dict(zip(order.tolist(), distributions(order)[:, 1], strict=True))
    likely = set(seconds) - set(np.asarray(method.eos_ids).tolist())
    expected: dict[tuple[int, ...], float] = {}
    for first, prob in enumerate(firsts):
        if first in likely:
            expected |= {(first, b): float(prob * after) for b, after in enumerate(seconds[first])}
        else:
            expected[first,] = float(prob)
    return likely, {cell: prob for cell, prob in expected.items() if prob > 0}


def chi_square(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """Compute the p-value of Pearson's test of counts against a distribution.

    Outcomes expected fewer than 5 times are pooled, the rarest first. A count of an outcome that
    the distribution lacks gives 0.
    """
    if any(cell not in expected for cell in counts):
        return 0.0
    total = sum(counts.values())
    cells, pool = [], np.zeros(2)
    for cell, prob in sorted(expected.items(), key=lambda item: item[1]):
        pool += counts.get(cell, 0), total * prob
        if pool[1] >= 5:
            cells.append(pool)
            pool = np.zeros(2)
    if len(cells) < 2:
        return 1.0  # nothing to compare
    cells[-1] = cells[-1] + pool
    seen, mean = np.transpose(cells)
    half = jnp.float32(((seen - mean) ** 2 / mean).sum() / 2)
    return float(jax.scipy.special.gammaincc(jnp.float32((len(cells) - 1) / 2), half))
