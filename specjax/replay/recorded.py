"""A target and a drafter from recorded rollouts, which the real loop decodes with.

Rows of a batch are outputs of a `Recording`. The target's call, the drafter's proposals and what
policies observe are looked up where the row stands. A row's drafts follow the output up to the
first token that is not accepted, and then the rollout recorded there (`rollouts.py`). For a drafter
that `guesses`, the whole round was recorded where it begins.

A recording holds no distributions over the vocabulary. In their place stand a few numbers about the
one token that is drafted there, which the rule `Settled` reads. Tokens are `TEXT`, or `END`, the
EOS.
"""

import dataclasses
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import speculative
from specjax.contracts import watched
from specjax.dice import Dice
from specjax.drafters.base import Drafter, Proposal
from specjax.policies import Policy, Round
from specjax.pytrees import pytree
from specjax.replay.rollouts import Rollouts, acceptance_point
from specjax.rules.base import AcceptanceRule, at_position
from specjax.sampling import Greedy
from specjax.speculative import Speculative
from specjax.types import Inputs, Model

TEXT, END = 1, 2  # token ids; the entries of 0 are 0, since the loop checks them for NaN
OWN = {"drafts": "tokens"} | {n: f"own_{n}" for n in ("target", "draft", "belief_logprob")}


def first_rejections(rollouts: Rollouts, keys: Key[Array, " N"]) -> Int[Array, "N T"]:
    """Find for each position the next one where a drafted token is rejected.

    If the longest draft has no rejected token, any later position may be returned.
    """
    count = rollouts.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), rollouts.tokens.shape)
    kept = jax.vmap(acceptance_point, (None, 1), 1)(keys, positions) < rollouts.acceptance
    here = jnp.where(kept, count - 1, positions)
    found = jax.lax.cummin(here, axis=1, reverse=True)
    settled = jnp.minimum(positions + rollouts.accepted, count - 1)
    return jnp.where(rollouts.accepted < 0, found, settled)


class Place(NamedTuple):
    """Where a drafted token was recorded."""

    output: Int[Array, "*batch"]
    where: Int[Array, "*batch"]  # the rollout, by the position at which it begins
    slot: Int[Array, "*batch"]  # the slot in the rollout
    on_output: Bool[Array, "*batch"]  # whether it is the output's own token, recorded separately
    ends: Bool[Array, "*batch"]  # whether the output's own token is the EOS


class Row(NamedTuple):
    """Where a row stands when a round begins."""

    output: Int[Array, "*batch"]
    begin: Int[Array, "*batch"]  # tokens of the output so far
    rejected: Int[Array, "*batch"]  # the first position where a drafted token is rejected
    whole: Bool[Array, "*batch"]  # whether the whole round was recorded where it begins
    end: Int[Array, "*batch"]  # the position of the EOS; −1: none

    def place(self, slot: Array | int) -> Place:
        """Locate the token at a slot of the draft."""
        position = self.begin + slot
        where = jnp.where(self.whole, self.begin, jnp.minimum(position, self.rejected))
        on_output = (position < self.rejected) & ~self.whole
        return Place(self.output, where, position - where, on_output, position == self.end)


class Recording(NamedTuple):
    """Rollouts of N outputs, with settled chances of acceptance."""

    rollouts: Rollouts
    rejections: Int[Array, "N T"]  # see `first_rejections`

    @classmethod
    def settled(cls, rollouts: Rollouts, keys: Key[Array, " N"]) -> "Recording":
        """Settle the chances of acceptance by one key for each output."""
        return cls(rollouts, first_rejections(rollouts, keys))

    def row(self, output: Array, begin: Array) -> Row:
        """Rows that stand behind `begin` tokens of their outputs."""
        emitted, budget = self.rollouts.emitted[output], self.rollouts.budget[output]
        whole = self.rollouts.accepted[output, begin] >= 0
        end = jnp.where(emitted < budget, emitted - 1, -1)
        return Row(output, begin, self.rejections[output, begin], whole, end)

    def look_up(self, name: str, place: Place) -> Array:
        """A field of (N, T, G, …) at each place; what belongs to the output's tokens where due."""
        found = getattr(self.rollouts, name)[place.output, place.where, place.slot]
        if name not in OWN:
            return found
        own = getattr(self.rollouts, OWN[name])[place.output, place.where]
        return jnp.where(place.on_output, own, found)

    def silent(self, place: Place) -> Bool[Array, "*batch"]:
        """Whether the drafter proposed nothing at a place."""
        return place.slot >= self.rollouts.length[place.output, place.where]


