"""Several drafters for one target: in every round one of them drafts for each row.

    load("switch(drafts=('lookup(min_ngram=2)', 'runs/x/model'), choice='bandit')", target)

The choice is made when the round begins, from the known tokens and past rounds alone. The drafted
tokens are draws from the chosen distributions, which verification gets. To the loop this is a
drafter like any other, and as exact.

At batch 1 only the chosen drafter runs. In a batch every drafter that some row chose runs for all
rows, and each row takes the logits of its choice. An idle model catches up when it is chosen again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.checkpoints.compatibility import check_ids, check_pair
from specjax.drafters import attached, choices, loading, sharing
from specjax.drafters.abilities import branches, is_free, learn, seen_by
from specjax.drafters.base import Drafter, ModelDrafter, is_silent
from specjax.drafters.choices import Choice, Evidence
from specjax.drafters.resizing import resized
from specjax.models.checkpoint import Checkpoint
from specjax.pytrees import pytree
from specjax.rounds import Round, where_active
from specjax.support import named
from specjax.types import Model


class Switched(NamedTuple):
    """The state of a switch."""

    states: tuple[Any, ...]  # of its drafters
    chosen: Int[Array, " B"]  # the index of the drafter in this round
    live: Bool[Array, " B"]  # rows that had not ended before the last round
    drafted_rounds: Int[Array, "B N"]  # rounds in which each drafted a token
    choice: Any


@pytree
class Switch(Drafter):
    """One of several drafters for each row and round. Made by `switch`.

    Its hidden states are the logits, because the drafters' hidden states differ in width.
    """

    drafters: tuple[Drafter, ...]
    choice: Choice
    vocab_size: int = dataclasses.field(metadata={"static": True})
    # The length of the target's hidden state that each drafter gets, from the start; 0: all of it.
    shown: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    branches = False  # in a tree no round belongs to one drafter, so a choice could not learn

    @property
    def carries(self) -> bool:
        """Whether the next batch starts from the choice's state."""
        return self.choice.carries

    def sees(self, target: Model) -> Model:
        """The widest view that any drafter needs."""
        views = (seen_by(drafter, target) for drafter in self.drafters)
        return next((view for view in views if view is not target), target)

    @property
    def shares(self) -> bool:
        """Whether some drafter reads the target's encoding (`sharing.shares`)."""
        return any(map(sharing.shares, self.drafters))

    def start(self, inputs, buffer_len):
        started = (
            drafter.start(sharing.inputs_for(drafter, inputs), buffer_len)
            for drafter in self.drafters
        )
        contexts, states = zip(*started, strict=True)
        size = len(inputs.prompt_len), len(self.drafters)
        chosen, live = jnp.zeros(size[:1], jnp.int32), jnp.ones(size[:1], bool)
        rounds, choice = jnp.zeros(size, jnp.int32), self.choice.init(*size)
        return contexts, Switched(states, chosen, live, rounds, choice)

    def observe(self, tokens, start, hidden, count, context, state):
        """Let all drafters observe, also the idle ones."""
        each = zip(self.drafters, self.shown, context, state.states, strict=True)
        states = tuple(
            drafter.observe(tokens, start, hidden[..., : width or None], count, own, before)
            for drafter, width, own, before in each
        )
        return state._replace(states=states)

    def begin(self, tokens, length, context, state, *, lags=True):
        """Choose a drafter for each row. It may have been idle, so all may lag."""
        proposes = self._proposes(tokens, length, context, state.states)
        scores = jnp.where(proposes, self.choice.scores(state.choice), -jnp.inf)
        state = state._replace(chosen=jnp.argmax(scores, axis=1).astype(jnp.int32))

        def first(drafter, turn, context, state):
            return drafter.begin(tokens, length + turn, context, state)

        return self._ask(first, context, state)

    def extend(self, token, position, context, state):
        def next_(drafter, turn, context, state):
            return drafter.extend(token + turn, position + turn, context, state)

        return self._ask(next_, context, state)

    def logits(self, hidden):
        return hidden

    def learn(self, tokens, length, round_, judge, context, state):
        """Count tested and accepted tokens of the drafter that drafted. If the choice watches, add
        the chances of `free` drafters at all positions that belong to the text."""
        mine = state.chosen[:, None] == jnp.arange(len(self.drafters), dtype=jnp.int32)[None, :]
        own = round_.in_output, jnp.sum(round_.tested, axis=1, dtype=jnp.int32)
        seen = Evidence(*(jnp.where(mine, x[:, None], 0).astype(jnp.float32) for x in own))
        states = []
        each = zip(self.drafters, context, state.states, strict=True)
        for i, (drafter, its, before) in enumerate(each):
            if self.choice.watches and is_free(drafter):
                found = _watched(drafter, tokens, length, round_, judge, its, before)
                seen = Evidence(*(x.at[:, i].set(new) for x, new in zip(seen, found, strict=True)))
            own_round = round_._replace(active=round_.active & mine[:, i])
            states.append(learn(drafter, tokens, length, own_round, judge, its, before))
        choice = self.choice.update(state.choice, seen, round_.gamma_max)
        drafted = mine & (round_.active & (round_.verified > 0))[:, None]
        return Switched(
            states=tuple(states),
            chosen=state.chosen,
            live=round_.active,
            drafted_rounds=state.drafted_rounds + drafted.astype(jnp.int32),
            choice=where_active(round_, choice, state.choice),
        )

    def carry_over(self, state):
        return state.choice

    def resume(self, fresh, past, rows):
        return fresh._replace(choice=self.choice.resume(fresh.choice, past, rows))

    def _proposes(
        self, tokens: Int[Array, "B T"], length: Int[Array, " B"], contexts: Any, states: Any
    ) -> Bool[Array, "B N"]:
        """Whether each `free` drafter proposes something; True for the others."""
        found = []
        for drafter, context, state in zip(self.drafters, contexts, states, strict=True):
            proposes = jnp.ones(length.shape, bool)
            if is_free(drafter):
                hidden, _ = drafter.begin(tokens, length, context, state)
                proposes = ~is_silent(drafter.logits(hidden))
            found.append(proposes)
        return jnp.stack(found, axis=1)

    def _ask(
        self, call: Callable[..., tuple[Array, Any]], contexts: Any, state: Switched
    ) -> tuple[Float[Array, "B V"], Switched]:
        """The logits of each row's drafter, by call(drafter, turn, context, its state).

        A drafter that no row chose does not run. Each is in a loop of zero turns or one, because a
        conditional would copy the caches. `turn` is always 0, but unknown to XLA, which would
        otherwise hoist the work out of the loop (`passes.narrowed`).
        """
        chosen, dtype, states = state.chosen, self._dtype, []
        found = jnp.zeros((len(chosen), self.vocab_size), dtype)
        each = zip(self.drafters, contexts, state.states, strict=True)
        for i, (drafter, context, before) in enumerate(each):
            mine = chosen == i

            def run(turn, carry, drafter=drafter, context=context, mine=mine):
                hidden, after = call(drafter, turn, context, carry[1])
                logits = drafter.logits(hidden).astype(dtype)
                return jnp.where(mine[:, None], logits, carry[0]), after

            turns = jnp.any(mine & state.live).astype(jnp.int32)
            found, after = jax.lax.fori_loop(0, turns, run, (found, before))
            states.append(after)
        return found, state._replace(states=tuple(states))

    @property
    def _dtype(self) -> Any:
        """The dtype of all logits: float32, or wider if parameters are."""
        leaves = jax.tree.leaves(self.drafters)
        kinds = {x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}
        return functools.reduce(np.promote_types, kinds, np.dtype(np.float32))


