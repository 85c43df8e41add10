"""Rows as they end: which inputs run together, and which come next."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax.decoding.methods import check_log, reads_batch
from specjax.decoding.outputs import Shown, progress_of, rows_of
from specjax.decoding.running import Running
from specjax.decoding.starting import Request
from specjax.decoding.texts import check_room, common_width, tokenize
from specjax.defaults import BATCH_SIZE
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.results import Progress, Row
from specjax.state import FOREVER
from specjax.support.ranges import whole
from specjax.types import Text

POOL = 1024  # requests among which those of similar width run together
MIN_WIDTH = 64  # tokens; widths within a factor of 4 from there on run together


def as_they_end(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Text],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    samples: int = 1,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    only: Sequence[int] | None = None,
    width: int | None = None,
    names: tuple[str, str] = ("target", "draft"),
    carry: bool = False,
    budgets: Sequence[int] | None = None,
    admits: int | None = None,
    eager: bool = True,
    every: int = 0,
    logs: bool = False,
) -> Iterator[Row | Progress]:
    """Yield rows as they end. Waiting inputs are admitted in the places of rows that have ended.

    Where rows are not independent (a policy that reads its batch, or `carry`), whole batches are
    decoded instead, one after the other in the order of the inputs.

    Args:
      only: numbers of the rows to decode, counted over inputs and their samples; None: all. Each
        is decoded once, however often it is named. Their randomness is not shifted, so a run that
        was cut off can continue, or share rows with others. If the policy reads its batch, the
        batches of these rows are decoded again, as they were.
      width: width of the sources or prompts; default: the bucket of the longest of those that run
        together (`alike`, or a batch).
      names: names of target and draft, for errors.
      carry: begin each batch with what the one before has learned (`check_carry`).
      budgets: new tokens at most of each text, where that is fewer than max_new_tokens.
      admits: rows that must be free before as many inputs are admitted in one call; default:
        `at_once`. With as many as there are rows, whole batches run one after the other.
      eager: hand out each row as it ends, even if no input can be admitted yet. False: the loop
        returns less often.
      every: rounds between two reports of `Progress` of all rows that run; 0: no reports.
      logs: keep a log of rounds, `Row.rounds`.
    """
    if logs:
        check_log(method)
    for name, value in (
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
    wanted = requests if only is None else [requests[number] for number in dict.fromkeys(only)]
    if carry or reads_batch(method):
        runs = whole_batches(
            method,
            target,
            requests if reads_batch(method) else wanted,
            wanted,
            batch_size,
            width,
            carry,
            max_new_tokens=max_new_tokens,
            key=key,
            names=names,
            logs=logs,
        )
    else:
        runs = admitted(
            method,
            target,
            wanted,
            batch_size,
            width,
            admits,
            max_new_tokens=max_new_tokens,
            key=key,
            names=names,
            logs=logs,
        )
    # The arguments are valid from here on.
    return _events(method, wanted, runs, eager, every)


Group = tuple[Running, Sequence[Request]]


def _events(
    method: Method,
    wanted: Sequence[Request],
    runs: Iterator[Group],
    eager: bool,
    every: int,
) -> Iterator[Row | Progress]:
    """Yield the events of `as_they_end`, whose arguments are checked."""
    gamma = method.gamma_max
    for one in (request for request in wanted if not request.ids):
        nothing = [0] * (gamma + 1), [0] * gamma
        yield Row(one.index, one.sample, "", [], 0, 0, 0, 0, *nothing)
    asked = {(request.index, request.sample) for request in wanted}
    for running, some in runs:
        for event in decoded(running, some, eager, every):
            if (event.index, event.sample) in asked:
                yield event
        del running  # freed before the next state is made


def at_once(rows: int, admits: int | None = None) -> int:
    """The number of free rows before inputs are admitted: by default a quarter of the rows."""
    return min(rows, admits or max(1, rows // 4))


def alike(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Group requests of similar length, at most `POOL` at a time, in their order.

    A group is padded to one width: a single long request would make every other one expensive.
    """
    requests = iter(requests)
    while pool := list(itertools.islice(requests, POOL)):
        kinds: dict[int, list[Request]] = {}
        for request in pool:
            span = MIN_WIDTH
            while span < len(request.ids):
                span *= 4
            kinds.setdefault(span, []).append(request)
        yield from kinds.values()


