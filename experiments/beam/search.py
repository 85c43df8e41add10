"""Beam search, plain and speculative (Leviathan et al. 2023, A.4), in one `lax.while_loop`.

A round drafts a tree of prefixes with the draft's own beam search, scores all of them in one call
of the target, and walks the target's beam search through the tree for as long as every live beam
is one of its nodes:

    draft → verify → walk

Each step of the walk is a step of plain beam search, with distributions looked up instead of
computed, so the beams are the target's whatever the draft. Plain beam search is the round without a
tree. experiments/beam/README.md defines the search and names what the appendix leaves open.

Axes beyond those of `types`: w beams (width) · u draft beams (draft_width) · N EOS ids ·
R = w + uγ nodes of the tree, the w live beams first. Rounds are written for one input and mapped
over B of them; a model sees the rows of one input as a batch.
"""

import dataclasses
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.drafters.base import started
from specjax.drafters.resizing import cut_or_pad, readable
from specjax.pytrees import pytree
from specjax.sampling import Sampling, standardize
from specjax.types import Cache, Context, Inputs, Model


@pytree
class Beam:
    """What to search with."""

    target: Model
    draft: Model | None  # None: plain beam search, γ = 0
    eos_ids: Int[Array, " N"]
    length_penalty: Array  # () float, ≥ 0; a hypothesis scores log-probability / tokens^penalty
    width: int = dataclasses.field(metadata={"static": True})  # w
    draft_width: int = dataclasses.field(metadata={"static": True})  # u
    gamma: int = dataclasses.field(metadata={"static": True})  # drafted steps a round
    nested: bool = dataclasses.field(metadata={"static": True})  # see `spread`


class Beams(struct.PyTreeNode):
    """Where the search for one input stands. In the loop, B comes first everywhere."""

    tokens: Array  # [w, T] int32, the live beams with their prompt
    scores: Array  # [w] float, their log-probabilities, never increasing; −inf: no such beam
    length: Array  # [] int32, tokens in each of them
    prompt_len: Array  # [] int32
    limit: Array  # [] int32, prompt and budget
    ended: Array  # [w, T] int32, the best finished hypotheses
    ended_scores: Array  # [w] float, normalized, never increasing; −inf: none
    ended_len: Array  # [w] int32, prompt and EOS included
    done: Array  # [] bool


class Stats(struct.PyTreeNode):
    """Counts for each input: steps = kept + target_calls."""

    target_calls: Array  # [B] int32
    steps: Array  # [B] int32, tokens by which the live beams grew
    verified: Array  # [B] int32, drafted steps within the limit
    kept: Array  # [B] int32, steps that a drafted one made possible
    evaluations: Array  # [B] int32, prefixes scored by the target: w + u · verified in each call
    kept_lengths: Array  # [B, γ+1] int32, rounds by number of kept steps


class BeamState(struct.PyTreeNode):
    """The loop's carry."""

    beams: Beams
    cache: Cache  # [B, w, …], all but the last token of each live beam
    draft_cache: Cache  # [B, w, …], as of the last round
    stats: Stats
    target_finite: Array  # [B] bool, False once logits that mattered were not finite
    draft_finite: Array  # [B] bool
    rule_sound: None = None  # beams have no rule; see `State`


class Contexts(NamedTuple):
    """What both models only read."""

    target: Context
    draft: Context


class Tree(NamedTuple):
    """The prefixes of a round. Node r is a live beam (r < w) or lies on level 1 + (r − w) // u."""

    root: Int[Array, " R"]  # the live beam that it continues
    path: Int[Array, "R G"]  # drafted tokens down to the node; arbitrary beyond its level
    parent: Int[Array, "G u"]  # by level: the node before it
    token: Int[Array, "G u"]  # by level: its last token


@partial(jax.jit, static_argnames=("width", "buffer_len"))
def search(
    target: Model,
    inputs: Inputs,
    budget: Int[Array, " B"],
    eos_ids: Int[Array, " N"],
    length_penalty: float | Array = 0.0,
    *,
    width: int,
    buffer_len: int,
) -> BeamState:
    """Plain beam search.

    Args:
      budget: new tokens allowed for each input, EOS included; 0 finishes it at once.
      length_penalty: ≥ 0; 0 compares hypotheses by log-probability.
      width: w, live beams and hypotheses kept.
      buffer_len: T ≥ prompt + budget + 1.

    Returns:
      The final state without its caches; `n_best` reads it.

    Raises:
      ValueError: width < 1 or above the vocabulary.
    """
    penalty = jnp.asarray(length_penalty)
    method = Beam(target, None, eos_ids, penalty, width, width, gamma=0, nested=True)
    return _run(method, inputs, budget, buffer_len)


