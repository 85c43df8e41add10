"""Rollouts: both models' distributions along outputs of the target, and behind rejected tokens.

They suffice to replay any draft-length policy (`replay.py`). A round whose drafts were all accepted
so far stands on the output itself. Given the output, its token y was accepted with probability
min(1, draft(y)/target(y)). Otherwise the token drafted in its place is a draw from
norm(max(0, draft − target)), and further drafts follow that token. So one rollout is recorded for
each position, whose first token is rejected there; no other prefix is ever drafted from. A run
drafts over a position at most once, so one rollout is enough.

The drafts of a drafter that `guesses` depend on where the round began. So a whole round is recorded
from each position, and the number of its accepted tokens is settled in recording: tokens of the
output first, then a rejected one, and what follows it. Rounds of a run begin at different
positions, and each has its own draws.

The rollout after the last token is what is drafted behind an EOS, before the round is cut there.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import sampling as smp
from specjax import speculative
from specjax.decoding import building
from specjax.decoding.outputs import check_finite
from specjax.defaults import BATCH_SIZE
from specjax.dice import Dice
from specjax.drafters.abilities import guesses, learns
from specjax.drafters.base import Drafter, block_at
from specjax.measure.along import along, batches
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rules import at_tokens, residual
from specjax.sampling import Purpose, Sampling
from specjax.settings import Drafting
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.support import files, npz


class Rollouts(NamedTuple):
    """Rollouts of G tokens along N outputs, the longest of T − 1 tokens.

    An output has one rollout for each position and one behind its last token. Distributions are as
    sampled, beliefs as policies see them; float32.
    """

    input_index: Int[Array, " N"]
    emitted: Int[Array, " N"]  # tokens of the output
    budget: Int[Array, " N"]  # tokens it might have had
    tokens: Int[Array, "N T"]  # of the output
    own_target: Float[Array, "N T"]  # log-probabilities of these tokens
    own_draft: Float[Array, "N T"]  # log-probabilities by the drafter; −inf beyond the output
    own_belief_logprob: Float[Array, "N T"]  # of these tokens in the drafter's belief
    length: Int[Array, "N T"]  # tokens of the rollout; fewer than G where the drafter ended it
    drafts: Int[Array, "N T G"]
    target: Float[Array, "N T G"]  # log-probabilities of the drafted tokens
    draft: Float[Array, "N T G"]
    belief_logprob: Float[Array, "N T G"]
    overlap: Float[Array, "N T G"]  # Σ min(target, draft)
    entropy: Float[Array, "N T G"]  # entropy of the belief, in nats
    top1: Float[Array, "N T G"]  # largest probability of the belief
    target_entropy: Float[Array, "N T G"]  # entropy of the target's distribution, in nats
    hidden: Float[Array, "N T G E"]  # the drafter's hidden states at these distributions; or E = 0
    accepted: Int[Array, "N T"]  # tokens of the rollout, which is a whole round; −1: not settled,
    # and it is what follows where the output's own token is not accepted

    @property
    def gamma_max(self) -> int:
        """G, the longest draft."""
        return self.drafts.shape[2]

    @property
    def counts_alone(self) -> bool:
        """Whether only acceptance is known, and no belief of the drafter (`counts.py`)."""
        return self.entropy.shape[2] == 0

    @property
    def acceptance(self) -> Float[Array, "N T"]:
        """Chance that the output's own token is accepted in a round that begins here and drafts.

        Unless the drafter `guesses`, it holds wherever a token is drafted.
        """
        return _chance(self.own_draft, self.own_target)


def _chance(draft: Float[Array, "*batch"], target: Float[Array, "*batch"]) -> Array:
    """Compute the chance of acceptance, by log-probabilities of a token of the output."""
    floor = jnp.finfo(jnp.float32).min  # passes over one and many positions may round apart
    return jnp.exp(jnp.minimum(draft - jnp.maximum(target, floor), 0.0))


def acceptance_point(keys: Key[Array, " N"], position: Int[Array, " N"]) -> Float[Array, " N"]:
    """Draw each row's threshold: its token there is accepted if its chance is above."""
    return smp.uniform(smp.fold(keys, position, Purpose.ACCEPT))


