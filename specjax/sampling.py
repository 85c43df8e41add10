"""The distribution that is sampled, computed from logits, and draws from it.

`standardize` is the only place where temperature and filters act. Baseline, draft, verify,
bonus and residual all share it, so the output's distribution is the target's.
"""

import dataclasses
import enum
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specjax.defaults import TOP_K, TOP_P
from specjax.pytrees import check_pytree, pytree, set_fields
from specjax.support import named
from specjax.support.ranges import has, number, shown, whole

COLDEST = 1e-20  # the lowest temperature above 0: logits up to 3e18 stay finite in float32
NAMES = {"truncation": "specjax.sampling:Truncation"}


class Filter(Protocol):
    """A pytree of numbers that leaves tokens out of the sampled distribution.

    Numbers are traced, so a new value compiles nothing; the class is static. A filter acts along
    the last axis. docs/own.md shows min-p.
    """

    @abstractmethod
    def __call__(self, logits: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
        """Return the logits, with −inf for each token that is left out; NaN must stay NaN.

        Args:
          logits: divided by the temperature, at least float32, −inf for what an earlier filter left
            out. Softmax gives the probabilities so far.
        """
        ...


@pytree
class Truncation(Filter):
    """The top_k most likely tokens, then the smallest set of those whose mass reaches top_p.

    Tokens as likely as the last one kept are kept too.
    """

    top_k: Array  # () int32, 0: off
    top_p: Array  # () float32, in (0, 1], 1: off

    def __init__(self, top_k: int = TOP_K, top_p: float = TOP_P):
        """Make one from plain numbers; ValueError if top_k < 0 or ≥ 2³¹, or top_p ∉ (0, 1]."""
        top_k = whole("top_k", top_k, "[0, ∞)", "0 switches it off")
        top_p = number("top_p", top_p, "(0, 1]", "1 switches it off")
        set_fields(self, top_k=jnp.int32(top_k), top_p=jnp.float32(top_p))

    def __call__(self, logits):
        # NaN is below nothing, so it stays and spreads.
        return jnp.where(logits < self._cutoff(logits), -jnp.inf, logits)

    def _cutoff(self, logits: Float[Array, "*batch V"]) -> Float[Array, "*batch 1"]:
        """The smallest logit that is kept; NaN passes through."""
        width = logits.shape[-1]
        descending = -jnp.sort(-logits, axis=-1)
        keep = jnp.where(self.top_k > 0, jnp.minimum(self.top_k, width), width)
        kth = jnp.take(descending, keep - 1, axis=-1)[..., None]
        probs = jax.nn.softmax(jnp.where(descending >= kth, descending, -jnp.inf), axis=-1)
        mass_before = jnp.cumsum(probs, axis=-1) - probs
        # top_p = 1 must keep the tail even where rounding lets the mass reach 1 before its end.
        top_p = jnp.where(self.top_p < 1, self.top_p, jnp.inf).astype(probs.dtype)
        nucleus = (probs > 0) & (mass_before < top_p)
        last = jnp.min(jnp.where(nucleus, descending, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(jnp.isfinite(last), last, descending[..., :1])


@pytree
class Sampling:
    """The choice of tokens. The kind is static; the numbers are traced and never recompile.

        Sampling(temperature=0.7, top_p=0.9)
        Greedy()

    Greedy: the most likely token with probability 1 (the first of equals). Otherwise
    softmax(logits / temperature), after all filters in order.
    """

    greedy: bool = dataclasses.field(metadata={"static": True})
    temperature: Array  # () float32, > 0
    filters: tuple[Filter, ...]

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = TOP_K,
        top_p: float = TOP_P,
        filters: Sequence[Filter | str] | str = (),
    ):
        """Make a sampling from plain numbers.

        Args:
          temperature: 0 is greedy, and filters nothing.
          top_k, top_p: see `Truncation`, which acts first.
          filters: further filters in order, or their import paths, also as one string with commas:
            "my_module:min_p(0.1)". An import path is code that runs.

        Raises:
          ValueError: temperature < 0, not finite or between 0 and `COLDEST`; top_k or top_p as in
            `Truncation`; a filter of another type.
        """
        given = temperature
        temperature = number("temperature", temperature, "[0, ∞)", "0 is greedy decoding")
        if given != 0 and temperature < COLDEST:
            raise ValueError(
                f"temperature={given!r} must be 0 or ≥ {COLDEST:g}: logits divided by less "
                "overflow float32. 0 is greedy decoding, which is the same but for ties."
            )
        first = Truncation(top_k, top_p)
        filters = named.split(filters) if isinstance(filters, str) else filters
        if not isinstance(filters, Sequence):
            raise ValueError(f"filters={filters!r} must be a list of filters or their names.")
        chosen = [
            named.make("filter", NAMES, one, Filter) if isinstance(one, str) else one
            for one in filters
        ]
        for one in chosen:
            has("filters", one, ("__call__",), "a list of `specjax.sampling.Filter`s")
            check_pytree("filters", one)
        if top_k > 0 or top_p < 1:
            chosen.insert(0, first)
        greedy = temperature == 0
        set_fields(
            self,
            greedy=greedy,
            temperature=jnp.float32(1.0 if greedy else temperature),
            filters=() if greedy else tuple(chosen),
        )


def Greedy() -> Sampling:
    """Sampling of the most likely token: `Sampling(temperature=0)`."""
    return Sampling(temperature=0.0)


def as_sampling(sampling: Sampling | None) -> Sampling:
    """The sampling itself, or `Greedy()` where none is given.

    Raises:
      ValueError: anything else.
    """
    if sampling is None:
        return Greedy()
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling={sampling!r} must be a specjax.Sampling, or Greedy().")
    return sampling


def argmax(x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Index of the first largest entry.

    Two plain reductions: XLA's CPU backend does not vectorise the (value, index) reduction of
    `jnp.argmax`, which is slow for a large V. NaN gives the last index.
    """
    width = x.shape[-1]
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), x.shape)
    best = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, width - 1)
    return jnp.min(best, axis=-1)


def entropy(logprobs: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """The entropy of a distribution, in nats; float32. A sum is slower (docs/performance.md)."""
    probs = jnp.exp(logprobs)
    surprise = jnp.where(probs > 0, -logprobs, 0.0)
    return jnp.vecdot(probs, surprise, precision="highest").astype(jnp.float32)


def standardize(logits: Float[Array, "*batch V"], sampling: Sampling) -> Float[Array, "*batch V"]:
    """Log-probabilities of the distribution that is sampled; −inf where a token cannot be.

    At least float32, whatever the logits are. Logits that are not finite (NaN, +inf, or −inf
    throughout) give NaN in every entry, so checking one entry is enough.
    """
    logits = logits.astype(np.promote_types(logits.dtype, jnp.float32))
    if sampling.greedy:
        index = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
        hit = index == jnp.expand_dims(argmax(logits), -1)
        # 0 for a finite maximum, NaN for any other.
        poison = 0.0 * jnp.max(logits, axis=-1, keepdims=True)
        return jnp.where(hit, 0.0, -jnp.inf) + poison
    scaled = logits / sampling.temperature.astype(logits.dtype)
    for leave_out in sampling.filters:
        scaled = _filtered(leave_out, scaled)
    return jax.nn.log_softmax(scaled, axis=-1)


def _filtered(leave_out: Filter, logits: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    """Apply a filter; ValueError if it returns anything but floats of the same shape."""
    found = leave_out(logits)
    fits = isinstance(found, Array) and found.shape == logits.shape
    if not (fits and jnp.issubdtype(found.dtype, jnp.floating)):
        array = isinstance(found, Array)
        returned = f"{found.dtype}{list(found.shape)}" if array else shown(found)
        raise ValueError(
            f"The filter {type(leave_out).__name__} returned {returned} where "
            f"{logits.dtype}{list(logits.shape)} is due: a logit for each that it was given, −inf "
            "for a token that is left out."
        )
    return found


# Randomness. A row's key is fold_in(fold_in(key, input index), sample), so that neither its
# neighbours nor padding nor the mesh change its tokens. Ratio rules draw by the row's own round:
# noise reused by position after a rejection would be biased wherever a rule or a policy has read
# the rejected tail. Plain decoding draws like a round without drafts. The Gumbel rule draws by
# absolute position, in both loops.


class Purpose(enum.IntEnum):
    """The purpose of a key; no two draws of one row share round, slot and purpose."""

    ACCEPT = 0
    NEXT = 1
    DRAFT = 2
    POLICY = 3
    POSITION = 4


def as_key(key: Key[Array, ""] | int | None) -> Key[Array, ""]:
    """Make a key from a user's argument: a key, or a whole number as seed; None is seed 0.

    Raises:
      ValueError: the argument is anything else.
    """
    if key is None:
        return jax.random.key(0)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        if not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"key={key} must be below 2⁶³, as a seed of JAX.")
        return jax.random.key(int(key))
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return key
        if key.dtype == jnp.uint32 and key.shape == (2,):
            return jax.random.wrap_key_data(key)  # from jax.random.PRNGKey
    raise ValueError(f"key={key!r} must be jax.random.key(seed), or the seed as a whole number.")


def key_for(sampling: Sampling, key: Key[Array, ""] | int | None) -> Key[Array, ""]:
    """The key that a function draws with, from its user's argument (`as_key`).

    Raises:
      ValueError: tokens are drawn without a key, or the argument is no key.
    """
    if key is None and not sampling.greedy:
        raise ValueError(
            "Tokens are drawn at this temperature, and no key is given: add key=jax.random.key(0), "
            "or a seed such as key=0."
        )
    return as_key(key)


def row_keys(
    key: Key[Array, ""], input_index: Int[Array, " B"], sample: Int[Array, " B"]
) -> Key[Array, " B"]:
    """One key for each (input, sample), independent of the batch it is decoded in."""

    def one(index, draw):
        return jax.random.fold_in(jax.random.fold_in(key, index), draw)

    return jax.vmap(one)(input_index, sample)


def fold(
    keys: Key[Array, " B"],
    count: Int[Array, " B"],
    purpose: Purpose,
    slot: Int[Array, ""] | int = 0,
) -> Key[Array, " B"]:
    """Keys for one purpose at each row's own count (a round, or an absolute position)."""
    tag = jnp.asarray(slot, jnp.int32) * len(Purpose) + purpose

    def one(key, number):
        return jax.random.fold_in(jax.random.fold_in(key, number), tag)

    return jax.vmap(one)(keys, count)


def uniform(keys: Key[Array, " B"], dtype=jnp.float32) -> Float[Array, " B"]:
    """One draw from [0, 1) for each row. Consumes the keys."""
    return jax.vmap(lambda key: jax.random.uniform(key, dtype=dtype))(keys)


def draw(keys: Key[Array, " B"], probs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draw a token for each row in proportion to `probs`, of any sum. Consumes the keys.

    Entries lie in blocks of about √V. A block is drawn by its mass and then an entry of that block,
    each by `race`. So a token takes 2√V numbers rather than V. No cumulative sum is used: in
    float32 it cannot separate the rare tokens of a large vocabulary.
    """
    width = probs.shape[1]
    block = 1 << math.isqrt(width - 1).bit_length()
    probs = jnp.pad(probs, ((0, 0), (0, -width % block)))
    blocks = probs.reshape(probs.shape[0], -1, block)
    count = blocks.shape[1]
    times = exponential(keys, count + block, probs.dtype)
    which = race(jnp.sum(blocks, axis=-1), times[:, :count])
    entries = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
    # Only NaN could index past the end.
    return jnp.minimum(which * block + race(entries, times[:, count:]), width - 1)


def draw_by_gumbel(keys: Key[Array, " B"], logprobs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draw a token for each row, with separate noise for each entry. Consumes the keys.

    The same keys give the same noise for any distribution, which couples two models that share
    them. With times t of a standard exponential, −log t is Gumbel noise, and the winner of the
    race is argmax(log p − log t).
    """
    return race(jnp.exp(logprobs), exponential(keys, logprobs.shape[1], logprobs.dtype))


def race(probs: Float[Array, "B N"], times: Float[Array, "B N"]) -> Int[Array, " B"]:
    """The entry whose time / probability is the smallest: a draw, if times are exponential.

    An entry of probability 0 never wins. Each entry is judged by its own quotient, so rounding
    changes a probability by a few units in its last place, however small it is.
    """
    return argmax(probs / times)


def exponential(keys: Key[Array, " B"], count: int, dtype) -> Float[Array, "B count"]:
    """Standard exponential times, from 64 random bits each. Consumes the keys."""

    def bits(key):
        return jax.random.bits(key, (2, count), jnp.uint32)

    high, low = jnp.moveaxis(jax.vmap(bits)(keys), 1, 0)
    return exponential_of_bits(high, low, dtype)


def exponential_of_bits(high: Array, low: Array, dtype) -> Array:
    """−log(1 − u) or −log(u), by the lowest bit of `high`; the other bits give u in (0, ½).

    Every time, short or long, has the relative precision of its dtype. Rare tokens win by short
    times, which the 23 bits of `jax.random.uniform` do not resolve below 1.2e-7.
    """
    u = (high >> 1).astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64
    return -jnp.where(high & 1, jnp.log(u), jnp.log1p(-u))