@partial(jax.jit, static_argnames=("width", "draft_width", "gamma", "nested", "buffer_len"))
def speculative(
    target: Model,
    draft: Model,
    inputs: Inputs,
    budget: Int[Array, " B"],
    eos_ids: Int[Array, " N"],
    length_penalty: float | Array = 0.0,
    *,
    width: int,
    draft_width: int,
    gamma: int,
    buffer_len: int,
    nested: bool = True,
) -> BeamState:
    """Speculative beam search: the hypotheses of `search`, in the same order.

    Args:
      draft: proposes among the target's ids; those that it lacks it never drafts.
      draft_width: u ≥ w, beams of the draft.
      gamma: γ ≥ 1, drafted steps a round.
      buffer_len: T ≥ prompt + budget + γ + 1.
      nested: see `spread`; False is the appendix to the letter.

    Raises:
      ValueError: width < 1 or above the vocabulary; draft_width below width or above
        width · vocabulary; gamma < 1.
    """
    if gamma < 1:
        raise ValueError(f"gamma={gamma} must be ≥ 1; `search` is beam search without a draft.")
    if not width <= draft_width <= width * target.vocab_size:
        raise ValueError(
            f"draft_width={draft_width} must be ≥ width={width}, since all beams of the target "
            "have to be among the draft's, and ≤ width · vocabulary, the candidates of a step."
        )
    penalty = jnp.asarray(length_penalty)
    method = Beam(target, draft, eos_ids, penalty, width, draft_width, gamma, nested)
    return _run(method, inputs, budget, buffer_len)


def _run(method: Beam, inputs: Inputs, budget: Int[Array, " B"], buffer_len: int) -> BeamState:
    width, vocab_size = method.width, method.target.vocab_size
    if not 1 <= width <= vocab_size:
        raise ValueError(f"width={width} must lie in 1 … {vocab_size}, the size of the vocabulary.")
    begin = jax.vmap(partial(_start, method, buffer_len))
    contexts, state = begin(inputs, budget)
    round_ = jax.vmap(partial(step, method))

    def unfinished(state):
        finite = jnp.all(state.target_finite & state.draft_finite)
        return jnp.any(~state.beams.done) & finite

    state = jax.lax.while_loop(unfinished, lambda state: round_(contexts, state), state)
    return state.replace(cache=(), draft_cache=())


def _start(
    method: Beam, buffer_len: int, inputs: Inputs, budget: Array
) -> tuple[Contexts, BeamState]:
    """Encode and prefill one input. Its beams share the context, whose B = 1 broadcasts."""
    width, zero = method.width, jnp.int32(0)
    one = jax.tree.map(lambda x: x[None], inputs)
    context, cache = started(method.target, one, buffer_len)
    draft_context: Context = ()
    draft_cache: Cache = ()
    same = jnp.zeros((width,), jnp.int32)
    if method.draft is not None:
        source, prompt = _readable(method, one.source), _readable(method, one.prompt)
        own = one._replace(source=source, prompt=prompt)
        draft_context, draft_cache = started(method.draft, own, buffer_len)
        draft_cache = take(draft_cache, same)
    row = jnp.zeros((buffer_len,), jnp.int32).at[: inputs.prompt.shape[0]].set(inputs.prompt)
    tokens = jnp.broadcast_to(row, (width, buffer_len))
    first = jax.eval_shape(
        lambda: _distribution(
            method, method.target, method.target(row[None, :1], same[:1], context, cache)[0]
        )
    )
    none = jnp.full((width,), -jnp.inf, first.dtype)
    beams = Beams(
        tokens=tokens,
        scores=none.at[0].set(0.0),  # one beam: w equal ones would all continue alike
        length=inputs.prompt_len,
        prompt_len=inputs.prompt_len,
        limit=inputs.prompt_len + budget,
        ended=tokens,
        ended_scores=none,
        ended_len=jnp.broadcast_to(inputs.prompt_len, (width,)),
        done=budget <= 0,
    )
    stats = Stats(zero, zero, zero, zero, zero, jnp.zeros((method.gamma + 1,), jnp.int32))
    state = BeamState(
        beams, take(cache, same), draft_cache, stats, jnp.bool_(True), jnp.bool_(True)
    )
    return Contexts(context, draft_context), state