class Noted(NamedTuple):
    """Observations of a `Recorder` in a round."""

    own: Int[Array, " B"]  # the output's own token where the round begins
    own_belief_logprob: Float[Array, "B G"]
    entropy: Float[Array, "B G"]
    top1: Float[Array, "B G"]
    hidden: Float[Array, "B G E"]


@pytree
class Recorder(Policy):
    """Drafts γ_max tokens, and records what policies observe.

    If not `judged`, the target does not read what is drafted behind a rejected token, and is taken
    to agree with the draft there. Rounds are the same, unless a policy learns from such tokens.
    """

    fixed = True
    hidden: bool = dataclasses.field(default=False, metadata={"static": True})  # record these too
    judged: bool = dataclasses.field(default=True, metadata={"static": True})

    def init(self, keys, gamma_max):
        return _nothing(jnp.zeros(keys.shape, jnp.int32), gamma_max, 0)

    def keep_drafting(self, state, seen):
        def put(slots, now):
            return jax.lax.dynamic_update_index_in_dim(slots, now.astype(jnp.float32), seen.slot, 1)

        own = jnp.take_along_axis(seen.belief_logprobs, state.own[:, None], axis=1)[:, 0]
        now = own, seen.entropy, seen.top1, seen.hidden[:, : state.hidden.shape[2]]
        return Noted(state.own, *map(put, state[1:], now)), seen.drafting


class Rejected(Dice):
    """Drafts accepted tokens, then one that the target would reject, and then as the loop does."""

    def __init__(
        self, own: Int[Array, "B G"], end: Int[Array, " B"], target_logprobs: Float[Array, "B V"]
    ):
        self.own = own  # tokens of the output
        self.end, self.target_logprobs = end, target_logprobs  # the slot where acceptance ends

    def draft(self, state, slot, logprobs, best):
        left = jnp.log(residual(jnp.exp(logprobs), jnp.exp(self.target_logprobs)))
        logprobs = jnp.where((slot == self.end)[:, None], left, logprobs)
        own = jax.lax.dynamic_index_in_dim(self.own, slot, 1, keepdims=False)
        return jnp.where(slot < self.end, own, super().draft(state, slot, logprobs, best))


@jax.jit
def roll_out(
    method: Speculative,
    contexts: Contexts,
    state: State,
    input_index: Int[Array, " B"],
    outputs: Int[Array, "B T"],
    emitted: Int[Array, " B"],
) -> tuple[Rollouts, State]:
    """Record rollouts from every position of each row's output.

    Args:
      method: with a `Recorder` as its policy.
      contexts, state: from `loop.start`, with the budget that the outputs had.
      outputs: the target's, without the prompt; arbitrary beyond `emitted` < T.

    Returns:
      Rollouts, arbitrary beyond the recorded positions; and the state, with its flags down if a
      model's logits were not finite.
    """
    recorder = method.policy
    assert isinstance(recorder, Recorder)
    first, rule, gamma_max = state.length, method.rule, method.gamma_max
    known = state.tokens, first, contexts.drafter, state.drafter
    width = jax.eval_shape(method.drafter.begin, *known)[0].shape[1] if recorder.hidden else 0

    def from_position(state, hidden):
        own = block_at(state.tokens, state.length, gamma_max)
        ended = state.length == first + emitted
        start = state.replace(
            limit=state.length + gamma_max + 1,
            done=jnp.zeros_like(ended),
            rounds=state.length - first,  # noise of its own for each position
            policy=_nothing(own[:, 0], gamma_max, width),
        )
        read = block_at(hidden, state.length - 1, gamma_max if guesses(method.drafter) else 1)
        target = rule.target_distribution(method.target.logits(read), method.sampling)
        distribution = target[:, 0]
        accepted = jnp.zeros_like(emitted)
        if guesses(method.drafter):
            accepted = _accepted(method, contexts, start, own, target, emitted)
            rejected = jnp.minimum(accepted, gamma_max - 1)
            distribution = block_at(target, rejected, 1)[:, 0]
        # Behind the output nothing is rejected, and drafts are ordinary draws.
        behind = start.rounds + accepted >= emitted
        dice = Rejected(own, accepted, jnp.where(behind[:, None], -jnp.inf, distribution))
        drafts, after = speculative.draft(method, contexts.drafter, start, dice)
        noted = after.policy
        distributions = jnp.concatenate([target[:, :1], drafts.logprobs[:, 1:]], axis=1)
        if recorder.judged or guesses(method.drafter):
            logprobs, _, after = speculative.verify(method, contexts.target, after, drafts)
            distributions = logprobs[:, :gamma_max]
        own_draft = at_tokens(drafts.logprobs[:, :1], own[:, :1])[:, 0]
        found = {
            "tokens": own[:, 0],
            "own_target": at_tokens(target[:, :1], own[:, :1])[:, 0],
            "own_draft": jnp.where(ended, -jnp.inf, own_draft),
            "own_belief_logprob": noted.own_belief_logprob[:, 0],
            "length": drafts.length,
            "drafts": drafts.tokens,
            "target": at_tokens(distributions, drafts.tokens),
            "draft": at_tokens(drafts.logprobs, drafts.tokens),
            "belief_logprob": drafts.belief_logprob,
            "overlap": rule.acceptance(distributions, drafts.logprobs),
            "entropy": noted.entropy,
            "top1": noted.top1,
            "target_entropy": smp.entropy(distributions),
            "hidden": noted.hidden,
            "accepted": accepted if guesses(method.drafter) else jnp.full_like(accepted, -1),
        }
        return after, found

    after, found = along(method, contexts, state, outputs, emitted, from_position)
    found = {n: x if x.dtype == jnp.int32 else x.astype(jnp.float32) for n, x in found.items()}
    return Rollouts(input_index, emitted, budget=state.limit - first, **found), after


