"""What weights and caches in 8 bits cost and bring: memory, quality, α and time.

    python -m experiments.quantised --config=configs/quantised.py:prose --workdir=runs/int8-prose

A target and a draft, each in floats, with weights in int8, with a cache in int8, and with both:

    memory      bytes of the parameters, and of what one row keeps: cache and encoder's keys
    quality     of the target: perplexity of the references, how many greedy outputs are those of
                the floats, and how many are the reference
    α           of the draft, over what the target generates greedily
    time        per token, plain and speculative, all on the same inputs in turns at batch 1, as
                multiples of the floats' plain decoding

A row for each of `PAIRS`. Writes results.jsonl and report.md to the workdir. A run that was cut off
begins anew.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments.publish import publish
from experiments.reproduce import scores
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, check_counts, identity, open_results, relative
from experiments.train import batches
from specjax import checkpoints, decoding
from specjax.batching import bucket
from specjax.generation import generate
from specjax.measure import metrics, provenance, report, timing
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import gigabytes, nbytes
from specjax.results import summarize
from specjax.sampling import Sampling
from specjax.support import command_line
from specjax.tasks.examples import Example

FLOATS: dict[str, str] = {}
WEIGHTS, CACHE = {"weights": "int8"}, {"cache": "int8"}
BOTH = WEIGHTS | CACHE
PAIRS = {  # by name: how the target is loaded, and the draft
    "floats": (FLOATS, FLOATS),
    "draft's weights": (FLOATS, WEIGHTS),
    "draft's weights and cache": (FLOATS, BOTH),
    "target's weights": (WEIGHTS, FLOATS),
    "target's cache": (CACHE, FLOATS),
    "target's weights and cache": (BOTH, FLOATS),
    "all": (BOTH, BOTH),
}
LONGEST = 192  # tokens of a reference whose perplexity is measured


def main(_) -> None:
    config = flags.FLAGS.config
    for field in ("target", "draft", "task"):
        if not config[field]:
            raise ValueError(f"No {field}: give --config.{field}.")
    if config.weights or config.cache:
        raise ValueError("weights and cache are what is compared here: leave both empty.")
    check_counts(config, "quality_inputs")
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    fill(on)
    rows = on.results.done
    publish(workdir, f"{config.task}: weights and caches in 8 bits", [section(rows)], rows)


def fill(on: Study) -> None:
    """All rows, which are measured in turns: all of them or none."""
    if len(on.results.done) == len(PAIRS):
        return
    on.results.keep(lambda row: False)
    for row in measure(on):
        on.results.append({**row, **identity(on)})


def measure(on: Study) -> list[dict[str, Any]]:
    """A row for each pair."""
    config, limit = on.config, on.config.max_source_len or None
    targets, drafts = (loaded(on, name, role) for role, name in enumerate(("target", "draft")))
    graded = [evaluate(on, target) for target in targets.values()]
    of_target = dict(zip(targets, graded, strict=True))
    reference = of_target["{}"]["outputs"]
    timed = on.texts(config.timed_inputs)
    methods: dict[str, Any] = {}
    for name, pair in PAIRS.items():
        target, draft = targets[str(pair[0])], drafts[str(pair[1])]
        methods[f"{name}, plain"] = decoding.plain(target, Sampling(0.0))
        methods[name] = decoding.speculative(
            target, draft, gamma=config.gamma, sampling=Sampling(0.0)
        )
    methods[timing.PLAIN] = methods.pop("floats, plain")
    found = timing.side_by_side(
        methods,
        on.target,
        decoding.tokenize(on.target, timed, limit),
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        repeats=config.repeats,
    )
    rows = []
    for name, pair in PAIRS.items():
        target, draft = targets[str(pair[0])], drafts[str(pair[1])]
        plain = timing.PLAIN if name == "floats" else f"{name}, plain"
        facts, outputs = of_target[str(pair[0])], of_target[str(pair[0])]["outputs"]
        alpha = metrics.alpha_of_outputs(
            target,
            draft,
            on.texts(config.alpha_inputs),
            outputs[: config.alpha_inputs],
            sampling=Sampling(0.0),
            batch_size=config.batch_size,
            max_source_len=limit,
        )
        counts = summarize(found.outputs(name))
        rows.append(
            {
                "pair": name,
                "draft": relative(config.draft),
                "gamma": config.gamma,
                **{f"target_{key}": value for key, value in sizes(target).items()},
                **{f"draft_{key}": value for key, value in sizes(draft).items()},
                "perplexity": facts["perplexity"],
                "exact": facts["exact"],
                "like_floats": share_equal(outputs, reference),
                "quality_inputs": len(outputs),
                "alpha": alpha.value,
                "alpha_low": alpha.low,
                "alpha_high": alpha.high,
                "alpha_inputs": config.alpha_inputs,
                "tau": counts.tokens_per_iteration,
                **counts.acceptance_fields(),
                **slower("plain", found, plain),
                **slower("speculative", found, name),
                "identical": same_tokens(found, name, plain),
                "timed_inputs": len(timed),
                "repeats": config.repeats,
                "batch": 1,
                "target_dtype": provenance.dtype_of(target),
                "draft_dtype": provenance.dtype_of(draft),
            }
        )
    return rows


def loaded(on: Study, name: str, role: int) -> dict[str, Checkpoint]:
    """A model in every way in which `PAIRS` has it."""
    ways: dict[str, dict[str, Any]] = {str(p[role]): p[role] for p in PAIRS.values()}
    dtype = on.precision["dtype"]
    command_line.say(f"loading the {name} {on.config[name]} in {len(ways)} precisions")
    return {key: checkpoints.load(on.config[name], dtype=dtype, **way) for key, way in ways.items()}


def sizes(model: Checkpoint) -> dict[str, int]:
    """Bytes of the parameters, and of the cache and context of one row: 512 slots, and as many
    tokens of a source."""
    inputs = jax.eval_shape(lambda: decoding.pack_for(model, [[0] * 512], rows=1, width=512))
    kept = jax.eval_shape(lambda model, inputs: model.start(inputs, 512), model.model, inputs)
    return {"bytes": nbytes(model.model), "row_bytes": nbytes(kept)}


def evaluate(on: Study, target: Checkpoint) -> dict[str, Any]:
    """Greedy outputs, and how good the target is by them and by the references."""
    config = on.config
    examples = on.examples[: max(config.quality_inputs, config.alpha_inputs)]
    found = generate(
        target,
        None,
        [example.input for example in examples],
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
    )
    score = scores.score("exact", found.texts, [example.target for example in examples])[0]
    return {
        "outputs": found.tokens,
        "exact": score.value,
        "perplexity": perplexity(target, examples, config.batch_size),
    }


def perplexity(target: Checkpoint, examples: Sequence[Example], rows: int) -> float:
    """exp of the mean surprise at a reference's token, given those before it.

    Of a decoder-only model input and reference are one text, and its first token is given.
    """
    encodes = target.config.is_encoder_decoder
    pairs = batches.encode(
        examples, target.tokenizer, decoder_only=not encodes, eos_ids=target.eos_ids
    )
    start = [target.start_id] if encodes else []
    texts = [[*start, *pair.target.tolist()][: LONGEST + 1] for pair in pairs]
    sources = [
        pair.source.tolist() if encodes else text for pair, text in zip(pairs, texts, strict=True)
    ]
    width, longest = decoding.common_width(sources), bucket(max(map(len, texts)) - 1)
    total = count = 0.0
    for at in range(0, len(texts), rows):
        read, following = (np.zeros((rows, longest), np.int32) for _ in range(2))
        some, lengths = texts[at : at + rows], np.zeros(rows, np.int32)
        for row, text in enumerate(some):
            lengths[row] = len(text) - 1
            read[row, : lengths[row]], following[row, : lengths[row]] = text[:-1], text[1:]
        inputs = decoding.pack_for(target, sources[at : at + rows], rows=rows, width=width)
        total += float(surprise(target.model, inputs, read, following, lengths))
        count += float(lengths.sum())
    return math.exp(total / count)


@jax.jit
def surprise(model, inputs, read, following, lengths):
    """−log of the chance of `following` behind `read`, summed over all rows."""
    context, cache = model.start(inputs, read.shape[1])
    hidden, _ = model(read, jnp.zeros(len(read), jnp.int32), context, cache)
    logprobs = jax.nn.log_softmax(model.logits(hidden))
    own = jnp.take_along_axis(logprobs, following[..., None], axis=2)[..., 0]
    counts = jnp.arange(read.shape[1])[None, :] < lengths[:, None]
    return -jnp.sum(jnp.where(counts, own, 0.0))


def share_equal(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """How many outputs are the same tokens."""
    return float(np.mean([a == b for a, b in zip(outputs, others, strict=True)]))


def slower(name: str, found: timing.Comparison, method: str) -> dict[str, float]:
    """ms per token, and how many times that of the floats' plain decoding; with quartiles."""
    per_token = found.per_token(method)
    times = timing.quartiles(f"{name}_ratio", per_token / found.per_token(timing.PLAIN))
    return {f"{name}_ms": 1e3 * float(np.median(per_token)), **times}


