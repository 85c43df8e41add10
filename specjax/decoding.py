"""Texts in, rows out: rows that come and go, buckets, errors. Everything jitted lies below, in the
two loops."""

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Key

from specjax import drafters, loop, trees
from specjax.accept import AcceptanceRule, TokenRule
from specjax.accept import load as load_rule
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket, pack
from specjax.drafters import attached
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.compatibility import check_pair
from specjax.models.hub import Checkpoint
from specjax.models.memory import Need, nbytes, temporaries
from specjax.policies import Policy, constant
from specjax.policies import load as load_policy
from specjax.policies.base import counts_nodes, within_a_draft
from specjax.policies.logged import Log, Logged, lines_of
from specjax.results import Progress, Row
from specjax.sampling import Sampling, row_keys
from specjax.speculative import Speculative
from specjax.state import FOREVER, State, Stats, until
from specjax.support.ranges import whole
from specjax.trees import BestFirst, Chain, FixedTree, Shape
from specjax.trees.speculative import TreeSpeculative
from specjax.types import Inputs, Text

D = TypeVar("D")


def build(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    *,
    gamma: int,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    widths: Sequence[int] = (),
    tree: Shape | str | None = None,
) -> Method:
    """`plain` where `draft` is None; else `speculative`, or `branching` if the tree is no chain."""
    if draft is None:
        return plain(target, sampling, rule)
    shape = trees.load(tree)
    options: dict[str, Any] = {"rule": rule, "policy": policy, "widths": widths}
    if not isinstance(shape, Chain):
        return branching(target, draft, shape, sampling=sampling, **options)
    return speculative(target, draft, gamma=gamma, sampling=sampling, **options)


def plain(
    target: Checkpoint, sampling: Sampling, rule: AcceptanceRule | str | None = None
) -> Autoregressive:
    """Plain decoding, as the jitted functions take it."""
    eos_ids = jnp.asarray(target.eos_ids, jnp.int32)
    return Autoregressive(target.model, sampling, eos_ids, _rule(rule))


def speculative(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    *,
    gamma: int,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    widths: Sequence[int] = (),
) -> Speculative:
    """Speculative decoding, as the jitted functions take it. Checks that the pair fits.

    Raises: as `generate`.
    """
    fixed = constant(gamma)  # checks gamma, which bounds any policy
    target_model, drafter = pair(target, draft)
    made = Speculative(
        target=target_model,
        drafter=drafter,
        rule=_rule(rule),
        policy=fixed,
        sampling=sampling,
        eos_ids=jnp.asarray(target.eos_ids, jnp.int32),
        gamma_max=int(gamma),
        widths=_widths(widths),
    )
    if policy is None:
        return made
    return with_policy(made, load_policy(policy) if isinstance(policy, str) else policy)


def branching(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    shape: FixedTree | BestFirst,
    *,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    widths: Sequence[int] = (),
) -> TreeSpeculative:
    """Speculative decoding with trees. Checks that the pair fits, and that both can branch.

    Raises: as `generate`.
    """
    target_model, drafter = pair(target, draft)
    if not getattr(target_model, "branches", False):
        raise ValueError(
            f"{target.name} cannot score a tree: its model takes no `layout` "
            '(specjax.types.BranchingModel). Take tree="chain".'
        )
    if not drafter.branches:
        raise ValueError(
            f'{type(drafter).__name__} drafts chains alone. Take another drafter, or tree="chain".'
        )
    if isinstance(shape, BestFirst) and shape.width > target_model.vocab_size:
        raise ValueError(
            f"width={shape.width}, but there are no more than {target_model.vocab_size} ids that a "
            "node's children could have: lower width."
        )
    made = TreeSpeculative(
        target=target_model,
        drafter=drafter,
        rule=_rule(rule),
        policy=constant(shape.depth),
        sampling=sampling,
        eos_ids=jnp.asarray(target.eos_ids, jnp.int32),
        shape=shape,
        widths=_widths(widths),
    )
    if policy is None:
        return made
    return with_policy(made, load_policy(policy) if isinstance(policy, str) else policy)


def _widths(said: Sequence[int]) -> tuple[int, ...]:
    return tuple(whole("widths", width, "[1, ∞)") for width in said)