def _accepted(method, contexts, start, own, target, emitted) -> Int[Array, " B"]:
    """Count accepted tokens, as if the whole output were drafted; settled as in `replay`."""
    everything = Rejected(own, jnp.full_like(emitted, method.gamma_max), target[:, 0])
    drafts, _ = speculative.draft(method, contexts.drafter, start, everything)
    chance = _chance(at_tokens(drafts.logprobs, own), at_tokens(target, own))
    position = start.rounds[:, None] + jnp.arange(method.gamma_max, dtype=jnp.int32)[None, :]
    point = jax.vmap(acceptance_point, (None, 1), 1)(start.keys, position)
    there = position < jnp.minimum(emitted, start.rounds + drafts.length)[:, None]
    kept = (point < chance) & there
    return jnp.sum(jnp.cumprod(kept, axis=1), axis=1, dtype=jnp.int32)


def _nothing(own, gamma_max, width) -> Noted:
    slots = jnp.zeros((*own.shape, gamma_max), jnp.float32)
    return Noted(own, slots, slots, slots, jnp.zeros((*slots.shape, width), jnp.float32))


def record(
    target: Checkpoint,
    draft: Checkpoint | Drafter,
    texts: Sequence[str],
    outputs: Sequence[Sequence[int]],
    *,
    gamma_max: int,
    sampling: Sampling,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    recorder: Recorder | None = None,
) -> Rollouts:
    """Record rollouts of `gamma_max` tokens along the target's outputs, one for each text.

    Args:
      max_new_tokens: the budget that the outputs had.
      key: key of the rollouts' randomness.
      recorder: what is recorded beside the rest; default: `Recorder()`.

    Raises:
      ValueError: every input or output is empty, or the drafter learns from round to round.
      FloatingPointError: logits that are not finite; the message names the model.
    """
    drafting = Drafting(gamma_max, recorder or Recorder())
    method: Any = building.with_draft(target, draft, drafting, sampling)
    names = target.name, getattr(draft, "name", type(draft).__name__)
    if learns(method.drafter):
        raise ValueError(
            f"The drafter {names[1]} learns from round to round, and no rounds come before a "
            "rollout: record its drafters one by one."
        )
    parts = []
    run = method, target, texts, outputs, batch_size, max_source_len
    for batch in batches(*run, rounds=True, max_new_tokens=max_new_tokens, key=key):
        found, state = roll_out(method, *batch[1:])
        check_finite(state, names)
        parts.append(_flat(found, batch.live))
    return _unflat({name: np.concatenate([p[name] for p in parts]) for name in Rollouts._fields})


