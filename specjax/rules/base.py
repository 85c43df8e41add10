"""The protocol of acceptance rules, and functions that rules share.

A rule is pure functions from log-probabilities to distributions. The loop draws, not the rule, so
the distribution of a whole round can be enumerated. Both models' log-probabilities come from the
same `standardize`; only a rule that is not exact may read another target distribution
(`target_distribution`).

Shapes: `target_logprobs` (B, γ+1, V), entry i the target's distribution after i drafted tokens,
given the noise (`given_noise`) in `stop` and `next_probs`; `draft_logprobs` (B, γ, V), entry i the
distribution that drafted token i was drawn from, before any noise is known; `drafts` (B, γ);
`draft_len` (B,) ≤ γ, the number of submitted tokens. Entries at or beyond draft_len are arbitrary.
γ is the room of a pass, and 0 in a pass of one position.
"""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key, Shaped

from specjax import sampling as smp
from specjax.contracts import check_part
from specjax.sampling import Sampling


class AcceptanceRule(Protocol):
    """The protocol of rules; `Token` is the paper's rule, and the base of the others.

    Attributes:
      exact: whether the output keeps the target's distribution: a class variable, or a property
        that reads the rule's parameters. A subclass that changes how tokens are decided must
        declare it again, since `exactness` ignores what a base class declares.
      reveals_shorter: whether a round in which `a` of L drafted tokens were accepted also shows
        the count for any shorter draft, namely min(a, its length). Policies with `needs_shorter`
        require it.
    """

    reveals_shorter: ClassVar[bool]

    @property
    def exact(self) -> bool:
        """Whether the output keeps the target's distribution; may be a class variable."""
        ...

    def under(self, sampling: Sampling) -> "AcceptanceRule":
        """The rule to use under this kind of sampling; default: the rule itself."""
        return self

    def target_distribution(
        self, logits: Float[Array, "*batch V"], sampling: Sampling
    ) -> Float[Array, "*batch V"]:
        """The target's log-probabilities that the rule reads; default: `standardize`."""
        return smp.standardize(logits, sampling)

    def given_noise(
        self,
        logprobs: Float[Array, "B V"],
        keys: Key[Array, " B"],
        position: Int[Array, " B"],
    ) -> Float[Array, "B V"]:
        """The draft's or target's distribution, given the noise of each row's absolute position.

        It is unchanged unless both models share that noise.
        """
        return logprobs

    def acceptance(
        self, target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
    ) -> Float[Array, "*batch"]:
        """The chance that a token drawn from the draft is accepted; α is its mean."""
        ...

    def stop(
        self,
        target_logprobs: Float[Array, "B K V"],
        draft_logprobs: Float[Array, "B G V"],
        drafts: Int[Array, "B G"],
        draft_len: Int[Array, " B"],
    ) -> Float[Array, "B K"]:
        """Entry i is P(exactly i drafted tokens are accepted | drafts)."""
        ...

    def next_probs(
        self,
        target_logprobs: Float[Array, "B K V"],
        draft_logprobs: Float[Array, "B G V"],
        drafts: Int[Array, "B G"],
        draft_len: Int[Array, " B"],
        accepted: Int[Array, " B"],
    ) -> Float[Array, "B V"]:
        """Distribution of the token after `accepted` drafted ones, if acceptance ends there."""
        ...


def resolve_rule(method: Any) -> None:
    """Replace a new method's rule by `rule.under(sampling)`.

    Nothing is done if jax rebuilds a method with placeholders for its fields.
    """
    if isinstance(method.sampling, Sampling):
        rule = method.rule.under(method.sampling)
        check_part("rule", rule)
        object.__setattr__(method, "rule", rule)


def given_noise(
    rule: AcceptanceRule,
    logprobs: Float[Array, "B K V"],
    keys: Key[Array, " B"],
    position: Int[Array, "B K"],
) -> Float[Array, "B K V"]:
    """Apply `AcceptanceRule.given_noise` at K positions of each row."""
    return jax.vmap(rule.given_noise, in_axes=(1, None, 1), out_axes=1)(logprobs, keys, position)


def at_tokens(
    values: Shaped[Array, "*batch V"], tokens: Int[Array, "*batch"]
) -> Shaped[Array, "*batch"]:
    """The value of each token at its position, such as its log-probability there."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def at_position(logprobs: Float[Array, "B K V"], position: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The distribution at one position of each row."""
    return jnp.take_along_axis(logprobs, position[:, None, None], axis=1)[:, 0]


def overlap(
    target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    """β = Σₓ min(target, draft) = 1 − D_LK: the chance that a draft is accepted (Thm 3.5)."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


def ends(survival: Float[Array, "B G"]) -> Float[Array, "B G+1"]:
    """Compute `stop` from the chances that more than 0, 1, … tokens are accepted."""
    return -jnp.diff(survival, axis=1, prepend=1.0, append=0.0)


def surviving(stop: Float[Array, "B K"]) -> Float[Array, "B K-1"]:
    """The inverse of `ends`, within rounding: entry i is P(more than i tokens are accepted).

    It is summed from the end, and exactly 0 where no token can survive.
    """
    return along(jnp.add, stop[:, :0:-1], 0.0)[:, :0:-1]


def along(
    step: Callable[[Any, Any], Any], values: Float[Array, "B G"], first: float
) -> Float[Array, "B G+1"]:
    """Accumulate: first, step(first, values₀), step(step(first, values₀), values₁), …

    The order is the same on every platform, unlike that of XLA's scans. γ is small, and elementwise
    steps fuse with neighbouring operations.
    """
    start = jnp.full(values.shape[:1], first, values.dtype)
    return jnp.stack(list(itertools.accumulate(values.T, step, initial=start)), axis=1)


def residual(
    target_probs: Float[Array, "B V"], draft_probs: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """The residual norm(max(0, target − draft)); the target's own distribution if it is empty.

    It is empty if both distributions agree up to rounding; then a rejection has a probability of
    the order of rounding too.
    """
    left = jnp.maximum(target_probs - draft_probs, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    usable = mass > 0
    return jnp.where(usable, left / jnp.where(usable, mass, 1.0), target_probs)


def stop_where_not(
    kept: Bool[Array, "B K V"],
    drafts: Int[Array, "B G"],
    draft_len: Int[Array, " B"],
    like: Float[Array, "B K V"],
) -> Float[Array, "B K"]:
    """Compute `stop` of a rule that keeps tokens with certainty, in the dtype of `like`."""
    count = drafts.shape[1]
    survives = at_tokens(kept[:, :count], drafts)
    survives &= jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
    return ends(along(jnp.multiply, survives.astype(like.dtype), 1.0)[:, 1:])


def ids(logprobs: Float[Array, "*batch V"]) -> Int[Array, " V"]:
    return jnp.arange(logprobs.shape[-1], dtype=jnp.int32)