def _watched(
    drafter: Drafter,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    round_: Round,
    judge: Callable[..., Float[Array, "B K"]],
    context: Any,
    state: Any,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Sum and number of a free drafter's chances, at verified positions that belong to the text
    and where it proposes something; see `Abilities.learn`."""
    places = jnp.arange(round_.gamma_max + 1, dtype=jnp.int32)

    def at(place):
        return drafter.logits(drafter.begin(tokens, length + place, context, state)[0])

    logits = jax.vmap(at, out_axes=1)(places)
    proposes = (places[None, :] < round_.emitted[:, None]) & ~is_silent(logits)
    chance = judge(logits, certain=not branches(drafter))
    passed = jnp.sum(jnp.where(proposes, chance, 0.0), axis=1)
    return passed, jnp.sum(proposes, axis=1, dtype=jnp.float32)


@pytree
class Latecomer(ModelDrafter):
    """A model that may have been idle, and then reads many tokens per call."""

    model: Model

    stride: ClassVar[int] = 8


def switch(
    drafts: Sequence[str | Checkpoint | Drafter],
    target: Checkpoint,
    choice: str | Choice = "recent",
    load: Callable[[str], Checkpoint | Drafter] | None = None,
    check_tokens: bool = True,
) -> Switch:
    """Make one drafter of several.

    Args:
      drafts: two or more models, other drafters, or their names (`loading.load`). Without
        evidence, the first that proposes something drafts.
      target: the target whose ids are drafted.
      choice: `choices.Choice`, or its name: "fixed", "recent" or "bandit", with settings such as
        "recent(costs=(0.0, 0.1))".
      load: makes a drafter from its name; default: `loading.load` with this target.
      check_tokens: False accepts drafters whose tokens are not the target's, as in `generate`.

    Raises:
      ValueError: fewer than two drafters, one that does not fit the target, or two that read more
        of the target than its last hidden state.
    """
    if not isinstance(drafts, Sequence) or isinstance(drafts, str) or len(drafts) < 2:
        raise ValueError(f"drafts={drafts!r} must be a list of two or more.")
    size, load = target.model.vocab_size, load or functools.partial(loading.load, target=target)
    made = []
    for one in drafts:
        loaded = load(one) if isinstance(one, str) else one
        if isinstance(loaded, Checkpoint):
            check_pair(target, loaded, check_tokens=check_tokens)
            shared = sharing.shared_layers(loaded.model, target.model)
            loaded = Latecomer(loaded.model, shared=shared)
        else:
            named.check("drafter", loading.name_of(one), loaded, Drafter)
            attached.check_target(loaded, target)
            check_ids(loading.name_of(one), loaded.vocab_size, target, check_tokens=check_tokens)
        made.append(resized(loaded, size))
    more = [seen_by(drafter, target.model) is not target.model for drafter in made]
    if sum(more) > 1:
        raise ValueError(
            "Two of the drafters read states of more layers of the target than the last: a switch "
            "holds one such drafter (EAGLE-3) at most."
        )
    width = attached.width(target.model) if any(more) else 0
    shown = tuple(0 if own else width for own in more)
    return Switch(tuple(made), choices.parse(choice), size, shown)