def _in_file(name: str) -> str:
    """A field's name in files, which keep the names that older versions wrote."""
    return name.replace("belief_logprob", "confidence")


def save(path: str | os.PathLike, rollouts: Rollouts) -> None:
    """Write an npz file without padding; hidden states in float16. No file is left half-written."""
    flat = _flat(rollouts, len(rollouts.emitted))
    flat["hidden"] = flat["hidden"].astype(np.float16)
    with files.replacing(pathlib.Path(path)) as part, part.open("wb") as file:
        np.savez_compressed(file, **{_in_file(n): x for n, x in flat.items()})  # type: ignore[arg-type]


def load(path: str | os.PathLike) -> Rollouts:
    """Read a file of `save`.

    Raises:
      ValueError: not such a file, or a damaged one.
    """
    way_out = "Make it by experiments.trace."
    found = npz.read_npz(path, _RANKS, "rollouts", way_out)
    flat = {name: found[_in_file(name)] for name in Rollouts._fields}
    emitted = flat["emitted"]
    counts = emitted.dtype.kind in "iu" and len(emitted) > 0 and emitted.min() >= 0
    places = sum(emitted.tolist()) + len(emitted)  # Python's numbers do not wrap around
    sizes = {len(x) - (len(emitted) if name in _BY_OUTPUT else places) for name, x in flat.items()}
    lengths = {x.shape[1] for x in flat.values() if x.ndim > 1}
    if not counts or sizes != {0} or len(lengths) != 1:
        raise ValueError(f"{path}: its arrays do not fit together. {way_out}")
    cells = len(emitted) * (int(emitted.max()) + 1)
    padded = cells * sum(x[:1].nbytes for name, x in flat.items() if name not in _BY_OUTPUT)
    most = npz.SMALL_NPZ + PADDED_RATIO * os.path.getsize(path)
    if padded > most:
        raise ValueError(
            f"{path}: its outputs take {padded:,} bytes at the length of the longest, and "
            f"those of a file of its size at most {most:,}. {way_out}"
        )
    return _unflat({n: x.astype(np.float32) if x.dtype.kind == "f" else x for n, x in flat.items()})


# Padded bytes per byte of a file: it is packed to a third, and one output is 20 times the mean.
PADDED_RATIO = 64
_BY_OUTPUT = ("input_index", "emitted", "budget")
_BY_TOKEN = ("tokens", "own_target", "own_draft", "own_belief_logprob", "length", "accepted")
_RANKS = {  # number of axes in a file, where outputs and positions are one axis
    **dict.fromkeys(map(_in_file, Rollouts._fields), 2),
    **dict.fromkeys(map(_in_file, (*_BY_OUTPUT, *_BY_TOKEN)), 1),
    "hidden": 3,
}


def _flat(rollouts: Rollouts, rows: int) -> dict[str, np.ndarray]:
    """Flatten the recorded positions of the first `rows` rows: (N, T, …) → (P, …)."""
    fields = {name: np.asarray(x)[:rows] for name, x in rollouts._asdict().items()}
    there = _recorded(fields["emitted"], fields["tokens"].shape[1])
    return {name: x if name in _BY_OUTPUT else x[there] for name, x in fields.items()}


def _unflat(flat: dict[str, np.ndarray]) -> Rollouts:
    there = _recorded(flat["emitted"], int(flat["emitted"].max()) + 1)
    fields = {}
    for name, x in flat.items():
        if name not in _BY_OUTPUT:
            fields[name] = np.zeros((*there.shape, *x.shape[1:]), x.dtype)
            fields[name][there] = x
    return Rollouts(**{name: jnp.asarray(x) for name, x in {**flat, **fields}.items()})


def _recorded(emitted: np.ndarray, width: int) -> Bool[np.ndarray, "N T"]:
    """Mark the output's tokens, and one position behind them."""
    return np.arange(width)[None, :] <= emitted[:, None]
