"""What a user types: texts in, texts out.

It stands above `measure`, which times what `decoding` makes: some policies are told prices first.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax import decoding, drafters
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Policy, needs_prices
from specjax.results import Progress, Result, Row
from specjax.rules import AcceptanceRule, exactness
from specjax.sampling import Filter, Sampling, as_key
from specjax.trees import Shape
from specjax.tuning import fitting, trials
from specjax.types import Text


def generate(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    *,
    gamma: int = 4,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    filters: Sequence[Filter | str] = (),
    max_new_tokens: int = 128,
    key: Key[Array, ""] | int | None = None,
    samples: int = 1,
    batch_size: int = 8,
    max_source_len: int | None = None,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    widths: Sequence[int] = (),
    tree: Shape | str | None = None,
    rounds: bool = False,
    carry: bool = False,
    check_tokens: bool = True,
) -> Result:
    """Decode texts speculatively, or autoregressively where `draft` is None.

    The output's distribution is the target's in both cases, unless the rule is not exact
    (`Result.exact`); at temperature 0 and in float32 the tokens are the same. A row's tokens depend
    on the key, its index among `texts` and its sample number, and not on the rows beside it; but
    for policies that read their batch, and with `carry`.

    Args:
      target: whose distribution the output follows.
      draft: a small checkpoint with the same vocabulary, any other drafter, or the name of either
        (`specjax.drafters.loading.load`); or None.
      texts: inputs, which an encoder-decoder reads and a decoder-only model continues: strings, or
        lists of token ids, which are taken as they are. An empty one gives an empty output and a
        warning, or text from nothing.
      gamma: drafted tokens per target call, γ ≥ 1; with a policy, the most that it can ask for.
      temperature, top_k, top_p, filters: see `specjax.sampling.Sampling`; temperature 0 is greedy.
      max_new_tokens: at most this many tokens per row, EOS included.
      key: randomness, or its seed; default `jax.random.key(0)`.
      samples: draws for each input.
      batch_size: rows decoded at once. Where there are more inputs, each takes the place of a row
        that has ended.
      max_source_len: longer inputs are truncated, with a warning; default: the target's own.
      rule: acceptance rule, or its name or import path (`specjax.rules.load`); default the
        paper's `TokenRule`. With "gumbel" plain decoding draws by the same noise: both give the
        same tokens.
      policy: draft-length policy, or its name or import path (`specjax.policies.load`); default
        `constant(gamma)`. Import paths are code that runs. One that is named and needs prices, such
        as "goodput", gets prices that are measured before decoding, in a few seconds
        (`tuning.fitting.told`). What promises more than its loop decodes in its place: plain
        decoding, or drafts of one length (`tuning.trials.fastest`). At temperatures
        above 0 its outputs then vary from run to run, though not their distribution. For
        reproducible tokens pass a policy with prices.
      widths: verify passes of fewer than gamma + 1 positions, for rounds in which no row's draft is
        longer. Each is compiled; worth it where a narrower pass is cheaper. Of trees: of fewer
        tokens, the root included.
      tree: the shape of drafts, or its name (`specjax.trees.load`): "chain" by default,
        "fixed(branches=(3, 2, 1))", "best_first(width=4, depth=4, nodes=16)". A tree has its own
        depth, and gamma is not read.
      rounds: log every round, `Result.rounds`: what was drafted, accepted and emitted, and the
        confidence and entropy at each drafted token. The tokens are the same. For chains.
      carry: begin each batch with what the policy, and a switch among drafters, learned in the one
        before. A row's distribution stays as it is. At temperatures above 0 its tokens then depend
        on the inputs before it, and on how batches were cut.
      check_tokens: refuse a draft whose tokens are not the target's. False takes it: its output is
        as exact, and drafted tokens are lost where the two differ. `specjax doctor` counts them.

    Raises:
      ValueError: a number out of range, target and draft with different vocabularies, a policy
        that cannot learn from this rule, or nothing that could be carried over.
      FloatingPointError: logits that are not finite; the message names the model.
    """
    method, options = _ready(**locals())
    exact = draft is None or exactness(method.rule, method.sampling)
    return Result(list(decoding.stream(method, target, texts, **options)), exact)


def stream(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    *,
    every: int = 0,
    **options: Any,
) -> Iterator[Row | Progress]:
    """The rows of `generate` one by one, as they end, and on request how far the others are.

        for event in specjax.stream(target, draft, texts, every=4):
            if isinstance(event, specjax.Row):
                print(event.index, event.text)

    The tokens are those of `generate`. While rows are handed out others are decoded.

    Args:
      every: hand out a `Progress` of each row that runs, every so many rounds; 0: never.
      options: the other arguments of `generate`.

    Raises:
      As `generate`.
    """
    given = inspect.signature(generate).bind(target, draft, texts, **options)
    given.apply_defaults()
    method, settings = _ready(**given.arguments)
    return decoding.as_they_end(method, target, texts, every=every, **settings)


def _ready(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    texts: Sequence[Text],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    filters: Sequence[Filter | str],
    max_new_tokens: int,
    key: Key[Array, ""] | int | None,
    samples: int,
    batch_size: int,
    max_source_len: int | None,
    policy: Policy | str | None,
    rounds: bool,
    carry: bool,
    **how: Any,
) -> tuple[Method, dict[str, Any]]:
    """The method, and what `decoding.stream` is told beside it; arguments as of `generate`."""
    decoding.check_texts(texts)
    how["sampling"] = Sampling(temperature, top_k, top_p, filters)
    priced = draft is not None and isinstance(policy, str) and needs_prices(policy)
    method: Any = decoding.build(target, draft, policy=None if priced else policy, **how)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "max_source_len": max_source_len,
        "key": as_key(key),
        "names": (target.name, "" if draft is None else drafters.name_of(draft)),
    }
    if isinstance(policy, str) and priced:
        rows = min(batch_size, len(texts) * samples)
        run = options | {"batch_size": rows}
        prices = fitting.told(policy, method, target, texts, **run)
        method = fitting.tell(method, policy, prices)
        if not (carry or rounds):
            method = trials.fastest(method, target, texts, **run)
    if carry:
        decoding.check_carry(method)
        options["carry"] = True
    if rounds:
        method = decoding.with_log(method, max_new_tokens)
    return method, options | {"samples": samples}