def by_id(logprob: Float[Array, "*batch"]) -> Float[Array, "*batch 3"]:
    """The log-probability of a drafted token as either id."""
    return jnp.stack([jnp.zeros_like(logprob), logprob, logprob], axis=-1)


@pytree
class RecordedTarget(Model):
    """The target of recorded outputs; its hidden states and logits are what `Settled` reads."""

    recording: Recording
    vocab_size = 3

    def start(self, inputs, buffer_len):
        return inputs.source[:, 0], ()

    def __call__(self, tokens, start, context, cache):
        row = jax.tree.map(lambda x: x[:, None], self.recording.row(context, start))
        slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        place = row.place(slots[:, :-1])
        target, overlap = (
            jnp.pad(self.recording.look_up(name, place), ((0, 0), (0, 1)))
            for name in ("target", "overlap")
        )
        accepted, ends = row.rejected - row.begin + 0 * slots, row.begin + slots == row.end
        columns = overlap, accepted.astype(jnp.float32), ends.astype(jnp.float32)
        return jnp.concatenate([by_id(target), jnp.stack(columns, axis=-1)], axis=-1), cache

    def logits(self, hidden):
        return hidden


@pytree
class Settled(AcceptanceRule):
    """The rule of a recording: it accepts the recorded number of tokens, and has no other outcome.

    Beside log-probabilities `target_logprobs` holds, for the token drafted there, the overlap of
    both models' distributions, the number of tokens that this round accepts at most, and whether
    the output's own token at this position is the EOS.
    """

    exact = reveals_shorter = True

    def target_distribution(self, logits, sampling):
        return logits

    def acceptance(self, target_logprobs, draft_logprobs):
        return target_logprobs[..., 3]

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        accepted = jnp.minimum(target_logprobs[:, 0, 4].astype(jnp.int32), draft_len)
        return jax.nn.one_hot(accepted, target_logprobs.shape[1], dtype=jnp.float32)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        ends = at_position(target_logprobs[..., 5:], accepted)[:, 0]  # all else is left out
        return jnp.stack([jnp.zeros_like(ends), 1 - ends, ends], axis=1)


class SettledDice(Dice):
    """Dice of the one outcome that `Settled` has."""

    def draft(self, state, slot, logprobs, best):
        return best

    def accepted(self, state, stop):
        count = jnp.arange(stop.shape[1], dtype=jnp.float32)[None, :]
        return jnp.sum(stop * count, axis=1).astype(jnp.int32)

    def next(self, state, probs):
        return TEXT + (probs[:, END] > 0).astype(jnp.int32)


class Standing(NamedTuple):
    """The state of a recorded drafter."""

    row: Row
    calls: Int[Array, ""]  # of the drafter, in this round
    counts: Any  # of all rounds


@pytree
class RecordedDrafter(Drafter):
    """The drafter of a recording. A subclass counts what it wants to know of each round."""

    recording: Recording
    vocab_size = 3

    def counts(self, rows: int) -> Any:
        """Counts before the first round; arrays without a row axis go on when rows are admitted."""
        raise NotImplementedError

    def count(self, round_: Round, state: Standing) -> Any:
        """The counts after a round."""
        raise NotImplementedError

    def start(self, inputs, buffer_len):
        output = inputs.source[:, 0]
        row = self.recording.row(output, 0 * output)
        return output, Standing(row, jnp.int32(0), self.counts(len(output)))

    def begin(self, tokens, length, context, state, *, lags=True):
        row = self.recording.row(context, length - 1)
        return row.place(0), state._replace(row=row, calls=state.calls + 1)

    def extend(self, token, position, context, state):
        place = state.row.place(position - state.row.begin)
        return place, state._replace(calls=state.calls + 1)

    def logits(self, hidden):
        return by_id(self.recording.look_up("draft", hidden))

    def learn(self, tokens, length, round_, judge, context, state):
        counts = self.count(round_, state._replace(row=self.recording.row(context, length - 1)))
        return state._replace(calls=0 * state.calls, counts=counts)


