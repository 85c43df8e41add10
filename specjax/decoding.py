"""Texts in, rows out: batches, buckets, errors. Everything jitted lies below, in the two loops."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

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
from specjax.results import Row
from specjax.sampling import Sampling, row_keys
from specjax.speculative import Speculative
from specjax.state import State
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


def aligned(target: Checkpoint, draft: Checkpoint):
    """Both models cut to the ids that both have: two checkpoints may pad one vocabulary apart."""
    models = target.model, draft.model
    size = min(model.vocab_size for model in models)
    return tuple(
        model if model.vocab_size == size else dataclasses.replace(model, vocab_size=size)
        for model in models
    )


def stream(
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
    run: Callable[[Any, Any, State], State] = loop.decode,
) -> Iterator[Row]:
    """Rows in the order of the inputs and samples, as batches finish.

    Args:
      only: numbers of the rows to decode, counted over inputs and their samples; None: all. Their
        randomness is not shifted: a run that was cut off goes on, or shares rows with others.
      width: of the sources or prompts; default: the bucket of each batch's longest.
      names: of target and draft, for errors.
      run: what runs the rounds of a batch.
    """
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("samples", samples),
        ("batch_size", batch_size),
    ):
        whole(name, value, "[1, ∞)")
    sources = tokenize(target, texts, max_source_len)
    check_room(target, sources, max_new_tokens)
    wanted = [(index, sample) for index in range(len(texts)) for sample in range(samples)]
    wanted = wanted if only is None else [wanted[number] for number in only]
    for at in range(0, len(wanted), batch_size):
        chunk = wanted[at : at + batch_size]
        live = [(index, sample) for index, sample in chunk if sources[index]]
        outputs = {}
        if live:
            context, state = prepare(
                method,
                target,
                [sources[index] for index, _ in live],
                live,
                max_new_tokens=max_new_tokens,
                key=key,
                rows=bucket(min(batch_size, len(wanted))) if len(live) > 1 else 1,
                width=width,
            )
            state = run(method, context, state)
            check_finite(state, names)
            outputs = dict(zip(live, read_rows(state, live, target), strict=False))
            del context, state  # before those of the next batch are made
        gamma = method.gamma_max
        for index, sample in chunk:
            yield outputs.get((index, sample)) or Row(
                index, sample, "", [], 0, 0, 0, 0, [0] * (gamma + 1), [0] * gamma
            )


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
):
    """(context, state) before the first round, in bucketed shapes.

    Args:
      labels: (input index, sample) of each source: with the key, all that its noise depends on.
      rows: of the batch; those beyond the sources are given no budget. On a mesh there may be
        more, so that its data axis divides them.
      width: of the sources or prompts; default: the bucket of the longest.
    """
    placement = sharding.placement_of(target.model)
    rows = sharding.padded_rows(rows, placement)
    inputs = pack_for(target, sources, rows=rows, width=width)
    padded = np.zeros((rows, 2), np.int32)
    padded[: len(labels)] = labels
    budget = np.where(np.arange(rows) < len(sources), max_new_tokens, 0).astype(np.int32)
    keys = row_keys(key, jnp.asarray(padded[:, 0]), jnp.asarray(padded[:, 1]))
    room = _room(method, inputs, max_new_tokens)
    given = sharding.place_rows((inputs, keys, jnp.asarray(budget)), placement)
    return loop.start(method, *given, buffer_len=room)


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
) -> Need:
    """Bytes that decoding a batch takes at most, as the compiler tells. Nothing is decoded. On a
    mesh: on each of its devices.

    Args:
      method: of models that are loaded, or of outlines.
      longest: tokens of the longest text.
      rows: decoded at once: `batch_size`, or all that there are if they are fewer.
    """
    programs = compiled(method, target, longest, rows=rows, max_new_tokens=max_new_tokens)
    kept = nbytes((programs.context, programs.state))
    return Need(nbytes(method), kept, max(programs.temporary))


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


def read_rows(state: State, labels: Sequence[tuple[int, int]], target: Checkpoint) -> list[Row]:
    """The finished rows of a batch, one for each label."""
    log = state.policy if isinstance(state.policy, Log) else None
    # One transfer; keys need not come back.
    host = state.tokens, state.length, state.stats, log and (log.written, log.lines)
    tokens, length, stats, logged = sharding.fetch(host)
    rows = []
    for b, (index, sample) in enumerate(labels):
        # What was emitted follows the prompt.
        ids = tokens[b, length[b] - stats.emitted[b] : length[b]].tolist()
        text = target.tokenizer.decode(ids, skip_special_tokens=True) if target.tokenizer else ""
        rows.append(
            Row(
                index=index,
                sample=sample,
                text=text,
                tokens=ids,
                target_calls=int(stats.target_calls[b]),
                drafted=int(stats.drafted[b]),
                levels=int(stats.levels[b]),
                accepted=int(stats.accepted[b]),
                accepted_lengths=stats.accepted_lengths[b].tolist(),
                tested=stats.tested[b].tolist(),
                rounds=tuple(lines_of(logged[0], logged[1], b)) if logged else (),
            )
        )
    return rows