def step(method: Beam, contexts: Contexts, state: BeamState) -> BeamState:
    """One round for one input, between 1 and γ+1 steps of its search; none once it is done."""
    old, draft_cache, draft_finite = state.beams, state.draft_cache, jnp.bool_(True)
    if method.draft is None:
        tree = _bare(method)
    else:
        tree, draft_cache, draft_finite = draft(method, contexts.draft, old, draft_cache)
    logprobs, cache = verify(method, contexts.target, old, tree, state.cache)
    beams, node, target_finite = walk(method, old, tree, logprobs)
    return BeamState(
        beams=beams,
        cache=take(cache, node),
        draft_cache=take(draft_cache, tree.root[node]),
        stats=_count(method, state.stats, old, beams),
        target_finite=state.target_finite & target_finite,
        draft_finite=state.draft_finite & (draft_finite | old.done),
    )


def draft(
    method: Beam, context: Context, beams: Beams, cache: Cache
) -> tuple[Tree, Cache, Bool[Array, ""]]:
    """γ steps of the draft's beam search, from the live beams and their scores.

    The draft's first call feeds the last γ+1 tokens of each beam, all that a round can have
    added: the draft's own caches belong to beams that may not have survived.

    Returns:
      the tree, the draft's cache for the live beams, and whether its logits were finite.
    """
    model, gamma, width = cast(Model, method.draft), method.gamma, method.width
    first = jnp.maximum(beams.length - (gamma + 1), 0)
    newest = jax.lax.dynamic_slice_in_dim(beams.tokens, first, gamma + 1, axis=1)
    start = jnp.broadcast_to(first, (width,))
    hidden, cache = model(_readable(method, newest), start, context, cache)
    last = jnp.take(hidden, beams.length - 1 - first, axis=1)
    logprobs = _distribution(method, model, last)
    finite = _finite(logprobs, beams.scores)
    scores, parent, token = spread(method, beams.scores, logprobs)
    path = jnp.zeros((method.draft_width, gamma), jnp.int32).at[:, 0].set(token)

    def deeper(carry, depth):
        scores, root, path, cache, finite = carry
        newest = jnp.take(path, depth - 1, axis=1)[:, None]
        start = jnp.full_like(root, beams.length + depth - 1)
        hidden, cache = model(newest, start, context, cache)
        logprobs = _distribution(method, model, hidden[:, 0])
        finite &= _finite(logprobs, scores)
        scores, parent, token = spread(method, scores, logprobs)
        root, path = root[parent], path[parent].at[:, depth].set(token)
        node = parent + width + (depth - 1) * method.draft_width
        return (scores, root, path, take(cache, parent), finite), (node, token, root, path)

    state = scores, parent, path, take(cache, parent), finite
    last_state, levels = jax.lax.scan(deeper, state, jnp.arange(1, gamma, dtype=jnp.int32))
    parents, tokens, roots, paths = (
        jnp.concatenate([top[None], below])
        for top, below in zip((parent, token, parent, path), levels, strict=True)
    )
    bare = _bare(method)
    root = jnp.concatenate([bare.root, roots.reshape(-1)])
    path = jnp.concatenate([bare.path, paths.reshape(-1, gamma)])
    return Tree(root, path, parents, tokens), cache, last_state[-1]


def _bare(method: Beam) -> Tree:
    """The live beams alone."""
    none = jnp.zeros((0, method.draft_width), jnp.int32)
    path = jnp.zeros((method.width, method.gamma), jnp.int32)
    return Tree(jnp.arange(method.width, dtype=jnp.int32), path, none, none)


def spread(
    method: Beam, scores: Float[Array, " M"], logprobs: Float[Array, "M V"]
) -> tuple[Float[Array, " u"], Int[Array, " u"], Int[Array, " u"]]:
    """The u best continuations of M draft beams: scores, parents, tokens. EOS ends a beam.

    Nested, the w best continuations of the first w beams come first, and the best of all others
    after them, so that the draft's search of width w is part of its search of width u. In a wider
    search it need not be: more beams crowd out what fewer would have found.
    """
    vocab_size = logprobs.shape[1]
    is_eos = _is_in(jnp.arange(vocab_size, dtype=jnp.int32), method.eos_ids)
    flat = jnp.where(is_eos[None, :], -jnp.inf, scores[:, None] + logprobs).reshape(-1)
    if method.nested:
        width = method.width
        best, which = jax.lax.top_k(flat[: width * vocab_size], width)
        others, rest = jax.lax.top_k(flat.at[which].set(-jnp.inf), method.draft_width - width)
        best, which = jnp.concatenate([best, others]), jnp.concatenate([which, rest])
    else:
        best, which = jax.lax.top_k(flat, method.draft_width)
    return best, which // vocab_size, which % vocab_size


