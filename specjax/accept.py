"""Acceptance rules: how many drafted tokens are kept, and the distribution of the token that
follows.

A rule is pure functions from log-probabilities to distributions. It draws nothing: the loop does,
so that the distribution of a whole round can be enumerated. Both models' log-probabilities come
from the same `standardize`; only a rule that is not exact may read the target by another
(`target_distribution`).

Shapes: `target_logprobs` (B, γ+1, V), entry i the target's distribution after i drafted tokens,
given the noise (`given_noise`) in `stop` and `next_probs`; `draft_logprobs` (B, γ, V), entry i the
distribution that drafted token i was drawn from, before any noise is known; `drafts` (B, γ);
`draft_len` (B,) ≤ γ, how many were submitted. Entries at or beyond draft_len are arbitrary. γ is
what a pass has room for, and 0 in a pass of one position.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import sampling as smp
from specjax.pytrees import pytree
from specjax.sampling import Purpose, Sampling
from specjax.support import named
from specjax.support.ranges import number


class AcceptanceRule(Protocol):
    """What the loop needs of a rule; `TokenRule` is the paper's, and the base of the others.

    exact: whether the output keeps the target's distribution. It is a class variable, or a
      property that reads the rule's parameters. A subclass that changes how tokens are decided must
      declare it again: `exactness` does not trust what a base class said.
    reveals_shorter: whether a round in which `a` of L drafted tokens were accepted also tells what
      any shorter draft would have got, namely min(a, its length). Policies that learn so need it.
    """

    reveals_shorter: ClassVar[bool]

    @property
    def exact(self) -> bool:
        """See above; a class variable will do."""
        ...

    def under(self, sampling: Sampling) -> "AcceptanceRule":
        """The rule to use under this kind of sampling: nearly always itself."""
        ...

    def target_distribution(
        self, logits: Float[Array, "*batch V"], sampling: Sampling
    ) -> Float[Array, "*batch V"]:
        """The target's log-probabilities that the rule reads: `standardize`, if it is exact."""
        ...

    def given_noise(
        self,
        logprobs: Float[Array, "B V"],
        keys: Key[Array, " B"],
        position: Int[Array, " B"],
    ) -> Float[Array, "B V"]:
        """The distribution, of the draft or the target, given the noise of each row's absolute
        position. It is unchanged unless both models share that noise."""
        ...

    def acceptance(
        self, target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
    ) -> Float[Array, "*batch"]:
        """The chance that a token drawn from the draft's distribution is accepted: α is its
        mean."""
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
    """Put `rule.under(sampling)` in the place of a new method's rule, once and for all.

    Nothing is done where jax rebuilds a method with placeholders for its fields.
    """
    if isinstance(method.sampling, Sampling):
        object.__setattr__(method, "rule", method.rule.under(method.sampling))


def given_noise(
    rule: AcceptanceRule,
    logprobs: Float[Array, "B K V"],
    keys: Key[Array, " B"],
    position: Int[Array, "B K"],
) -> Float[Array, "B K V"]:
    """`AcceptanceRule.given_noise` at several positions of each row."""
    return jax.vmap(rule.given_noise, in_axes=(1, None, 1), out_axes=1)(logprobs, keys, position)


def at_tokens(logprobs: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    """The log-probability of each token under the distribution at its position."""
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=2)[:, :, 0]