def admitted(
    method: Method,
    target: Checkpoint,
    wanted: Sequence[Request],
    batch_size: int,
    width: int | None,
    admits: int | None,
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    names: tuple[str, str],
    logs: bool,
) -> Iterator[Group]:
    """Yield groups of rows, each with the requests that are admitted to it one after the other."""
    live = [request for request in wanted if request.ids]
    for some in [live] if width and live else alike(live):
        rows = min(batch_size, len(wanted)) if len(some) > 1 else 1
        size = width or common_width([request.ids for request in some])
        running = Running(
            method,
            target,
            rows=rows,
            width=size,
            max_new_tokens=max_new_tokens,
            key=key,
            at_once=at_once(rows, admits),
            names=names,
            logs=logs,
        )
        yield running, some
        del running  # freed before the next one is made


def whole_batches(
    method: Method,
    target: Checkpoint,
    requests: Sequence[Request],
    wanted: Sequence[Request],
    batch_size: int,
    width: int | None,
    carry: bool,
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    names: tuple[str, str],
    logs: bool,
) -> Iterator[Group]:
    """Yield batches of the requests in their order, those that hold a wanted one.

    With `carry` each begins with what the one before has learned, which must have run by then.
    """
    asked = {(request.index, request.sample) for request in wanted if request.ids}
    past = None
    for at in range(0, len(requests), batch_size):
        some = [request for request in requests[at : at + batch_size] if request.ids]
        if not any((request.index, request.sample) in asked for request in some):
            continue
        rows = min(batch_size, len(requests)) if len(some) > 1 else 1
        size = width or common_width([request.ids for request in some])
        running = Running(
            method,
            target,
            rows=rows,
            width=size,
            max_new_tokens=max_new_tokens,
            key=key,
            at_once=rows,
            names=names,
            past=past,
            logs=logs,
        )
        yield running, some
        past = running.past(len(some)) if carry else None
        del running


def decoded(
    running: Running, requests: Sequence[Request], eager: bool = False, every: int = 0
) -> Iterator[Row | Progress]:
    """Yield the events of one group, see `as_they_end`. Rows are read while the loop runs on."""
    waiting = collections.deque(requests)
    ended = going = None
    shown: dict[tuple[int, int], Shown] = {}
    while waiting or running.live:
        if waiting and running.free >= running.at_once:
            running.admit([waiting.popleft() for _ in range(min(running.free, len(waiting)))])
        enough = running.at_once - running.free if waiting else running.live
        running.run(1 if eager else enough, every or FOREVER)
        if ended:
            yield from rows_of(ended, running.target)
        if going and every:
            yield from progress_of(going, running.target, shown)
        ended, going = running.read()
    if ended:
        yield from rows_of(ended, running.target)


def in_order(
    events: Iterable[Row | Progress], samples: int = 1, only: Iterable[int] | None = None
) -> Iterator[Row]:
    """Yield the rows alone, in the order of inputs and samples, as soon as those before have ended.

    Args:
      samples, only: as in `as_they_end`. A row that is named twice comes twice.
    """
    early: dict[int, Row] = {}
    numbers = None if only is None else list(only)
    again = collections.Counter(numbers)
    order = iter(itertools.count() if numbers is None else numbers)
    due = next(order, None)
    for event in events:
        if isinstance(event, Row):
            early[event.index * samples + event.sample] = event
        while due in early:
            row = early.pop(due)
            yield row
            if again[due] > 1:
                early[due], again[due] = row, again[due] - 1
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
    """Yield rows `in_order`. For the arguments see `as_they_end`."""
    options |= {"samples": samples, "only": only, "eager": False}
    return in_order(as_they_end(method, target, texts, **options), samples, only)
