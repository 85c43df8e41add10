"""`generate` and `stream`: texts in, texts out. Nothing here reads a clock; `tune` does."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from jax import Array
from jaxtyping import Key

from specjax import drafters
from specjax.decoding import building, streaming
from specjax.decoding.conditions import conditions
from specjax.decoding.run import Run
from specjax.decoding.texts import check_texts
from specjax.defaults import BATCH_SIZE, NEW_TOKENS, TEMPERATURE, TOP_K, TOP_P
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Policy
from specjax.results import Progress, Result, Row
from specjax.rules import AcceptanceRule, exactness
from specjax.sampling import Filter, Sampling, as_sampling, key_for
from specjax.settings import Drafting, Fields, Settings
from specjax.support.renamed import refuses
from specjax.trees import Shape
from specjax.types import Text

T = TypeVar("T")


@refuses
def generate(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    *,
    gamma: int | None = None,
    sampling: Sampling | None = None,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
    filters: Sequence[Filter | str] = (),
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    num_samples: int = 1,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    passes: Sequence[int] = (),
    tree: Shape | str | None = None,
    settings: Drafting | None = None,
    log_rounds: bool = False,
    carry_state: bool = False,
    check_tokens: bool = True,
) -> Result:
    """Decode texts speculatively, or autoregressively where `draft` is None.

    The output's distribution is the target's in both cases, unless the rule is not exact
    (`Result.exact`); at temperature 0 and in float32 the tokens are the same. A row's tokens depend
    on the key, its index among `texts` and its sample number, and not on other rows. Exceptions are
    policies that read their batch, and `carry_state`.

    Args:
      target: the model whose distribution the output follows.
      draft: a small checkpoint with the same vocabulary, any other drafter, or the name of either
        (`specjax.drafters.loading.load`); or None.
      texts: inputs, which an encoder-decoder reads and a decoder-only model continues: strings, or
        lists of token ids, which are used unchanged. An empty input gives an empty output and
        a warning, or text without a prompt.
      gamma: drafted tokens per target call, γ ≥ 1; with a policy, the most that it can ask for.
        Default 4. Not for trees, whose shape sets the depth.
      sampling: how tokens are chosen, `Greedy()` or `Sampling(temperature=0.7, top_p=0.9)`.
      temperature, top_k, top_p, filters: arguments of `Sampling`, instead of `sampling`;
        temperature 0 is greedy.
      max_new_tokens: at most this many tokens per row, EOS included.
      key: randomness, `jax.random.key(seed)`, or the seed. Greedy decoding needs none.
      num_samples: outputs drawn for each input.
      batch_size: rows decoded at once. Further inputs take the places of rows that have ended.
      max_source_len: longer inputs are truncated, with a warning; default: the target's own.
      rule: acceptance rule, such as `specjax.rules.Block()`, or its name or import path
        (`specjax.rules.parse`); default the paper's `rules.Token()`. With `rules.Gumbel()` plain
        decoding draws by the same noise: both give the same tokens.
      policy: how long drafts are, and which drafted tokens of the batch are verified, such as
        `specjax.policies.svip(threshold=0.3)`; or its name or import path, which is code that runs
        (`specjax.policies.parse`); default `constant(gamma)`. One that needs costs comes with
        `settings`, or is made with your own.
      passes: numbers of positions of smaller verify passes, for all rows of the batch together;
        worth it where fewer positions are cheaper. Each is compiled. A policy that decides slot by
        slot packs the tokens of all rows; otherwise each row has the same number of positions.
      tree: the shape of drafts, such as `specjax.trees.fixed(3, 2, 1)`, or its name
        (`specjax.trees.parse`); default `specjax.trees.chain()`.
      settings: a result of `specjax.tune`, instead of gamma, rule, policy, passes and tree. With
        γ = 0 the draft is not used. A warning names what differs from the models, sampling, batch
        size and limits that they were tuned for.
      log_rounds: log every round, `Result.rounds`: what was drafted, accepted and emitted, and the
        confidence, a probability, and entropy at each drafted token. The tokens are the same. For
        chains.
      carry_state: start each batch from what the policy, or a switch among drafters, learned in
        the last batch. Distributions do not change. At temperatures above 0 a row's tokens then
        depend on earlier inputs, and on how batches were cut.
      check_tokens: refuse a draft whose tokens are not the target's. False accepts it: the output
        is as exact, but drafts fail where tokens differ. `specjax doctor` counts them.

    Raises:
      ValueError: a number out of range, target and draft with different vocabularies, a policy
        that cannot learn from this rule or lacks its costs, no key where tokens are drawn, gamma
        beside a tree, settings beside what they replace, or `carry_state` with nothing to carry.
      FloatingPointError: logits that are not finite; the message names the model.
    """
    chosen = _sampling(sampling, temperature, top_k, top_p, filters)
    given = Drafting(gamma, policy, tree=tree, rule=rule, passes=passes, check_tokens=check_tokens)
    key = key_for(chosen, key)
    run = Run(max_new_tokens, key, num_samples, batch_size, max_source_len, log_rounds, carry_state)
    events, method = _decode(target, draft, texts, building.chosen(settings, given), chosen, run)
    rows = list(streaming.in_order(events, num_samples))
    return Result(rows, draft is None or exactness(method.rule, method.sampling))


class Shorthand(Fields, total=False):
    """The keyword arguments of `generate`."""

    sampling: Sampling | None
    temperature: float
    top_k: int
    top_p: float
    filters: Sequence[Filter | str]
    max_new_tokens: int
    key: Key[Array, ""] | int | None
    num_samples: int
    batch_size: int
    max_source_len: int | None
    settings: Drafting | None
    log_rounds: bool
    carry_state: bool


@refuses
def stream(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    *,
    every: int = 0,
    **given: Unpack[Shorthand],
) -> Iterator[Row | Progress]:
    """Yield the rows of `generate` as they end, and on request the progress of the others.

        for event in specjax.stream(target, draft, texts, every=4):
            if isinstance(event, specjax.Row):
                print(event.index, event.text)

    The tokens are those of `generate`. Other rows are decoded while the caller handles one.

    Args:
      every: yield a `Progress` of each running row after this many rounds; 0: never.
      given: the keyword arguments of `generate`.

    Raises:
      ValueError, FloatingPointError: see `generate`.
    """
    chosen = _of(_sampling, given)
    drafting = building.chosen(given.get("settings"), _of(Drafting, given))
    by_default = {"max_new_tokens": NEW_TOKENS, "eager": True, "every": every}
    run = _of(Run, by_default | given | {"key": key_for(chosen, given.get("key"))})
    events, _ = _decode(target, draft, texts, drafting, chosen, run)
    return events


def _of(make: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Make a value of those arguments that it takes."""
    return make(**{name: given[name] for name in inspect.signature(make).parameters & given.keys()})


