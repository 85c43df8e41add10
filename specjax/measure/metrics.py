"""Measures of how well a draft fits a target.

Three things are easily confused. α is a property of the two distributions: E[Σ min(target, draft)]
over prefixes that the target generated (Cor 3.6); it is what the paper's formulas take. The rate of
accepted over drafted tokens is lower, since what follows a rejection is never tested. Block
efficiency τ is tokens per target call.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specjax import accept, decoding
from specjax import sampling as smp
from specjax.accept import AcceptanceRule, TokenRule
from specjax.batching import bucket
from specjax.drafters.base import Drafter, is_silent
from specjax.models.hub import Checkpoint
from specjax.sampling import Sampling
from specjax.types import Inputs, Model

ENOUGH = 10  # outputs for an interval: a bootstrap over fewer is too narrow


@dataclasses.dataclass(frozen=True, repr=False)
class Alpha:
    """α of a pair, with what it was measured on."""

    value: float
    low: float | None  # 95% interval, by bootstrap over outputs: tokens of one output are
    high: float | None  # correlated. None below `ENOUGH` outputs, which show too little of them
    tokens: int
    overlaps: list[np.ndarray]  # Σ min(target, draft) at each token of each output
    rule: str = ""  # whose chance of acceptance it is, where that rule is not exact

    @property
    def interval(self) -> str:
        """Such as "0.912 to 0.934", or "–"."""
        if self.low is None or self.high is None:
            return "–"
        return f"{self.low:.3f} to {self.high:.3f}"

    def __repr__(self) -> str:
        of = f" of {self.rule}" if self.rule else ""
        return (
            f"Alpha({self.value:.3f}{of}, 95% interval {self.interval}, "
            f"{len(self.overlaps):,} outputs, {self.tokens:,} tokens)"
        )


@partial(jax.jit, static_argnames="buffer_len")
def overlaps(
    target: Model,
    drafter: Drafter,
    sampling: Sampling,
    inputs: Inputs,
    tokens: Int[Array, "B T"],
    *,
    buffer_len: int,
    rule: AcceptanceRule | None = None,
) -> Float[Array, "B T"]:
    """β of every prefix: entry [b, t] is Σ min(target, draft) of the token at position t+1.

    The target reads all tokens in one call; the drafter goes through them as it does when it
    drafts, so that n-grams and models are measured alike. Where it proposes nothing, β is 0.

    Args:
      tokens: prompt and output, right-padded; T < buffer_len.
      rule: whose chance of acceptance it is; default `TokenRule`.
    """
    rule = (TokenRule() if rule is None else rule).under(sampling)
    batch, count = tokens.shape
    context, cache = target.start(inputs, buffer_len)
    drafter_context, drafter_state = drafter.start(inputs, buffer_len)
    zeros = jnp.zeros((batch,), jnp.int32)
    hidden, _ = target(tokens, zeros, context, cache)
    buffer = jnp.zeros((batch, buffer_len), jnp.int32).at[:, :count].set(tokens)

    def at(state, known):
        length = jnp.full((batch,), known, jnp.int32)
        drafter_hidden, state = drafter.begin(buffer, length, drafter_context, state)
        logits = drafter.logits(drafter_hidden)
        here = jax.lax.dynamic_slice_in_dim(hidden, known - 1, 1, 1)
        read = jax.lax.dynamic_slice_in_dim(tokens, known - 1, 1, 1)
        state = drafter.observe(read, length - 1, here, zeros + 1, drafter_context, state)
        target_logprobs = rule.target_distribution(target.logits(here[:, 0]), sampling)
        beta = rule.acceptance(target_logprobs, smp.standardize(logits, sampling))
        return state, jnp.where(is_silent(logits), 0.0, beta)

    _, betas = jax.lax.scan(at, drafter_state, jnp.arange(1, count + 1))
    return betas.T


def measure_alpha(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[str],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = 8,
    max_source_len: int | None = None,
    rule: AcceptanceRule | None = None,
) -> Alpha:
    """α in the paper's sense: E[Σ min(target, draft)] over prefixes that the target generated.

    At temperature 0 both distributions are one-hot, and α is the rate at which the most likely
    tokens agree. Both models get the same standardization, as in the paper. With a lenient rule it
    is the chance that this rule accepts, E[Σ min(target/l, draft)] in A.5, over the same prefixes.

    Raises: as `specjax.generate`.
    """
    chosen = smp.sampling(temperature, top_k, top_p)
    plain = decoding.plain(target, chosen)
    rows = decoding.stream(
        plain,
        target,
        texts,
        max_new_tokens=max_new_tokens,
        key=smp.as_key(key),
        batch_size=batch_size,
        max_source_len=max_source_len,
        names=(target.name, ""),
    )
    outputs = [row.tokens for row in rows]
    return alpha_of_outputs(
        target,
        draft,
        texts,
        outputs,
        sampling=chosen,
        batch_size=batch_size,
        max_source_len=max_source_len,
        rule=rule,
    )


def alpha_of_outputs(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[str],
    outputs: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    batch_size: int = 8,
    max_source_len: int | None = None,
    rule: AcceptanceRule | None = None,
) -> Alpha:
    """α over outputs that the target generated before, one for each text.

    Raises:
      ValueError: nothing to measure, or a rule that decides in its own way with the `acceptance` of
        another.
    """
    method = decoding.speculative(target, draft, gamma=1, sampling=sampling, rule=rule)
    if not accept.own_acceptance(method.rule, sampling):
        raise ValueError(
            f"{accept.label(method.rule)} decides about tokens in its own way and inherits "
            "`acceptance`, which is another rule's: define it, or measure α without the rule."
        )
    sources = decoding.tokenize(target, texts, max_source_len)
    pairs = [(s, o) for s, o in zip(sources, outputs, strict=True) if s and o]
    if not pairs:
        raise ValueError("Nothing to measure: every input or output is empty.")
    # One shape for all batches: a program takes longer to compile than padding takes to compute.
    width = decoding.common_width([source for source, _ in pairs])
    encodes = target.config.is_encoder_decoder
    longest = max((1 if encodes else len(source)) + len(output) for source, output in pairs)
    count = bucket(longest - 1, smallest=32)
    rows = bucket(min(batch_size, len(pairs)))
    found: list[np.ndarray] = []
    for at in range(0, len(pairs), batch_size):
        chunk = pairs[at : at + batch_size]
        sources = [source for source, _ in chunk]
        inputs = decoding.pack_for(target, sources, rows=rows, width=width)
        first = inputs.prompt_len.tolist()  # each row's first output token stands here
        ends = [first[row] + len(output) for row, (_, output) in enumerate(chunk)]
        # The token at each position is scored from those before it: EOS itself is never read.
        tokens = np.zeros((rows, count), np.int32)
        tokens[:, : inputs.prompt.shape[1]] = np.asarray(inputs.prompt)[:, :count]
        for row, (_, output) in enumerate(chunk):
            tokens[row, first[row] : ends[row] - 1] = output[:-1]
        betas = np.asarray(
            overlaps(
                method.target,
                method.drafter,
                sampling,
                inputs,
                jnp.asarray(tokens),
                buffer_len=count + 1,
                rule=method.rule,
            )
        )
        found += [betas[row, first[row] - 1 : end - 1] for row, end in enumerate(ends)]
    value, low, high = mean_interval(found)
    if not np.isfinite(value):
        raise FloatingPointError(
            f"Logits of {target.name} or its draft are not finite. Check the weights, or use a "
            "wider dtype."
        )
    enough = len(found) >= ENOUGH
    return Alpha(
        value,
        low if enough else None,
        high if enough else None,
        sum(len(row) for row in found),
        found,
        "" if accept.exactness(method.rule, sampling) else accept.label(method.rule),
    )


def mean_interval(
    rows: Sequence[np.ndarray], *, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean over all entries and its 95% interval, by bootstrap over whole rows."""
    sums = np.array([row.sum() for row in rows], np.float64)
    counts = np.array([len(row) for row in rows], np.float64)
    picks = np.random.default_rng(seed).integers(len(rows), size=(draws, len(rows)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(sums.sum() / counts.sum()), float(low), float(high)