def same_tokens(found: timing.Comparison, name: str, plain: str) -> bool:
    """Whether speculative decoding gave what plain decoding with the same target does."""
    pairs = zip(found.outputs(name), found.outputs(plain), strict=True)
    return all(one.tokens == another.tokens for one, another in pairs)


def section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """A line for each pair."""
    columns: list[report.Column] = [
        ("in 8 bits", lambda row: row["pair"]),
        ("target", lambda row: gigabytes(row["target_bytes"])),
        ("a row", lambda row: gigabytes(row["target_row_bytes"])),
        ("draft", lambda row: gigabytes(row["draft_bytes"])),
        ("perplexity", lambda row: f"{row['perplexity']:.4f}"),
        ("exact", lambda row: f"{row['exact']:.1%}"),
        ("like floats", lambda row: f"{row['like_floats']:.1%}"),
        ("α", lambda row: number(row["alpha"], 3)),
        ("τ", lambda row: number(row["tau"])),
        *report.acceptance(rows),
        ("plain", lambda row: number(row["plain_ratio"])),
        ("speculative", lambda row: number(row["speculative_ratio"])),
        ("identical", lambda row: "yes" if row["identical"] else "NO"),
    ]
    first = rows[0]
    return Section(
        f"{first['task']}, T=0, γ={first['gamma']}",
        columns,
        rows,
        words(rows),
        "target, draft: bytes of the parameters. a row: of the target's cache of 512 slots, and of "
        "the keys and values of 512 tokens of a source. perplexity: of the references. exact: "
        "greedy outputs that are their reference. like floats: those that are the outputs of the "
        "target in floats. plain, speculative: time per token, as a multiple of plain decoding in "
        "floats; medians of interleaved repeats, batch 1. identical: whether speculative decoding "
        "gave the tokens of plain decoding with the same target.",
    )


def words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What is paid for the bytes."""
    by = {row["pair"]: row for row in rows}
    floats, narrow = by["floats"], by["target's weights and cache"]
    drafted = by["draft's weights and cache"]
    return (
        f"The target takes {narrow['target_bytes'] / floats['target_bytes']:.2f} of the bytes of "
        f"its floats, and a row {narrow['target_row_bytes'] / floats['target_row_bytes']:.2f}. "
        f"Perplexity goes from {floats['perplexity']:.4f} to {narrow['perplexity']:.4f}, and "
        f"{narrow['like_floats']:.1%} of the outputs stay the same. A draft in 8 bits has α = "
        f"{drafted['alpha']:.3f} instead of {floats['alpha']:.3f}. Plain "
        f"decoding takes {narrow['plain_ratio']:.2f} times as long as in floats."
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Pair, task and inputs.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