def pair(target: Checkpoint, draft: Checkpoint | Drafter | str) -> tuple[Any, Drafter]:
    """The target as the drafter sees it, and the drafter; ValueError if they do not fit.

    A drafter that is not on its target's mesh is replicated there.
    """
    if isinstance(draft, str):
        draft = drafters.load(draft, target)
    if isinstance(draft, Checkpoint):
        check_pair(target, draft)
        target_model, draft_model = aligned(target, draft)
        return target_model, _beside(target, ModelDrafter(draft_model))
    attached.check_target(draft, target)
    target_model, drafter = draft.sees(target.model), _beside(target, draft)
    if drafter.vocab_size != target_model.vocab_size:
        raise ValueError(
            f"The drafter's {drafter.vocab_size} ids are not the target's "
            f"{target_model.vocab_size}: both must have distributions over the same ids."
        )
    return target_model, drafter


def _beside(target: Checkpoint, drafter: D) -> D:
    return sharding.join(drafter, sharding.placement_of(target.model))


def _rule(rule: AcceptanceRule | str | None) -> AcceptanceRule:
    if rule is None:
        return TokenRule()
    return load_rule(rule) if isinstance(rule, str) else rule


M = TypeVar("M", Speculative, TreeSpeculative)


def with_policy(method: M, policy: Policy) -> M:
    """The loop with another policy; ValueError if it cannot learn from the loop's rule."""
    name, branches = type(policy).__name__, isinstance(method, TreeSpeculative)
    if branches and within_a_draft(policy):
        raise ValueError(
            f"{name} decides token by token whether a chain goes on. Trees go with policies that "
            'decide before a draft, such as "goodput" and "nodes".'
        )
    if counts_nodes(policy) and not branches:
        raise ValueError(f"{name} sets the number of a tree's nodes: give a tree, or leave it out.")
    if policy.needs_shorter and not (method.rule.reveals_shorter and grows_by_levels(method)):
        raise ValueError(
            f"{name} learns from a round what shorter drafts would have got, which "
            f"{type(method.rule).__name__}{' with this tree' if branches else ''} does not show: "
            "take another policy, or TokenRule."
        )
    return dataclasses.replace(method, policy=policy)


def reads_batch(method: Method) -> bool:
    """Whether a row's tokens may depend on its neighbours."""
    policy = getattr(method, "policy", None)
    return policy is not None and policy.reads_batch


def grows_by_levels(method: Speculative | TreeSpeculative) -> bool:
    """Whether a shorter draft is the beginning of a longer one."""
    return not isinstance(method, TreeSpeculative) or not method.dynamic


def with_log(method: Method, max_new_tokens: int) -> Speculative:
    """The loop with a log of its rounds, `Row.rounds`; ValueError where it has no chains."""
    if not isinstance(method, Speculative):
        raise ValueError(
            "Rounds are logged of speculative decoding with chains: give a draft, and no tree."
        )
    return dataclasses.replace(method, policy=Logged(method.policy, max_new_tokens))


def check_carry(method: Method) -> None:
    """ValueError if nothing that this loop learns could carry over from batch to batch."""
    policy, drafter = (getattr(method, name, None) for name in ("policy", "drafter"))
    if not (policy and policy.carries) and not (drafter and drafter.carries):
        of = f"{type(policy).__name__} learns nothing" if policy else "plain decoding has no policy"
        raise ValueError(
            f"carry=True: {of} that later inputs could begin with. Leave it out, or take a policy "
            'such as "goodput".'
        )


class Past(NamedTuple):
    """What a batch leaves to the next one of a run."""

    policy: Any  # its state
    drafter: Any  # `Drafter.lessons`
    rows: Bool[Array, " A"]  # those that were no padding


@partial(jax.jit, donate_argnames="state")
def heir(method: Any, state: State, past: Past) -> State:
    """The state before the first round, with what the last batch learned. Donates `state`."""
    state = state.replace(
        policy=method.policy.inherit(state.policy, past.policy, past.rows),
        drafter=method.drafter.inherit(state.drafter, past.drafter, past.rows),
    )
    return sharding.keep_rows(method, state, len(state.done))