def _decode(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    drafting: Drafting,
    sampling: Sampling,
    run: Run,
) -> tuple[Iterator[Row | Progress], Method]:
    """Return an iterator of rows as they end, and the method that decodes them."""
    check_texts(texts)
    method = building.build(target, draft, drafting, sampling=sampling)
    names = target.name, "" if draft is None else drafters.name_of(draft)
    run = dataclasses.replace(run, names=names)
    events = streaming.as_they_end(method, target, texts, run)
    if isinstance(drafting, Settings) and len(texts):
        rows = min(run.batch_size, len(texts) * run.num_samples)
        used = conditions(method, target, draft, rows, run.max_new_tokens)
        drafting.warn_of_other_use(used)
    return events, method


def _sampling(
    sampling: Sampling | None = None,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
    filters: Sequence[Filter | str] = (),
) -> Sampling:
    """The sampling, from either form of arguments; ValueError if both are given."""
    written = Sampling(temperature, top_k, top_p, filters)
    if sampling is None:
        return written
    sampling = as_sampling(sampling)
    if (temperature, top_k, top_p, len(filters)) != (TEMPERATURE, TOP_K, TOP_P, 0):
        raise ValueError(
            f"sampling={sampling} is given beside temperature, top_k, top_p or filters: set them "
            "in Sampling(...)."
        )
    return sampling