def at_position(logprobs: Float[Array, "B K V"], position: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The distribution at one position of each row."""
    return jnp.take_along_axis(logprobs, position[:, None, None], axis=1)[:, 0]


def overlap(
    target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    """β = Σₓ min(target, draft) = 1 − D_LK: the chance that a draft is accepted (Thm 3.5)."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


def coupled_overlap(
    target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    """Σₓ 1/Σ_y max(p(y)/p(x), q(y)/q(x)): the chance that one Gumbel noise draws the same token
    from both distributions (target p, draft q); never too high, and at most 1/32 of it too low.

    With s = p(x)/(p(x) + q(x)) a term is p·q/(p + q) over G(s) = Σ_y max((1−s)·p(y), s·q(y)). G is
    convex, so its chords over 32 cells lie above it; a sort would be exact, and takes 26 ms on a
    CPU at V = 32128.
    """
    target, draft = jnp.exp(target_logprobs), jnp.exp(draft_logprobs)

    def larger(s):
        return jnp.sum(jnp.maximum((1 - s) * target, s * draft), axis=-1)

    cells = 32
    ends = jax.vmap(larger, out_axes=-1)(jnp.linspace(0, 1, cells + 1, dtype=target.dtype))
    both = target + draft
    share = target / jnp.where(both > 0, both, 1.0)
    cell = jnp.minimum((share * cells).astype(jnp.int32), cells - 1)
    low, high = (jnp.take_along_axis(ends, end, axis=-1) for end in (cell, cell + 1))
    chord = low + (high - low) * (share * cells - cell.astype(share.dtype))
    return jnp.sum(share * draft / chord, axis=-1)


def ends(survival: Float[Array, "B G"]) -> Float[Array, "B G+1"]:
    """`stop` from the chances that more than 0, 1, … tokens are accepted: their differences."""
    return -jnp.diff(survival, axis=1, prepend=1.0, append=0.0)


def surviving(stop: Float[Array, "B K"]) -> Float[Array, "B K-1"]:
    """Entry i is P(more than i tokens are accepted): what `ends` was given, within rounding.

    Summed from the end: where nothing can survive it is exactly 0.
    """
    return along(jnp.add, stop[:, :0:-1], 0.0)[:, :0:-1]


def along(
    step: Callable[[Any, Any], Any], values: Float[Array, "B G"], first: float
) -> Float[Array, "B G+1"]:
    """first, step(first, values₀), step(step(first, values₀), values₁), …

    One step after another, in the same order on every platform: a scan of XLA's has an order of its
    own on each. γ is small, and elementwise steps fuse with what is around them.
    """
    start = jnp.full(values.shape[:1], first, values.dtype)
    return jnp.stack(list(itertools.accumulate(values.T, step, initial=start)), axis=1)


def residual(
    target_probs: Float[Array, "B V"], draft_probs: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """norm(max(0, target − draft)); the target's own distribution where nothing is left of it.

    Nothing is left where both distributions agree up to rounding; a rejection there has a
    probability of the order of rounding too.
    """
    left = jnp.maximum(target_probs - draft_probs, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    usable = mass > 0
    return jnp.where(usable, left / jnp.where(usable, mass, 1.0), target_probs)


@pytree
class TokenRule:
    """Algorithm 1 of Leviathan et al. 2023: keep token x with probability min(1, p(x)/q(x)),
    stop at the first that is not kept, and replace it by a draw from norm(max(0, p − q)).
    """

    exact: ClassVar[bool] = True
    reveals_shorter: ClassVar[bool] = True

    def under(self, sampling):
        return self

    def target_distribution(self, logits, sampling):
        return smp.standardize(logits, sampling)

    def given_noise(self, logprobs, keys, position):
        return logprobs

    def acceptance(self, target_logprobs, draft_logprobs):
        """Σ min(p, q)."""
        return overlap(target_logprobs, draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """More than i tokens are accepted with probability Π min(1, p/q) over the first i + 1."""
        count = drafts.shape[1]
        target = at_tokens(target_logprobs[:, :count], drafts)
        draft = at_tokens(draft_logprobs, drafts)
        submitted = jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
        # A token was drawn, so its draft probability is positive; the target's may be 0.
        log_ratio = jnp.where(submitted, jnp.minimum(target - draft, 0.0), -jnp.inf)
        return ends(jnp.exp(along(jnp.add, log_ratio, 0.0)[:, 1:]))

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The residual at the rejected token; the target's distribution if all were accepted."""
        target = jnp.exp(at_position(target_logprobs, accepted))
        if not draft_logprobs.shape[1]:
            return target
        last = draft_logprobs.shape[1] - 1
        draft = jnp.exp(at_position(draft_logprobs, jnp.minimum(accepted, last)))
        rejected = (accepted < draft_len)[:, None]
        return jnp.where(rejected, residual(target, draft), target)


@pytree
class BlockRule(TokenRule):
    """Block verification (Sun et al. 2024): a draft is judged as a whole, and more of it is kept.

    With P₀ = 1 and Pᵢ = min(1, Pᵢ₋₁·p(xᵢ)/q(xᵢ)), the residual after i tokens is [Pᵢ·p − q]₊, with
    q = 0 once the draft has ended; its mass is Zᵢ. The longest i with
    uᵢ ≤ hᵢ = Zᵢ/(Zᵢ + 1 − Pᵢ) is accepted, and the next token drawn from what is left there. A
    token that came out badly may thus be kept because a later one came out well.
    """

    exact: ClassVar[bool] = True
    reveals_shorter: ClassVar[bool] = False  # what is kept depends on where the draft ended

    def under(self, sampling):
        """Of distributions that are one-hot the token rule keeps as much."""
        return TokenRule() if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """Σ min(p, q), the token rule's: no single chance exists here, and at least as many tokens
        are accepted."""
        return overlap(target_logprobs, draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """hᵢ·Π (1 − hⱼ) over j > i, for independent uniforms uⱼ; h₀ = 1."""
        log_kept = self._log_kept(target_logprobs, draft_logprobs, drafts, draft_len)
        target = jnp.exp(log_kept[:, :, None] + target_logprobs)
        draft = _submitted_probs(draft_logprobs, draft_len)
        left = jnp.sum(jnp.maximum(target - draft, 0.0), axis=-1)
        lost = -jnp.expm1(log_kept)  # 1 − P
        # 1 − h is 0 where P = 1, though nothing may be left there either. On a GPU the quotient of
        # equals may be above 1.
        missed = jnp.where(lost > 0, lost / jnp.where(lost > 0, left + lost, 1.0), 0.0)
        missed = jnp.minimum(missed, 1.0)
        return (1.0 - missed) * along(jnp.multiply, missed[:, :0:-1], 1.0)[:, ::-1]

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """norm([P·p − q]₊); the target's distribution if all were accepted."""
        log_kept = self._log_kept(target_logprobs, draft_logprobs, drafts, draft_len)
        log_kept = jnp.take_along_axis(log_kept, accepted[:, None], axis=1)
        target = jnp.exp(log_kept + at_position(target_logprobs, accepted))
        return residual(target, at_position(_submitted_probs(draft_logprobs, draft_len), accepted))

    def _log_kept(self, target_logprobs, draft_logprobs, drafts, draft_len) -> Float[Array, "B K"]:
        """log Pᵢ for i = 0 … γ; −inf past the draft's end."""
        count = drafts.shape[1]
        ratio = at_tokens(target_logprobs[:, :count], drafts) - at_tokens(draft_logprobs, drafts)
        slots = jnp.arange(count, dtype=jnp.int32)[None, :]
        ratio = jnp.where(slots < draft_len[:, None], ratio, -jnp.inf)
        return along(lambda kept, ratio: jnp.minimum(kept + ratio, 0.0), ratio, 0.0)


@pytree
class GumbelRule(TokenRule):
    """Both models draw with the noise that plain decoding has at a position (Daliri, Musco and
    Suresh 2024): a drafted token is kept if it is the one that the target draws there.

    So the tokens are those of plain decoding with the same key, whatever the drafter and the
    policy. Given the noise the target's distribution is one-hot. So the token rule accepts the
    drafted token exactly if it is the target's.
    """

    exact: ClassVar[bool] = True

    def under(self, sampling):
        """Greedy decoding has no noise."""
        return TokenRule() if sampling.greedy else self

    def given_noise(self, logprobs, keys, position):
        """One-hot at what plain decoding would draw."""
        drawn = smp.draw_by_gumbel(smp.fold(keys, position, Purpose.POSITION), logprobs)
        return jnp.where(drawn[:, None] == _ids(logprobs)[None, :], 0.0, -jnp.inf)

    def acceptance(self, target_logprobs, draft_logprobs):
        """Σₓ 1/Σ_y max(p(y)/p(x), q(y)/q(x)), over the noise: (1−TV)/(1+TV) to 1−TV."""
        return coupled_overlap(target_logprobs, draft_logprobs)


@pytree
class LenientRule(TokenRule):
    """Lenience l of the paper's A.5: keep token x with probability min(1, p(x)/(l·q(x))).

    The paper leaves the residual open; here it stays norm(max(0, p − q)). So a drafted position
    gives x the probability

        min(q, p/l)(x) + (1 − Σ min(q, p/l)) · norm(max(0, p − q))(x)  ≤  p(x)/l

    and no longer p(x): text gets faster and drifts towards the draft's. l = 1 is `TokenRule`. The
    token after a fully accepted draft still follows p. At temperature 0 see `LenientArgmax`.
    """

    lenience: Float[Array, ""]  # l in (0, 1]

    @property
    def exact(self) -> bool:  # type: ignore[override]  # one for all of a base, and here by l
        """With l = 1."""
        return bool(self.lenience == 1)

    def under(self, sampling):
        return LenientArgmax(self.lenience) if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """Σ min(p/l, q)."""
        return overlap(_over(target_logprobs, self.lenience), draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """Ratios are p/(l·q): p/l in the place of p."""
        over = _over(target_logprobs, self.lenience)
        return super().stop(over, draft_logprobs, drafts, draft_len)


@pytree
class LenientArgmax(TokenRule):
    """Lenience at temperature 0: keep token x if p(x) ≥ l·max p, else replace it by the argmax.

    Here p is the target's softmax at temperature 1: lenience comes before the standardization that
    makes greedy decoding one-hot. The paper prints p(x) ≤ l·max p, evidently for ≥. With l = 1 only
    the argmax is kept, the first of equals.
    """

    lenience: Float[Array, ""]  # l in (0, 1]

    @property
    def exact(self) -> bool:  # type: ignore[override]  # one for all of a base, and here by l
        """With l = 1."""
        return bool(self.lenience == 1)

    def target_distribution(self, logits, sampling):
        return smp.standardize(logits, smp.sampling(1.0))

    def acceptance(self, target_logprobs, draft_logprobs):
        """The draft's mass on tokens that are kept: 0 or 1."""
        return jnp.sum(
            jnp.where(self._kept(target_logprobs), jnp.exp(draft_logprobs), 0.0), axis=-1
        )

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """At the first token that is not kept, with certainty."""
        return _stop_where_not(self._kept(target_logprobs), drafts, draft_len, target_logprobs)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The argmax, with certainty."""
        target = at_position(target_logprobs, accepted)
        return (smp.argmax(target)[:, None] == _ids(target)[None, :]).astype(target.dtype)

    def _kept(self, target_logprobs: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
        best = jnp.max(target_logprobs, axis=-1, keepdims=True)
        near = _over(target_logprobs, self.lenience) >= best
        index = jnp.broadcast_to(_ids(target_logprobs), target_logprobs.shape)
        first = index == jnp.expand_dims(smp.argmax(target_logprobs), -1)
        return first | (near & (self.lenience < 1))


def lenient(lenience: float) -> LenientRule:
    """The rule with lenience l, for any temperature; smaller accepts more, and 1 is exact.

    Raises:
      ValueError: not 0 < lenience ≤ 1.
    """
    why = "1 is the exact rule, and towards 0 every token that the target can say is accepted"
    return LenientRule(jnp.float32(number("lenience", lenience, "(0, 1]", why)))


@pytree
class TypicalRule(TokenRule):
    """Typical acceptance (Medusa, Cai et al. 2024): keep token x if p(x) > min(ε, δ·exp(−H(p))),
    however likely the draft found it.

    H is the entropy of p in nats. A, the tokens that pass, always holds the likeliest: max p is at
    least exp(−H). A token that is not kept is replaced by a draw from p within A, which the token
    after a fully accepted draft follows too. So a drafted position gives x the probability

        q(x) + (1 − q(A)) · p(x)/p(A)  for x in A, and 0 for others

    and no longer p(x): within A the draft's distribution is taken as it is. At temperature 0 only
    the argmax passes, and this is `TokenRule`.
    """

    exact: ClassVar[bool] = False

    epsilon: Float[Array, ""]  # ε in (0, 1], what is always enough
    delta: Float[Array, ""]  # δ in (0, 1], what is enough relative to exp(−H)

    def under(self, sampling):
        return TokenRule() if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """q(A)."""
        kept = self._kept(target_logprobs)
        return jnp.sum(jnp.where(kept, jnp.exp(draft_logprobs), 0.0), axis=-1)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """At the first token that is not kept, with certainty."""
        return _stop_where_not(self._kept(target_logprobs), drafts, draft_len, target_logprobs)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """p within A."""
        target = at_position(target_logprobs, accepted)
        left = jnp.where(self._kept(target), jnp.exp(target), 0.0)
        return left / jnp.sum(left, axis=-1, keepdims=True)

    def _kept(self, target_logprobs: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
        probs = jnp.exp(target_logprobs)
        surprise = jnp.where(probs > 0, target_logprobs, 0.0)
        peak = jnp.exp(jnp.sum(probs * surprise, axis=-1, keepdims=True))  # exp(−H)
        epsilon, delta = (x.astype(probs.dtype) for x in (self.epsilon, self.delta))
        best = jnp.max(probs, axis=-1, keepdims=True)  # passes; where δ = 1, up to rounding
        return (probs > jnp.minimum(epsilon, delta * peak)) | (probs == best)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> TypicalRule:
    """The rule that keeps x if p(x) > min(ε, δ·exp(−H)); smaller numbers accept more. By default
    those of Medusa's code, where δ = √ε.

    Raises:
      ValueError: ε or δ outside (0, 1].
    """
    why = "the smaller it is, the more tokens are accepted"
    numbers = (number(n, x, "(0, 1]", why) for n, x in (("epsilon", epsilon), ("delta", delta)))
    return TypicalRule(*map(jnp.float32, numbers))


NAMES = {
    "token": "specjax.accept:TokenRule",
    "block": "specjax.accept:BlockRule",
    "gumbel": "specjax.accept:GumbelRule",
    "lenient": "specjax.accept:lenient",
    "typical": "specjax.accept:typical",
}


def load(name: str, **settings: Any) -> AcceptanceRule:
    """The rule that a name or an import path stands for.

        load("lenient", lenience=0.3), or load("lenient(lenience=0.3)"), or load("my_module:MyRule")

    An import path is code that runs: the module is imported.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("rule", NAMES, name, AcceptanceRule, **settings)


# What decides about tokens. `under` need not be among them: a rule is judged as what it gives.
_DECIDING = frozenset(("target_distribution", "given_noise", "stop", "next_probs"))


def exactness(rule: AcceptanceRule, sampling: Sampling) -> bool | None:
    """Whether outputs keep the target's distribution, by the rule's own word; None: it is silent.

    A declaration covers the class that makes it, and subclasses that decide about tokens in the
    same way. One that overrides a function of `_DECIDING` must declare `exact` again.
    """
    rule = rule.under(sampling)
    declares, decides = (_depth(rule, names) for names in (("exact",), _DECIDING))
    return bool(rule.exact) if declares is not None and declares <= (decides or 0) else None


def own_acceptance(rule: AcceptanceRule, sampling: Sampling) -> bool:
    """Whether the class that decides about tokens also defines `acceptance`."""
    rule = rule.under(sampling)
    defines, decides = (_depth(rule, names) for names in (("acceptance",), _DECIDING))
    return defines is not None and defines <= (decides or 0)


def _depth(rule: AcceptanceRule, names: Collection[str]) -> int | None:
    """How many classes down its method resolution order a rule has one of these; None: nowhere."""
    classes = enumerate(type(rule).__mro__)
    return next((i for i, cls in classes if not vars(cls).keys().isdisjoint(names)), None)


def label(rule: AcceptanceRule) -> str:
    """The rule as one would write it, "LenientRule(lenience=0.3)"."""
    made: Any = rule
    if not dataclasses.is_dataclass(made):
        return type(rule).__name__
    said = []
    for field in dataclasses.fields(made):
        value = np.asarray(getattr(rule, field.name))
        shown = value.ndim == 0 and value.dtype.kind in "fiu"
        said.append(f"{field.name}={value.item():g}" if shown else field.name)
    return f"{type(rule).__name__}({', '.join(said)})"


def remark(rule: AcceptanceRule, sampling: Sampling) -> str:
    """A caveat for results of a rule that is not exact; "" for one that is."""
    found = exactness(rule, sampling)
    if found is None:
        return f"{label(rule)} does not say whether it is exact: see specjax.accept.exactness"
    return "" if found else f"{label(rule)} is not exact"


def _stop_where_not(
    kept: Bool[Array, "B K V"],
    drafts: Int[Array, "B G"],
    draft_len: Int[Array, " B"],
    like: Float[Array, "B K V"],
) -> Float[Array, "B K"]:
    """`stop` where it is certain which tokens are kept, in the dtype of `like`."""
    count = drafts.shape[1]
    survives = at_tokens(kept[:, :count], drafts)
    survives &= jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
    return ends(along(jnp.multiply, survives.astype(like.dtype), 1.0)[:, 1:])


def _submitted_probs(
    draft_logprobs: Float[Array, "B G V"], draft_len: Int[Array, " B"]
) -> Float[Array, "B K V"]:
    """The draft's distributions, and nothing (0 throughout) where no token was submitted: γ+1
    entries."""
    slots = jnp.arange(draft_logprobs.shape[1], dtype=jnp.int32)[None, :]
    submitted = slots < draft_len[:, None]
    probs = jnp.where(submitted[:, :, None], jnp.exp(draft_logprobs), 0.0)
    return jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))


def _over(logprobs: Float[Array, "*batch V"], lenience: Float[Array, ""]):
    """log(p/l)."""
    return logprobs - jnp.log(lenience.astype(logprobs.dtype))


def _ids(logprobs: Float[Array, "*batch V"]) -> Int[Array, " V"]:
    return jnp.arange(logprobs.shape[-1], dtype=jnp.int32)
