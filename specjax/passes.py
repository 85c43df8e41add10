"""Model calls left out or narrowed, for the sake of the hardware. Nothing here changes a token.

A round would be right without this module: it would call the drafter γ_max times and verify
γ_max + 1 positions, whatever the rows need. Here calls that no row needs are left out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax import devices
from specjax.policies.base import by_slot
from specjax.rounds import Drafts
from specjax.state import State, is_finite
from specjax.types import Call, Context, Packing

T = TypeVar("T")


def runs(fixed: bool, needed: Bool[Array, ""], always: Bool[Array, ""] | bool) -> Array:
    """Whether the drafter is called: `always` on accelerators if lengths are fixed, else `needed`.

    An accelerator's host would have to read `needed` back from the device before each call
    (docs/design.md, contract 11). With fixed lengths γ_max tokens are drafted anyway.
    """
    if not fixed:
        return needed
    return devices.by_platform(
        needed,
        jnp.asarray(always),
        cpu=lambda needed, _: needed,
        accelerator=lambda _, always: always,
    )


def unless_idle(method: Any, needed: Bool[Array, ""], propose: Callable[[T], T], nothing: T) -> T:
    """Return propose(nothing), or `nothing` where no row drafts; `Drafter.begin` catches up."""
    if not method.skips:
        return propose(nothing)
    calls = runs(method.policy.fixed, needed, True)
    # Only results that are read may go through the conditional: beside others XLA copies caches.
    return jax.lax.cond(calls, propose, lambda nothing: nothing, nothing)


def narrowed(
    method: Any,
    needed: Int[Array, ""],
    judge: Callable[[State, Any], tuple[T, State]],
    state: State,
    drafts: Any,
) -> tuple[T, State]:
    """Run judge(state, drafts) in the narrowest pass that holds all positions needed.

    Entries beyond its width are 0 and cost nothing. A narrower pass leaves stale slots in the
    caches; they lie beyond every query, as after a rejection.

    Args:
      method: `passes` and `slots` set the widths of the compiled passes.
      needed: number of positions, from the first, that some row reads.
      judge: runs one pass of the target. It may change `cache`, `drafter` and `target_finite` of
        the state.
      drafts: `drafts.within(width)` is what a pass of this width verifies.
    """
    each = widths(method, len(state.done))
    chosen = [
        ((narrower < needed) & (needed <= width), _within(judge, width))
        for narrower, width in zip([0, *each[:-1]], each, strict=True)
    ]
    return _one_of(chosen, state, drafts)


def _within(judge: Callable[[State, Any], Any], width: int) -> Callable[[State, Any], Any]:
    return lambda state, drafts: judge(state, drafts.within(width))


def widths(method: Any, rows: int) -> list[int]:
    """Positions of each row in the compiled passes, ascending: a row's share of `method.passes`."""
    each = {-(-size // rows) for size in method.passes}
    return [*sorted(width for width in each if width < method.slots), method.slots]


def verified(
    method: Any, judge: Callable[..., tuple[T, State]], state: State, drafts: Drafts
) -> tuple[T, State]:
    """Run judge(state, drafts) in the smallest compiled pass that holds a chain's drafted tokens.

    If the policy decides by slot, it is packed.
    """
    if method.passes and by_slot(method.policy):
        return packed(method, judge, state, drafts)
    return narrowed(method, jnp.max(drafts.length) + 1, judge, state, drafts)


def packed(
    method: Any, judge: Callable[..., tuple[T, State]], state: State, drafts: Drafts
) -> tuple[T, State]:
    """Run judge(state, drafts) over few positions of all rows: those with a token.

    Slots of the caches whose positions are left out are stale, as after a rejection. Without drafts
    one position of each row is run, as in a step of plain decoding. A pass over all positions of
    the batch has no packing.
    """
    whole = len(state.done) * method.slots
    each = sizes(method, len(state.done))

    def positions(state, drafts):
        return jnp.where(state.done, 0, drafts.length + 1)

    def run(size):
        # The lengths depend on the turn of the loop, so the packing does too.
        def once(state, drafts):
            first = partial(Packing.first, positions(state, drafts), method.slots)
            return judge(state, drafts._replace(packing=None if size == whole else first(size)))

        return once

    none, needed = jnp.max(drafts.length) == 0, jnp.sum(positions(state, drafts))
    chosen = [(none, _within(judge, 1))]
    chosen += [
        (~none & (smaller < needed) & (needed <= size), run(size))
        for smaller, size in zip([0, *each[:-1]], each, strict=True)
    ]
    return _one_of(chosen, state, drafts)


def sizes(method: Any, rows: int) -> list[int]:
    """Positions of the packed passes of a batch, ascending, all its positions last; [] if none."""
    whole = rows * method.slots
    some = sorted({size for size in method.passes if size < whole})
    return [*some, whole] if method.passes else []


def scored(
    method: Any, tokens: Int[Array, "B K"], call: Call, state: State, context: Context
) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], State]:
    """Run the target at the last known token and the drafted ones: log-probabilities and hidden
    states. Entries of positions that the pass leaves out are arbitrary."""
    bare = call.packing is None and call.layout is None  # a model of your own may know no `Call`
    place = call.start if bare else call
    hidden, cache = method.target(tokens, place, context, state.cache)
    logprobs = method.rule.target_distribution(method.target.logits(hidden), method.sampling)
    logprobs, hidden = call.unpack(logprobs), call.unpack(hidden)
    finite = state.target_finite & is_finite(logprobs, ~state.done)
    return logprobs, hidden, state.replace(cache=cache, target_finite=finite)


def _one_of(
    chosen: Sequence[tuple[Array, Callable[[State, Any], tuple[T, State]]]],
    state: State,
    drafts: Any,
) -> tuple[T, State]:
    """Run the one pass whose condition is true; the last one has the largest results."""
    if len(chosen) == 1:
        return chosen[0][1](state, drafts)

    def run(judge, turn, carried):
        # `turn` is always 0. Whatever is read depends on it; otherwise XLA hoists the work of every
        # pass out of its loop.
        cache, drafter = carried
        length, rounds = state.length + turn, state.rounds + turn
        now = state.replace(length=length, rounds=rounds, cache=cache, drafter=drafter)
        found, after = judge(now, _plus(turn, drafts))
        return (found, after.target_finite), (after.cache, after.drafter)

    # A loop of zero or one turns for each pass: `lax.switch` would copy the caches.
    carried = state.cache, state.drafter
    shapes = jax.eval_shape(partial(run, chosen[-1][1], 0), carried)[0]
    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), carried
    for fits, judge in chosen:

        def once(turn, carry, judge=judge):
            found, carried = run(judge, turn, carry[1])
            return jax.tree.map(_padded, found, shapes), carried

        carry = jax.lax.fori_loop(0, fits.astype(jnp.int32), once, carry)
    (found, finite), (cache, drafter) = carry
    return found, state.replace(cache=cache, drafter=drafter, target_finite=finite)


def _plus(turn: Array | int, block: Any) -> Any:
    """The block with `turn` added to its integers."""
    return jax.tree.map(lambda x: x + turn if jnp.issubdtype(x.dtype, jnp.integer) else x, block)


def _padded(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Pad each axis with zeros to its length in `like`."""
    if x.shape == like.shape:
        return x
    return jnp.pad(x, [(0, long - short) for short, long in zip(x.shape, like.shape, strict=True)])