def aligned(target: Checkpoint, draft: Checkpoint):
    """Both models cut to the ids that both have: two checkpoints may pad one vocabulary apart."""
    models = target.model, draft.model
    size = min(model.vocab_size for model in models)
    return tuple(
        model if model.vocab_size == size else dataclasses.replace(model, vocab_size=size)
        for model in models
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """What a row is to decode."""

    index: int  # of the input, and the number of the draw: with the key, all that noise depends on
    sample: int
    ids: Sequence[int]  # of the source or prompt
    budget: int  # new tokens at most


class Running:
    """A fixed number of rows that decode together, and the requests that they hold.

        running.admit(some)     # as many as are `free`
        running.run(ended=1)    # rounds until one of them ends
        ended, going = running.read()

    A row that has ended is free once it was read. All requests are encoded at one width, so that
    the loop and the admission compile once.
    """

    def __init__(
        self,
        method: Method,
        target: Checkpoint,
        *,
        rows: int,
        width: int,
        max_new_tokens: int,
        key: Key[Array, ""],
        at_once: int = 1,
        names: tuple[str, str] = ("target", "draft"),
        past: "Past | None" = None,
    ):
        """Nothing is allocated before the first requests come.

        Args:
          rows: that decode together.
          width: of the sources or prompts.
          max_new_tokens: the largest budget.
          at_once: requests that one call admits.
          names: of target and draft, for errors.
          past: what the first requests begin with.
        """
        self.method, self.target, self.width, self.key = method, target, width, key
        self.max_new_tokens, self.at_once, self.names = max_new_tokens, at_once, names
        self.held: list[Request | None] = [None] * rows
        self.placement = sharding.placement_of(target.model)
        # Of the arrays; the rest is never used.
        self.size = sharding.padded_rows(bucket(rows), self.placement)
        self._inherited = past
        self._context: Any = None
        self._state: Any = None

    @property
    def live(self) -> int:
        """Rows that hold a request."""
        return sum(request is not None for request in self.held)

    @property
    def free(self) -> int:
        """Rows that hold none."""
        return len(self.held) - self.live

    def admit(self, requests: Sequence[Request]) -> None:
        """Encode requests into free rows, the first time all at once. ValueError: too many."""
        if len(requests) > self.free:
            raise ValueError(f"{len(requests)} requests are too many for {self.free} free rows.")
        if not requests:
            return
        # Whole batches one after the other need no second program.
        if self._state is None or (self.live == 0 and self.at_once == len(self.held)):
            self._context = self._state = None  # before those that come next are made
            self.held[: len(requests)] = requests
            self._context, self._state = _start(
                self.method,
                self.target,
                requests,
                max_new_tokens=self.max_new_tokens,
                key=self.key,
                rows=self.size,
                width=self.width,
            )
            if self._inherited is not None:
                self._state = heir(self.method, self._state, self._inherited)
            return
        vacant = [row for row, request in enumerate(self.held) if request is None]
        for at in range(0, len(requests), self.at_once):
            some = dict(zip(vacant[at : at + self.at_once], requests[at:], strict=False))
            for row, request in some.items():
                self.held[row] = request
            # Where there are fewer, the last comes again.
            count = sharding.padded_rows(self.at_once, self.placement)
            rows = [*some, *[row] * (count - len(some))]
            again = [some[row] for row in rows]
            begun = arguments(self.target, again, rows=len(rows), width=self.width, key=self.key)
            self._context, self._state = loop.admit(
                self.method, self._context, self._state, jnp.asarray(rows, jnp.int32), *begun
            )

    def run(self, ended: int, rounds: int = FOREVER) -> None:
        """Rounds until so many of the live rows have ended, or so many rounds have passed.

        Returns once the loop has been dispatched; `read` waits for it.
        """
        idle = self.size - self.live
        state = self._state.replace(until=until(idle + min(ended, self.live), rounds))
        self._state = loop.decode(self.method, self._context, state)

    def read(self) -> tuple["Outputs", "Outputs"]:
        """What the rows hold that have ended, which are free from now on, and the others.

        Raises:
          FloatingPointError: logits that are not finite.
        """
        check_finite(self._state, self.names)
        outputs = read(self._state)
        ended: dict[int, tuple[int, int]] = {}
        going: dict[int, tuple[int, int]] = {}
        for row, request in enumerate(self.held):
            if request is not None:
                (ended if outputs.done[row] else going)[row] = request.index, request.sample
        for row in ended:
            self.held[row] = None
        return outputs._replace(labels=ended), outputs._replace(labels=going)

    def past(self, count: int) -> "Past":
        """What the first `count` rows leave to those that come after them."""
        lessons = self.method.drafter.lessons(self._state.drafter)  # type: ignore[attr-defined]
        return Past(self._state.policy, lessons, jnp.arange(self.size) < count)


def at_once(rows: int, admits: int | None = None) -> int:
    """How many rows have to be free before inputs are admitted: an eighth, if nothing is asked."""
    return min(rows, admits or max(1, rows // 8))


POOL = 1024  # requests among which those of like width run together
NARROWEST = 64  # tokens; widths that lie within a factor of 4 from there on are alike


def alike(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Requests that run together, in their order: those of like length, of some at a time.

    All of them are padded to one width. A single long one would make every other one dear.
    """
    requests = iter(requests)
    while pool := list(itertools.islice(requests, POOL)):
        kinds: dict[int, list[Request]] = {}
        for request in pool:
            span = NARROWEST
            while span < len(request.ids):
                span *= 4
            kinds.setdefault(span, []).append(request)
        yield from kinds.values()


def as_they_end(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Text],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    samples: int = 1,
    batch_size: int = 8,
    max_source_len: int | None = None,
    only: Sequence[int] | None = None,
    width: int | None = None,
    names: tuple[str, str] = ("target", "draft"),
    carry: bool = False,
    budgets: Sequence[int] | None = None,
    admits: int | None = None,
    eager: bool = True,
    every: int = 0,
) -> Iterator[Row | Progress]:
    """Rows as they end. When some have ended and inputs wait, these are admitted in their places.

    Where rows are not independent, of a policy that reads its batch or with `carry`, whole batches
    are decoded instead, one after the other in the order of the inputs.

    Args:
      only: numbers of the rows to decode, counted over inputs and their samples; None: all. Their
        randomness is not shifted: a run that was cut off goes on, or shares rows with others. Of a
        policy that reads its batch, the batches that they lie in are decoded again, as they were.
      width: of the sources or prompts; default: the bucket of the longest of those that run
        together (`alike`, or a batch).
      names: of target and draft, for errors.
      carry: begin each batch with what the one before has learned (`check_carry`).
      budgets: new tokens at most of each text, where that is fewer than max_new_tokens.
      admits: rows that have to be free before inputs are admitted, so many in a call; default:
        `at_once`. As many as there are rows: whole batches, one after the other.
      eager: hand out each row as it ends, though none can be admitted yet. False: the loop returns
        less often.
      every: hand out the `Progress` of all rows that run, every so many rounds; 0: never.
    """
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("samples", samples),
        ("batch_size", batch_size),
        *([] if admits is None else [("admits", admits)]),
        *[("budgets", budget) for budget in budgets or ()],
    ):
        whole(name, value, "[1, ∞)")
    whole("every", every, "[0, ∞)")
    sources = tokenize(target, texts, max_source_len)
    check_room(target, sources, max_new_tokens)
    most = [max_new_tokens] * len(texts) if budgets is None else budgets
    requests = [
        Request(index, sample, ids, min(budget, max_new_tokens))
        for index, (ids, budget) in enumerate(zip(sources, most, strict=True))
        for sample in range(samples)
    ]
    wanted = requests if only is None else [requests[number] for number in only]
    room: dict[str, Any] = {"max_new_tokens": max_new_tokens, "key": key, "names": names}
    if carry or reads_batch(method):
        each = requests if reads_batch(method) else wanted
        runs = whole_batches(method, target, each, wanted, batch_size, width, carry, **room)
    else:
        runs = admitted(method, target, wanted, batch_size, width, admits, **room)
    # What is wrong with the arguments has been said; from here on it is decoded.
    return _events(method, wanted, runs, eager, every)


Group = tuple["Running", Sequence[Request]]


def _events(
    method: Method,
    wanted: Sequence[Request],
    runs: Iterator[Group],
    eager: bool,
    every: int,
) -> Iterator[Row | Progress]:
    """See `as_they_end`."""
    gamma = method.gamma_max
    for one in (request for request in wanted if not request.ids):
        nothing = [0] * (gamma + 1), [0] * gamma
        yield Row(one.index, one.sample, "", [], 0, 0, 0, 0, *nothing)
    asked = {(request.index, request.sample) for request in wanted}
    for running, some in runs:
        for event in decoded(running, some, eager, every):
            if (event.index, event.sample) in asked:
                yield event
        del running  # before the state of the next is made


def admitted(
    method: Method,
    target: Checkpoint,
    wanted: Sequence[Request],
    batch_size: int,
    width: int | None,
    admits: int | None,
    **room: Any,
) -> Iterator[Group]:
    """Rows, and the requests that are admitted to them one after the other."""
    live = [request for request in wanted if request.ids]
    for some in [live] if width and live else alike(live):
        rows = min(batch_size, len(wanted)) if len(some) > 1 else 1
        size = width or common_width([request.ids for request in some])
        free = at_once(rows, admits)
        yield Running(method, target, rows=rows, width=size, at_once=free, **room), some


def whole_batches(
    method: Method,
    target: Checkpoint,
    requests: Sequence[Request],
    wanted: Sequence[Request],
    batch_size: int,
    width: int | None,
    carry: bool,
    **room: Any,
) -> Iterator[Group]:
    """Batches of the requests in their order, those that hold one that is wanted; with `carry` each
    begins with what the one before has learned, which must have run by then."""
    asked = {(request.index, request.sample) for request in wanted if request.ids}
    past = None
    for at in range(0, len(requests), batch_size):
        some = [request for request in requests[at : at + batch_size] if request.ids]
        if not any((request.index, request.sample) in asked for request in some):
            continue
        rows = min(batch_size, len(requests)) if len(some) > 1 else 1
        size = width or common_width([request.ids for request in some])
        running = Running(method, target, rows=rows, width=size, at_once=rows, past=past, **room)
        yield running, some
        past = running.past(len(some)) if carry else None
        del running


def decoded(
    running: Running, requests: Sequence[Request], eager: bool = False, every: int = 0
) -> Iterator[Row | Progress]:
    """See `as_they_end`. What has ended is handed out while the loop goes on."""
    waiting = collections.deque(requests)
    ended = going = None
    while waiting or running.live:
        if waiting and running.free >= running.at_once:
            running.admit([waiting.popleft() for _ in range(min(running.free, len(waiting)))])
        enough = running.at_once - running.free if waiting else running.live
        running.run(1 if eager else enough, every or FOREVER)
        yield from _handed_out(running.target, ended, going if every else None)
        ended, going = running.read()
    yield from _handed_out(running.target, ended)


def _handed_out(
    target: Checkpoint, ended: "Outputs | None", going: "Outputs | None" = None
) -> Iterator[Row | Progress]:
    yield from rows_of(ended, target) if ended else ()
    yield from progress_of(going, target) if going else ()


def in_order(
    events: Iterable[Row | Progress], samples: int = 1, only: Iterable[int] | None = None
) -> Iterator[Row]:
    """The rows alone, in the order of inputs and samples, each once those before it have ended.

    Args:
      samples, only: as of `as_they_end`.
    """
    early: dict[int, Row] = {}
    order = iter(itertools.count() if only is None else only)
    due = next(order, None)
    for row in events:
        if isinstance(row, Row):
            early[row.index * samples + row.sample] = row
        while due in early:
            yield early.pop(due)
            due = next(order, None)


def stream(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Text],
    *,
    samples: int = 1,
    only: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[Row]:
    """Rows `in_order`. For the arguments see `as_they_end`."""
    options |= {"samples": samples, "only": only, "eager": False}
    return in_order(as_they_end(method, target, texts, **options), samples, only)


def tokenize(
    checkpoint: Checkpoint, texts: Sequence[Text], max_source_len: int | None = None
) -> list[list[int]]:
    """Token ids of each text as the checkpoint's tokenizer makes them (T5 appends EOS).

    What is given as ids stays as it is, but for the limit: an encoder-decoder's source should end
    with EOS where the model was trained so.

    Texts that lack the checkpoint's prefix are counted in one warning. Texts over the limit are
    cut, and counted in another: sources of an encoder-decoder before their last id, which is kept;
    prompts of a decoder-only model at their beginning, but behind what the tokenizer puts before
    every text (BOS). Blank sources give no ids and one warning; an empty prompt is the start token.

    Raises:
      ValueError: `texts` is not a list of strings or of ids, an id is not of the vocabulary, or
        there are strings and the checkpoint has no tokenizer.
    """
    check_texts(texts)
    if checkpoint.tokenizer is None and any(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{checkpoint.name} has no tokenizer, which texts need. Copy tokenizer.json and "
            "tokenizer_config.json into the directory, or give lists of token ids."
        )
    limit = checkpoint.max_source_len if max_source_len is None else max_source_len
    whole("max_source_len", limit, "[1, ∞)")

    def encode(text: Text) -> list[int]:
        if isinstance(text, str):
            # Not verbose: transformers would warn of long texts in words that are not true here.
            return list(checkpoint.tokenizer(text, verbose=False)["input_ids"])
        return _as_ids(text, checkpoint)

    ids: list[list[int]] = []
    blank = cut = bare = 0
    for text in texts:
        if is_blank(checkpoint, text):
            ids.append([])
            blank += 1
            continue
        bare += isinstance(text, str) and not text.startswith(checkpoint.prefix)
        row = encode(text) or [checkpoint.start_id]
        if len(row) > limit:
            marks = encode("") if isinstance(text, str) else ()
            row = _cut(row, limit, marks, ends=checkpoint.config.is_encoder_decoder)
            cut += 1
        ids.append(row)
    if blank:
        warnings.warn(f"{blank} empty input(s): their output is empty too.", stacklevel=3)
    if bare:
        warnings.warn(
            f"{bare} of {len(texts)} input(s) do not begin with {checkpoint.prefix!r}, as the "
            f"config.json of {checkpoint.name} says that all should: the outputs may be poor.",
            stacklevel=3,
        )
    if cut:
        warnings.warn(
            f"{cut} input(s) longer than {limit} tokens were truncated; "
            "max_source_len sets the limit.",
            stacklevel=3,
        )
    return ids


def check_texts(texts: Sequence[Text]) -> None:
    """ValueError unless `texts` is a list of strings or of lists of ids.

    One string would be taken for its letters, and one list of ids for texts.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Sized):
        said = _shown(texts)
        raise ValueError(f"texts={said} should be a list of strings, such as [{said}].")
    for index, text in enumerate(texts):
        if not isinstance(text, str) and not _are_ids(text):
            raise ValueError(
                f"texts[{index}]={_shown(text)} should be a string, or a list of token ids."
            )


def _are_ids(text: Any) -> bool:
    if isinstance(text, np.ndarray | Array):
        return text.ndim == 1 and (text.dtype.kind in "iu" or text.size == 0)
    return isinstance(text, list | tuple) and all(
        type(one) is not bool and isinstance(one, int | np.integer) for one in text
    )


def _as_ids(ids: Sequence[int], checkpoint: Checkpoint) -> list[int]:
    """The ids as a list; ValueError if one is not of the checkpoint's vocabulary."""
    found, size = np.asarray(ids, np.int64).tolist(), checkpoint.model.vocab_size
    if wrong := [one for one in found if not 0 <= one < size]:
        raise ValueError(
            f"{wrong[0]} in {_shown(ids)} is no token id of {checkpoint.name}: they are 0 … "
            f"{size - 1}."
        )
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def is_blank(checkpoint: Checkpoint, text: Text) -> bool:
    """Whether a text gives no ids: an encoder has nothing to read there, a prompt may be empty."""
    empty = not text.strip() if isinstance(text, str) else len(text) == 0
    return checkpoint.config.is_encoder_decoder and empty


def _cut(row: list[int], limit: int, marks: Sequence[int], *, ends: bool) -> list[int]:
    """The first ids and the last one, or the last ids and the marks before the text, if they fit.

    Args:
      marks: ids of the empty text.
    """
    if ends:
        return row[: limit - 1] + row[-1:]
    pairs = zip(row, marks, strict=False)
    first = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    first = first if first < limit else 0
    return row[:first] + row[len(row) - limit + first :]


def check_room(target: Checkpoint, texts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """ValueError if a prompt and its output exceed the positions that the model has."""
    positions = target.config.max_positions
    longest = max(map(len, texts), default=0)
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the "
            f"{positions} positions of {target.name}: lower max_new_tokens, or set max_source_len "
            "to cut prompts."
        )


def pack_for(
    target: Checkpoint, texts: Sequence[Sequence[int]], *, rows: int, width: int | None = None
) -> Inputs:
    """What `tokenize` gave as the arrays that this model starts from.

    Args:
      rows: B, at least as many as there are texts.
      width: of the texts' array; default: the bucket of the longest.
    """
    width = width or _width(max(map(len, texts)))
    start_id = target.start_id if target.config.is_encoder_decoder else None
    return pack(texts, start_id=start_id, rows=rows, width=width)


def common_width(sources: Sequence[Sequence[int]]) -> int:
    """One width for all sources, so that they share their compilations."""
    return _width(max(map(len, sources)))


def _width(longest: int) -> int:
    return bucket(longest, smallest=16 if longest > 1 else 1)


def prepare(
    method: Method,
    target: Checkpoint,
    sources: Sequence[Sequence[int]],
    labels: Sequence[tuple[int, int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    rows: int,
    width: int | None = None,
    budgets: Sequence[int] | None = None,
):
    """(context, state) before the first round, in bucketed shapes.

    Args:
      labels: (input index, sample) of each source: with the key, all that its noise depends on.
      rows: of the batch; those beyond the sources are given no budget. On a mesh there may be
        more, so that its data axis divides them.
      width: of the sources or prompts; default: the bucket of the longest.
      budgets: new tokens of each source at most, where that is fewer than max_new_tokens.
    """
    most = [max_new_tokens] * len(sources) if budgets is None else budgets
    each = zip(labels, sources, most, strict=True)
    requests = [Request(*label, ids, min(limit, max_new_tokens)) for label, ids, limit in each]
    size: Any = {"max_new_tokens": max_new_tokens, "rows": rows, "width": width}
    return _start(method, target, requests, key=key, **size)


def _start(method, target, requests, *, max_new_tokens, key, rows, width):
    """See `prepare`."""
    begun = arguments(target, requests, rows=rows, width=width, key=key)
    room = _room(method, begun[0], max_new_tokens)
    return loop.start(method, *begun, buffer_len=room)


def arguments(
    target: Checkpoint,
    requests: Sequence[Request],
    *,
    rows: int,
    width: int | None,
    key: Key[Array, ""],
) -> tuple[Inputs, Key[Array, " B"], Int[Array, " B"]]:
    """Inputs, keys and budgets of requests, as `loop.start` and `loop.admit` take them.

    Args:
      rows, width: as in `prepare`.
    """
    placement = sharding.placement_of(target.model)
    rows = sharding.padded_rows(rows, placement)
    inputs = pack_for(target, [request.ids for request in requests], rows=rows, width=width)
    numbers = np.zeros((3, rows), np.int32)
    for row, request in enumerate(requests):
        numbers[:, row] = request.index, request.sample, request.budget
    index, sample, budget = map(jnp.asarray, numbers)
    return sharding.place_rows((inputs, _row_keys(key, index, sample), budget), placement)


_row_keys = jax.jit(row_keys)


def _room(method: Method, inputs: Inputs, max_new_tokens: int) -> int:
    room = inputs.prompt.shape[1] + max_new_tokens + method.slots
    return bucket(room, smallest=32)


class Programs(NamedTuple):
    """Both programs of a run, compiled and not run, and what lies between them."""

    start: jax.stages.Compiled
    decode: jax.stages.Compiled
    context: Any
    state: State  # shapes, like the context; on a mesh with their shardings

    @property
    def temporary(self) -> tuple[int, int]:
        """Bytes on each device that either program holds beside its arguments and the state."""
        # What `start` gives is the state of the loop; the rest of what it takes is gone by then.
        begun = temporaries(self.start) - nbytes((self.context, self.state))
        return begun, temporaries(self.decode)


def compiled(
    method: Method,
    target: Checkpoint,
    longest: int,
    *,
    rows: int,
    max_new_tokens: int,
    options: dict[str, Any] | None = None,
) -> Programs:
    """Both programs of a run, in the shapes that `prepare` makes.

    A run of these shapes in this process compiles no more, unless there are options.

    Args:
      options: of the compiler. Others: see `needed`.
    """
    placement = sharding.placement_of(target.model)
    rows = sharding.padded_rows(bucket(rows), placement)
    inputs = pack_for(target, [[0] * longest], rows=rows)
    zeros = jnp.zeros((rows,), jnp.int32)
    keys = jax.eval_shape(row_keys, jax.random.key(0), zeros, zeros)
    given = sharding.place_rows((inputs, keys, zeros), placement)
    room = _room(method, inputs, max_new_tokens)
    start = loop.start.lower(method, *given, buffer_len=room).compile(options)
    kept = jax.eval_shape(partial(loop.start, buffer_len=room), method, *given)
    context, state = sharding.results_of(start, kept, placement)
    decode = loop.decode.lower(method, context, state).compile(options)
    return Programs(start, decode, context, state)


def needed(
    method: Method,
    target: Checkpoint,
    longest: int,
    *,
    rows: int,
    max_new_tokens: int,
    admits: int = 0,
) -> Need:
    """Bytes that decoding takes at most, as the compiler tells. Nothing is decoded. On a mesh: on
    each of its devices.

    Compiles the programs of the run in the shapes that `prepare` makes; a run of these shapes in
    this process compiles no more.

    Args:
      method: of models that are loaded, or of outlines.
      longest: tokens of the longest text.
      rows: decoded at once: `batch_size`, or all that there are if they are fewer.
      admits: where there are more inputs than rows, how many one call admits (`at_once`).
    """
    programs = compiled(method, target, longest, rows=rows, max_new_tokens=max_new_tokens)
    context, state = programs.context, programs.state
    admitted = 0
    if 0 < admits < len(state.done):
        placement = sharding.placement_of(target.model)
        count = sharding.padded_rows(admits, placement)
        inputs = pack_for(target, [[0] * longest], rows=count)
        zeros = jnp.zeros((count,), jnp.int32)
        keys = jax.eval_shape(row_keys, jax.random.key(0), zeros, zeros)
        some = sharding.place_rows((inputs, keys, zeros), placement)
        admitted = temporaries(loop.admit.lower(method, context, state, zeros, *some).compile())
    return Need(nbytes(method), nbytes((context, state)), max(*programs.temporary, admitted))


def check_finite(state: State, names: tuple[str, str]) -> None:
    """Raise FloatingPointError if a model's logits were not finite."""
    for finite, role, name in zip(
        (state.target_finite, state.draft_finite), ("target", "draft"), names, strict=True
    ):
        if not bool(finite):
            raise FloatingPointError(
                f"The {role} model ({name}) gave logits that are not finite. Check its weights, or "
                "use a wider dtype: T5's activations overflow float16."
            )


class Outputs(NamedTuple):
    """Some rows of a state, on the host."""

    labels: Mapping[int, tuple[int, int]]  # by row: (input index, sample)
    tokens: Int[np.ndarray, "B T"]
    length: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    stats: Stats
    log: Any = None  # what `lines_of` takes

    def emitted(self, row: int) -> list[int]:
        """What follows the prompt."""
        end = self.length[row]
        return self.tokens[row, end - self.stats.emitted[row] : end].tolist()


def read(state: State) -> Outputs:
    """What rows hold, without labels. One transfer; caches and keys need not come back."""
    log = state.policy if isinstance(state.policy, Log) else None
    host = state.tokens, state.length, state.done, state.stats, log and (log.written, log.lines)
    return Outputs({}, *sharding.fetch(host))


def rows_of(outputs: Outputs, target: Checkpoint) -> list[Row]:
    """A row for each label."""
    rows = []
    log = outputs.log
    for b, (index, sample) in outputs.labels.items():
        ids, stats = outputs.emitted(b), outputs.stats
        rows.append(
            Row(
                index=index,
                sample=sample,
                text=_text(target, ids),
                tokens=ids,
                target_calls=int(stats.target_calls[b]),
                drafted=int(stats.drafted[b]),
                levels=int(stats.levels[b]),
                accepted=int(stats.accepted[b]),
                accepted_lengths=stats.accepted_lengths[b].tolist(),
                tested=stats.tested[b].tolist(),
                rounds=tuple(lines_of(log[0], log[1], b)) if log else (),
            )
        )
    return rows


def progress_of(outputs: Outputs, target: Checkpoint) -> list[Progress]:
    """How far each label's row is."""
    found = ((label, outputs.emitted(b)) for b, label in outputs.labels.items())
    return [Progress(*label, _text(target, ids), ids) for label, ids in found]


def read_rows(state: State, labels: Sequence[tuple[int, int]], target: Checkpoint) -> list[Row]:
    """The first rows of a batch, one for each label."""
    return rows_of(read(state)._replace(labels=dict(enumerate(labels))), target)


def _text(target: Checkpoint, ids: Sequence[int]) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True) if target.tokenizer else ""