def verify(
    method: Beam, context: Context, beams: Beams, tree: Tree, cache: Cache
) -> tuple[Float[Array, "R V"], Cache]:
    """The target's distribution after every node, in one call with a row for each.

    A row starts from the cache of its live beam and feeds that beam's last token and the node's
    path, as in `speculative.verify`; only the node's own position goes through the output layer.
    """
    count = tree.root.shape[0]
    last = jnp.take(beams.tokens, beams.length - 1, axis=1)
    block = jnp.concatenate([last[tree.root][:, None], tree.path], axis=1)
    start = jnp.full((count,), beams.length - 1, jnp.int32)
    hidden, cache = method.target(block, start, context, take(cache, tree.root))
    row = np.arange(count)
    level = np.where(row < method.width, 0, 1 + (row - method.width) // method.draft_width)
    own = jnp.take_along_axis(hidden, jnp.asarray(level)[:, None, None], axis=1)[:, 0]
    return _distribution(method, method.target, own), cache


def walk(
    method: Beam, beams: Beams, tree: Tree, logprobs: Float[Array, "R V"]
) -> tuple[Beams, Int[Array, " w"], Bool[Array, ""]]:
    """Steps of the target's beam search, as long as every live beam is a node of the tree.

    The step after the last level is free: its distributions are known, and it need not be on the
    tree.

    Returns:
      the new beams; for each the node that holds all of it but its last token; and whether the
      distributions that were used are finite.
    """

    def one(carry, level):
        beams, node, before, going, finite = carry
        distribution = logprobs[node]
        finite &= _finite(distribution, beams.scores) | ~going
        new, parent, token = advance(method, beams, distribution)
        came_from = node[parent]
        found, next_node = follow(level, came_from, token)
        move = jax.tree.map(
            partial(jnp.where, going),
            (new, next_node, came_from),
            (beams, node, before),
        )
        going &= ~new.done & jnp.all(found | (new.scores == -jnp.inf))
        return (*move, going, finite), None

    width, gamma = method.width, method.gamma
    nowhere = jnp.full((1, method.draft_width), -1, jnp.int32)
    first = width + method.draft_width * jnp.arange(gamma + 1, dtype=jnp.int32)
    levels = (
        first,
        jnp.concatenate([tree.parent, nowhere]),
        jnp.concatenate([tree.token, nowhere]),
    )
    node = jnp.arange(width, dtype=jnp.int32)
    carry = beams, node, node, ~beams.done, jnp.bool_(True)
    (beams, _, node, _, finite), _ = jax.lax.scan(one, carry, levels)
    return beams, node, finite


def follow(level, parent: Int[Array, " w"], token: Int[Array, " w"]):
    """Whether each child of a node is on the next level, (w,) bool, and as which node."""
    first, parents, tokens = level
    hit = (parents[None, :] == parent[:, None]) & (tokens[None, :] == token[:, None])
    return jnp.any(hit, axis=1), first + jnp.argmax(hit, axis=1).astype(jnp.int32)


def advance(
    method: Beam, beams: Beams, logprobs: Float[Array, "w V"]
) -> tuple[Beams, Int[Array, " w"], Int[Array, " w"]]:
    """One step of beam search: the new beams, and the parent and last token of each live one.

    Of all w·V continuations, those among the w best that end, by EOS or at the limit, compete
    for the w finished places, by log-probability / tokens^penalty. The w best that are not EOS
    live on. Equals are in the order of their indices (beam, then token), and a finished hypothesis
    stays before a later equal.
    """
    width, vocab_size = logprobs.shape
    flat = (beams.scores[:, None] + logprobs).reshape(-1)
    # Each beam has at most N continuations by EOS, so w others are among these, if there are w.
    count = min((1 + method.eos_ids.shape[0]) * width, flat.shape[0])
    scores, which = jax.lax.top_k(flat, count)
    parent, token = which // vocab_size, which % vocab_size
    is_eos = _is_in(token, method.eos_ids)
    length = beams.length + 1

    extended = beams.tokens[parent]
    extended = jax.lax.dynamic_update_slice_in_dim(extended, token[:, None], beams.length, axis=1)

    ends = is_eos[:width] | (length >= beams.limit)
    new_tokens = (length - beams.prompt_len).astype(scores.dtype)
    normalized = scores[:width] / new_tokens ** method.length_penalty.astype(scores.dtype)
    pool = jnp.concatenate([beams.ended_scores, jnp.where(ends, normalized, -jnp.inf)])
    ended_scores, place = jax.lax.top_k(pool, width)
    ended = jnp.concatenate([beams.ended, extended[:width]])[place]
    ended_len = jnp.concatenate([beams.ended_len, jnp.full((width,), length)])[place]

    live_scores, place = jax.lax.top_k(jnp.where(is_eos, -jnp.inf, scores), width)
    new = beams.replace(
        tokens=extended[place],
        scores=live_scores,
        length=length,
        ended=ended,
        ended_scores=ended_scores,
        ended_len=ended_len,
        done=(length >= beams.limit) | ~_hope(method, live_scores, ended_scores, beams),
    )
    return new, parent[place], token[place]


def _hope(method: Beam, live_scores: Array, ended_scores: Array, beams: Beams) -> Bool[Array, ""]:
    """Whether a live beam could still beat the worst of w finished hypotheses.

    Log-probabilities only fall, and the penalty forgives most at the limit: stopping here changes
    no output. Without w finished ones every live beam counts; without live beams it is False.
    """
    most = (beams.limit - beams.prompt_len).astype(live_scores.dtype)
    best = live_scores[0] / most ** method.length_penalty.astype(live_scores.dtype)
    return best > ended_scores[-1]


def take(cache: Cache, rows: Int[Array, " M"]) -> Cache:
    """The cache of those rows."""
    return jax.tree.map(lambda x: x[rows], cache)


def _distribution(
    method: Beam, model: Model, hidden: Float[Array, "*batch E"]
) -> Float[Array, "*batch V"]:
    """Log-probabilities of either model, over the target's ids."""
    return standardize(cut_or_pad(model.logits(hidden), method.target.vocab_size), Sampling(1.0))


def _readable(method: Beam, ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Ids of the target as the draft can read them."""
    size = cast(Model, method.draft).vocab_size
    return readable(ids, size) if size < method.target.vocab_size else ids


def _finite(logprobs: Float[Array, "M V"], scores: Float[Array, " M"]) -> Bool[Array, ""]:
    """Whether the distributions of all beams that exist are distributions: `standardize` spreads
    NaN over a row."""
    return ~jnp.any(jnp.isnan(logprobs[:, 0]) & (scores > -jnp.inf))


def _is_in(token: Int[Array, " M"], ids: Int[Array, " N"]) -> Bool[Array, " M"]:
    return jnp.any(token[:, None] == ids[None, :], axis=1)


def _count(method: Beam, stats: Stats, old: Beams, new: Beams) -> Stats:
    """Add a round. Drafted steps past the limit are not counted, nor the rounds of done inputs."""
    alive = (~old.done).astype(jnp.int32)
    steps = new.length - old.length
    verified = alive * jnp.minimum(method.gamma, old.limit - old.length - 1)
    kept = jnp.maximum(steps - 1, 0)
    slot = jnp.arange(method.gamma + 1, dtype=jnp.int32)
    return Stats(
        target_calls=stats.target_calls + alive,
        steps=stats.steps + steps,
        verified=stats.verified + verified,
        kept=stats.kept + kept,
        evaluations=stats.evaluations + alive * method.width + method.draft_width * verified,
        kept_lengths=stats.kept_lengths + alive * (slot == kept).astype(jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One of an input's w best."""

    tokens: list[int]  # without the prompt, EOS included
    score: float  # log-probability / tokens^penalty
    text: str = ""  # without special tokens


def n_best(state: BeamState) -> list[list[Hypothesis]]:
    """Each input's hypotheses, best first, without texts."""
    beams = jax.device_get(state.beams)
    return [
        [
            Hypothesis(tokens[start:end].tolist(), float(score))
            for tokens, score, end in zip(*rows, strict=True)
            if score > -np.inf
        ]
        for start, *rows in zip(
            beams.prompt_len, beams.ended, beams.ended_scores, beams.ended_len, strict=True
        )
    ]
