"""Measures of how well a draft fits a target.

Three things are easily confused. α is a property of the two distributions: E[Σ min(target, draft)]
over prefixes that the target generated (Cor 3.6); the paper's formulas take it. The rate of
accepted over drafted tokens is lower, since tokens after a rejection are never tested. Block
efficiency τ is tokens per target call.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specjax import rules
from specjax import sampling as smp
from specjax.contracts import watched
from specjax.decoding import building, streaming
from specjax.defaults import BATCH_SIZE, NEW_TOKENS
from specjax.drafters.base import Drafter, is_silent
from specjax.measure.along import along, by_prefix, last
from specjax.models.checkpoint import Checkpoint
from specjax.results import Row, acceptance_by_position
from specjax.rules import AcceptanceRule
from specjax.sampling import Sampling
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.types import Text

MIN_OUTPUTS = 10  # needed for an interval: a bootstrap over fewer is too narrow


@dataclasses.dataclass(frozen=True, repr=False)
class Alpha:
    """α of a pair, and the outputs that it was measured on."""

    value: float
    low: float | None  # 95% interval, by bootstrap over outputs, since tokens of one output are
    high: float | None  # correlated. None below `MIN_OUTPUTS` outputs
    tokens: int
    overlaps: list[np.ndarray]  # Σ min(target, draft) at each token of each output
    rule: str = ""  # the rule whose chance of acceptance it is, where that is not exact

    @property
    def interval(self) -> str:
        """The interval, such as "0.912 to 0.934"; "–" if unknown."""
        if self.low is None or self.high is None:
            return "–"
        return f"{self.low:.3f} to {self.high:.3f}"

    def __repr__(self) -> str:
        of = f" of {self.rule}" if self.rule else ""
        few = f"–: fewer than {MIN_OUTPUTS} outputs" if self.low is None else self.interval
        return (
            f"Alpha({self.value:.3f}{of}, 95% interval {few}, "
            f"{len(self.overlaps):,} outputs, {self.tokens:,} tokens)"
        )


@jax.jit
def overlaps(
    method: Speculative,
    contexts: Contexts,
    state: State,
    outputs: Int[Array, "B T"],
    emitted: Int[Array, " B"],
) -> Float[Array, "B T"]:
    """Compute β of every prefix: [b, t] is Σ min(target, draft) after t output tokens.

    Under a rule that is not exact, β is the chance that this rule accepts. The drafter steps
    through the tokens as it does when it drafts, so n-grams and models are measured alike. Where it
    proposes nothing, β is 0.

    Args:
      contexts, state, outputs, emitted: as `along` takes them; entries beyond `emitted` are
        arbitrary.
    """
    method = watched(method, len(state.done))
    rule, chosen = method.rule, method.sampling

    def beta(state, hidden):
        known = state.tokens, state.length, contexts.drafter, state.drafter
        drafter_hidden, drafter = method.drafter.begin(*known, lags=False)
        logits = method.drafter.logits(drafter_hidden)
        target_logprobs = rule.target_distribution(
            method.target.logits(last(state, hidden)), chosen
        )
        found = rule.acceptance(target_logprobs, smp.standardize(logits, chosen))
        return state.replace(drafter=drafter), jnp.where(is_silent(logits), 0.0, found)

    return along(method, contexts, state, outputs, emitted, beta)[1]


def measure_alpha(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    rule: AcceptanceRule | None = None,
    check_tokens: bool = True,
) -> Alpha:
    """Measure α of the paper: E[Σ min(target, draft)] over prefixes that the target generated.

    With greedy decoding, the default, both distributions are one-hot, and α is the rate at which
    the most likely tokens agree. Both models get the same standardization, as in the paper. Under a
    lenient rule α is the chance that this rule accepts, E[Σ min(target/l, draft)] in A.5, over the
    same prefixes. For the arguments see `specjax.generate`.

    Raises: as `specjax.generate`.
    """
    building.check_models(target, draft)
    chosen = smp.as_sampling(sampling)
    plain = building.plain(target, chosen)
    rows = streaming.stream(
        plain,
        target,
        texts,
        max_new_tokens=max_new_tokens,
        key=smp.key_for(chosen, key),
        batch_size=batch_size,
        max_source_len=max_source_len,
        names=(target.name, ""),
    )
    outputs = [row.tokens for row in rows]
    loop = building.build(
        target, draft, gamma=1, sampling=chosen, rule=rule, check_tokens=check_tokens
    )
    return alpha_of(loop, target, texts, outputs, batch_size, max_source_len)


def alpha_of(
    method: Speculative,
    target: Checkpoint,
    texts: Sequence[Text],
    outputs: Sequence[Sequence[int]],
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    max_new_tokens: int = 0,
) -> Alpha:
    """Measure α of a loop's rule and drafter over outputs of the target, one for each text.

    Args:
      max_new_tokens: as in `along.batches`.

    Raises:
      ValueError: nothing to measure, or a rule that decides differently but has the
        `acceptance` of another.
    """
    if not rules.own_acceptance(method.rule, method.sampling):
        raise ValueError(
            f"{rules.label(method.rule)} decides about tokens in its own way and inherits "
            "`acceptance`, which is another rule's: define it, or measure α without the rule."
        )
    run = method, target, texts, outputs, batch_size, max_source_len, max_new_tokens
    found = by_prefix(overlaps, *run)
    value, low, high = mean_interval(found)
    if not np.isfinite(value):
        raise FloatingPointError(
            f"Logits of {target.name} or its draft are not finite. Check the weights, or use a "
            "wider dtype."
        )
    enough = len(found) >= MIN_OUTPUTS
    return Alpha(
        value,
        low if enough else None,
        high if enough else None,
        sum(len(row) for row in found),
        found,
        "" if rules.exactness(method.rule, method.sampling) else rules.label(method.rule),
    )


def tokens_by_position(rows: Sequence[Row], gammas: Sequence[int]) -> dict[int, float]:
    """Estimate tokens per target call by draft length, from the acceptance of each position.

    One α for all positions promises too much where later tokens are accepted less often: for
    drafters that `guess`, and for those that end their drafts.

    Args:
      rows: from a loop whose drafts are as long as the longest of `gammas`.
    """
    rates = np.nan_to_num(acceptance_by_position(rows))
    kept = np.cumsum(np.cumprod(rates))
    return {gamma: 1.0 + float(kept[gamma - 1]) for gamma in gammas}


def tokens_along(outputs: Sequence[np.ndarray], gamma: int) -> float:
    """Compute the expected tokens per target call along known outputs, see `rounds_along`."""
    rounds = sum(rounds_along(beta, gamma) for beta in outputs)
    return sum(map(len, outputs)) / max(rounds, 1.0)


def rounds_along(beta: np.ndarray, gamma: int) -> float:
    """Compute the expected rounds of a known output, by β at each token, as in `Alpha.overlaps`.

    A round at token t accepts k drafted tokens with chance β_t ⋯ β_(t+k−1) (1 − β_(t+k)) and goes
    on at t + k + 1. Unlike α, this sees runs of tokens that are accepted together.
    """
    count = len(beta)
    expected = np.zeros(count + 1)  # rounds from token t on
    for t in reversed(range(count)):
        reached = np.cumprod(beta[t : t + min(gamma, count - t - 1)])
        chances = np.append(1.0, reached) - np.append(reached, 0.0)
        expected[t] = 1.0 + chances @ expected[t + 1 : t + 1 + len(chances)]
    return float(expected[0])


def mean_interval(
    rows: Sequence[np.ndarray], *, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Compute the mean over all entries and its 95% interval, by bootstrap over whole rows."""
    sums = np.array([row.sum() for row in rows], np.float64)
    counts = np.array([len(row) for row in rows], np.float64)
    picks = np.random.default_rng(seed).integers(len(rows), size=(draws, len(rows)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(sums.sum() / counts.sum()), float(low), float(high)