class Unknown:
    """A value that was not recorded: whatever is done with it raises ValueError."""

    def __init__(self, policy: Policy, name: str):
        self._words = (
            f"{type(policy).__name__} reads {name}, and this record holds counts alone: replay it "
            "on a trace of experiments.trace."
        )

    def refuse(self, *_: Any) -> NoReturn:
        """Raise the error."""
        raise ValueError(self._words)

    __getattr__ = __getitem__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse


@dataclasses.dataclass(frozen=True)
class Remembered:
    """An `Observation` from rollouts, without distributions over the vocabulary."""

    slot: Int[Array, ""]
    drafting: Bool[Array, " B"]
    recording: Recording
    place: Place
    policy: Policy

    def __getattr__(self, name: str) -> Array:
        """Look up `entropy`, `top1` or `hidden`, float32; ValueError if it was not recorded."""
        if self.recording.rollouts.counts_alone:
            Unknown(self.policy, name).refuse()
        if name in ("draft_logprobs", "belief_logprobs"):
            raise ValueError(
                "This policy reads distributions over the whole vocabulary, which a trace does not "
                "hold; it holds their entropy and top1."
            )
        if name == "hidden" and self.recording.rollouts.hidden.shape[-1] == 0:
            raise ValueError(
                "This policy reads the drafter's hidden states, which were not recorded: make the "
                "trace with --hidden."
            )
        return self.recording.look_up(name, self.place)


class Remembrance(Proposal):
    """A proposal from rollouts. Its entropy, which only a log would read, is 0."""

    @property
    def entropy(self):
        return jnp.zeros(self.best.shape, jnp.float32)


@pytree
class Recorded(Speculative):
    """The method that decodes a recording: `loop.decode` runs its rounds."""

    @classmethod
    def of(
        cls,
        drafter: RecordedDrafter,
        policy: Policy,
        sizes: tuple[int, ...] = (),
    ) -> "Recorded":
        """The method of a drafter's recording; nothing is left to chance."""
        return cls(
            RecordedTarget(drafter.recording), drafter, Settled(), policy, Greedy(),
            jnp.int32([END]), drafter.recording.rollouts.gamma_max, sizes,
        )  # fmt: skip

    @property
    def recording(self) -> Recording:
        """What is decoded."""
        return cast(RecordedDrafter, self.drafter).recording

    def proposal(self, hidden: Any) -> Proposal:
        recording = self.recording
        logprobs = self.drafter.logits(hidden), by_id(recording.look_up("belief_logprob", hidden))
        best = TEXT + hidden.ends.astype(jnp.int32)
        return Remembrance(~recording.silent(hidden), *logprobs, best)

    def observation(self, slot, drafting, proposed, hidden):
        return Remembered(slot, drafting, self.recording, hidden, self.policy)

    def step(self, context, state, dice=None):
        """Run one round; policies see no distributions, which were not recorded."""
        self, dice = watched(self, len(state.done)), dice or SettledDice()
        drafts, state = speculative.draft(self, context.drafter, state, dice)
        verdict, state = speculative.judge(self, context, dice, state, drafts)
        unseen: dict[str, Any] = dict.fromkeys(("target_logprobs", "hidden", "stop", "next_probs"))
        logged: dict[str, Any] = {"logprobs": None}
        if self.recording.rollouts.counts_alone:
            unseen |= {name: Unknown(self.policy, name) for name in ("overlap", "ratio")}
            logged["belief_logprob"] = Unknown(self.policy, "belief_logprob")
        drafts, verdict = drafts._replace(**logged), verdict._replace(**unseen)
        return speculative.conclude(self, context.drafter, state, drafts, verdict)


def rows_of(recording: Recording, output: Int[Array, " B"]) -> tuple[Inputs, Int[Array, " B"]]:
    """Inputs and budgets of rows that decode these outputs; those beyond the last are idle."""
    known = jnp.minimum(output, len(recording.rollouts.emitted) - 1)
    budget, one = recording.rollouts.budget[known], jnp.ones_like(output)
    live = (output == known) & (recording.rollouts.emitted[known] > 0)
    return Inputs(known[:, None], one, 0 * one[:, None], one), jnp.where(live, budget, 0)
