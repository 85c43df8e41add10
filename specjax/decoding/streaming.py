"""Rows as they end: which inputs run together, and which come next."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specjax.decoding.building import check_carry, check_log, reads_batch
from specjax.decoding.outputs import Shown, progress_of, rows_of
from specjax.decoding.run import Run
from specjax.decoding.running import Running
from specjax.decoding.starting import Past, Request
from specjax.decoding.texts import check_room, common_width, tokenize
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.results import Progress, Row
from specjax.state import FOREVER
from specjax.types import Text

POOL = 1024  # requests among which those of similar width run together
MIN_WIDTH = 64  # tokens; widths within a factor of 4 from there on run together


def as_they_end(
    method: Method, target: Checkpoint, texts: Sequence[Text], run: Run
) -> Iterator[Row | Progress]:
    """Yield rows as they end. Waiting inputs are admitted in the places of rows that have ended.

    Where rows are not independent (a policy that reads its batch, or `carry_state`), whole batches
    are decoded instead, one after the other in the order of the inputs.

    Raises:
      ValueError: a run that the method, the model or the texts do not allow.
    """
    if run.log_rounds:
        check_log(method)
    if run.carry_state:
        check_carry(method)
    sources = tokenize(target, texts, run.max_source_len)
    check_room(target, sources, run.max_new_tokens)
    most = [run.max_new_tokens] * len(texts) if run.budgets is None else run.budgets
    requests = [
        Request(index, sample, ids, min(budget, run.max_new_tokens))
        for index, (ids, budget) in enumerate(zip(sources, most, strict=True))
        for sample in range(run.num_samples)
    ]
    only = range(len(requests)) if run.only is None else dict.fromkeys(run.only)
    wanted = [requests[number] for number in only]
    if not reads_batch(method):
        requests = wanted
    # The arguments are valid from here on.
    return _events(wanted, groups(method, target, requests, wanted, run), method.gamma_max)


Group = tuple[Running, Sequence[Request]]


def _events(
    wanted: Sequence[Request], groups: Iterator[Group], gamma: int
) -> Iterator[Row | Progress]:
    """Yield the events of `as_they_end`, whose arguments are checked."""
    for one in (request for request in wanted if not request.ids):
        nothing = [0] * (gamma + 1), [0] * gamma
        yield Row(one.index, one.sample, "", [], 0, 0, 0, 0, *nothing)
    asked = {request.label for request in wanted}
    for running, some in groups:
        for event in decoded(running, some):
            if (event.index, event.sample) in asked:
                yield event
        del running  # freed before the next state is made


def groups(
    method: Method,
    target: Checkpoint,
    requests: Sequence[Request],
    wanted: Sequence[Request],
    run: Run,
) -> Iterator[Group]:
    """Yield rows that are still empty, each time with the requests that run in them.

    Args:
      requests: of whole batches, if the policy reads its batch; else the wanted ones.
    """
    live = [request for request in wanted if request.ids]
    in_batches = run.carry_state or reads_batch(method)
    past: Past | None = None
    for some in (
        batches(requests, live, run.batch_size)
        if in_batches
        else [live] * bool(live)
        if run.width
        else alike(live)
    ):
        rows = min(run.batch_size, len(requests)) if len(some) > 1 else 1
        running = Running(
            method,
            target,
            run,
            rows=rows,
            width=run.width or common_width([request.ids for request in some]),
            at_once=rows if in_batches else at_once(rows, run.admits),
            past=past,
        )
        yield running, some
        past = running.past(len(some)) if run.carry_state else None
        del running  # freed before the next one is made


def at_once(rows: int, admits: int | None = None) -> int:
    """The number of free rows before inputs are admitted: by default a quarter of the rows."""
    return min(rows, admits or max(1, rows // 4))


def batches(
    requests: Sequence[Request], wanted: Sequence[Request], batch_size: int
) -> Iterator[list[Request]]:
    """Yield batches of the requests in their order, those that hold a wanted one."""
    asked = {request.label for request in wanted}
    for first in range(0, len(requests), batch_size):
        some = [request for request in requests[first : first + batch_size] if request.ids]
        if any(request.label in asked for request in some):
            yield some


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


def decoded(running: Running, requests: Sequence[Request]) -> Iterator[Row | Progress]:
    """Yield the events of one group, see `as_they_end`. Rows are read while the loop runs on."""
    eager, every = running.spec.eager, running.spec.every
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
    events: Iterable[Row | Progress], num_samples: int = 1, only: Iterable[int] | None = None
) -> Iterator[Row]:
    """Yield the rows alone, in the order of inputs and samples, as soon as those before have ended.

    Args:
      num_samples, only: as in `Run`. A row that is named twice comes twice.
    """
    early: dict[int, Row] = {}
    numbers = None if only is None else list(only)
    again = collections.Counter(numbers)
    order = iter(itertools.count() if numbers is None else numbers)
    due = next(order, None)
    for event in events:
        if isinstance(event, Row):
            early[event.index * num_samples + event.sample] = event
        while due in early:
            row = early.pop(due)
            yield row
            if again[due] > 1:
                early[due], again[due] = row, again[due] - 1
            due = next(order, None)


def stream(
    method: Method, target: Checkpoint, texts: Sequence[Text], **fields: Any
) -> Iterator[Row]:
    """Yield rows `in_order`, of a `Run` with these fields."""
    run = Run(**fields)
    return in_order(as_they_end(method, target, texts, run), run.num_samples, run.only)
