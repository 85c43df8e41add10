"""How wrong are biased verification budgets with real models?

    python -m experiments.budgets.bias --config=configs/budgets.py --workdir=runs/budgets

Along outputs that the target sampled: the total variation between the first token that a round
emits and the target's next token, for each scheme that chooses which drafted slots of a batch are
verified. First tokens of a draft are enumerated, what follows them is sampled. Writes report.md,
and results.jsonl for each family in a directory of its name, to the workdir. A run that was cut off
goes on with the next family.
"""

import collections
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments.budgets import schemes
from experiments.publish import publish
from experiments.reproduce import pages
from experiments.reproduce.study import Study, check_counts, identity, open_results, relative
from specjax import decoding
from specjax import sampling as smp
from specjax.batching import bucket
from specjax.drafters.base import started
from specjax.measure import provenance, report
from specjax.measure.along import padded
from specjax.models.checkpoint import Checkpoint
from specjax.sampling import Sampling
from specjax.support import command_line, files
from specjax.support.named import short

TEMPERATURE = 1.0
# What a slot's chance reads: the draft's probability of its most likely token, which is known
# before the draw, or of the drawn one; raw, or calibrated.
CHANCES = "top token", "top token, raw", "drawn token", "drawn token, raw"
FIELDS = (
    "batch_sizes", "gammas", "knees", "samples", "neighbours", "mass", "cuts", "seed",
)  # fmt: skip
ROUNDING = 1e-12  # total variation below it is 0
CHUNK = 512  # drafts that are continued in one call


def main(_) -> None:
    config = flags.FLAGS.config
    check_counts(config, "samples", "neighbours")
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    rows, sections = [], []
    for family in config.families:
        with config.unlocked():
            config[family].bias = {name: config[name] for name in FIELDS if name in config}
        results = open_results(command_line.make_workdir(str(workdir / family)), config[family])
        if not results.done:
            provenance.write(results.path, list(measure(Study(config[family], results))))
        found = files.read_rows(results.path)
        rows += found
        sections.append(section(family, found))
    publish(workdir, "How wrong biased budgets are", sections, rows)


class Context(NamedTuple):
    """A prefix of an output, with R drafts of G tokens."""

    p: np.ndarray  # [V], the target's next token
    q: np.ndarray  # [V], the draft's
    tokens: np.ndarray  # [R], the first token of each draft
    weights: np.ndarray  # [R], its probability
    survival: tuple[np.ndarray, ...]  # [R, G] by each of CHANCES


class Found(NamedTuple):
    """One scheme in one context."""

    variation: float  # the total variation by all drafts, whose mean is too high
    at_least: float  # by halves of the drafts, whose mean is too low
    verified: float  # the chance that slot 1 is verified


# --- Models --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="room")
def read(model, inputs, output, sampling: Sampling, room: int):
    """Read one output: the distribution before each of its tokens, and the context and cache."""
    context, cache = started(model, inputs, room)
    last = inputs.prompt_len - 1
    tokens = jnp.concatenate([jnp.take_along_axis(inputs.prompt, last[:, None], 1), output], 1)
    hidden, cache = model(tokens, last, context, cache)
    return smp.standardize(model.logits(hidden), sampling)[0], context, cache


@functools.partial(jax.jit, static_argnames="count")
def go_on(model, context, cache, tokens, position, sampling: Sampling, key, count: int):
    """Draft `count` tokens behind each of the [R] tokens: log-probabilities of the most likely
    token and of the drafted one, [R, count]."""

    def of_one(token, key):
        def step(carry, slot):
            token, cache = carry
            hidden, cache = model(token[None, None], (position + slot)[None], context, cache)
            logprobs = smp.standardize(model.logits(hidden), sampling)[0, 0]
            token = jax.random.categorical(jax.random.fold_in(key, slot), logprobs)
            token = token.astype(jnp.int32)
            return (token, cache), (logprobs.max(), logprobs[token])

        return jax.lax.scan(step, (token, cache), jnp.arange(count, dtype=jnp.int32))[1]

    return jax.vmap(of_one)(tokens, jax.random.split(key, len(tokens)))


def probabilities(logprobs: jax.Array) -> np.ndarray:
    """In float64, with a sum of 1."""
    probs = np.exp(np.asarray(logprobs, np.float64))
    return probs / probs.sum(axis=-1, keepdims=True)


class Pair:
    """Both models of a family, read along outputs of the target."""

    def __init__(self, on: Study):
        config = on.config
        draft = on.draft(config.draft)
        if not isinstance(draft, Checkpoint):
            raise ValueError(f"draft={config.draft!r} is no model: give its directory.")
        self.target, self.draft = on.target.model, draft.model
        self.sampling, self.config = on.sampling(TEMPERATURE), config
        self.outputs = on.outputs(TEMPERATURE)
        texts = on.texts(len(self.outputs))
        self.sources = decoding.tokenize(on.target, texts, config.max_source_len or None)
        self.width = decoding.common_width(self.sources)
        self.longest = bucket(max(map(len, self.outputs)) + 1)
        self.pack = functools.partial(decoding.pack_for, on.target, rows=1, width=self.width)

    def along(self, index: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """The target's and the draft's distributions before each token, and the draft's state."""
        inputs, output = self.pack([self.sources[index]]), self.outputs[index]
        ids, _ = padded([output], 1, self.longest)
        room = bucket(inputs.prompt.shape[1] + self.longest + max(self.config.bias.gammas))
        target, *_ = read(self.target, inputs, ids, self.sampling, room=room)
        draft, *state = read(self.draft, inputs, ids, self.sampling, room=room)
        p, q = (probabilities(x[: len(output)]) for x in (target, draft))
        return p, q, (*state, int(inputs.prompt_len[0]))


# --- Chances -------------------------------------------------------------------------------------


def logit(probs: np.ndarray) -> np.ndarray:
    """Log-odds, of at most 1 − 1e-6."""
    probs = np.clip(probs, 1e-9, 1 - 1e-6)
    return np.log(probs / (1 - probs))


def fit(beliefs: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Fit P(accepted) = sigmoid(a + b·logit(belief)) by Newton's method: (a, b)."""
    x = np.stack([np.ones_like(beliefs), logit(beliefs)], axis=1)
    found = np.zeros(2)
    for _ in range(25):
        chance = calibrated(beliefs, found)
        curvature = x.T @ (x * (chance * (1 - chance))[:, None]) + 1e-6 * np.eye(2)
        found = found + np.linalg.solve(curvature, x.T @ (accepted - chance))
    return found


def calibrated(beliefs: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The chances that a fit gives."""
    return 1 / (1 + np.exp(-found[0] - found[1] * logit(beliefs)))


def calibrate(pair: Pair, outputs: Sequence[int], rng) -> tuple[np.ndarray, np.ndarray]:
    """Fit the chance before the draw and after it, at every position of these outputs."""
    found = []
    for index in outputs:
        p, q, _ = pair.along(index)
        drawn = np.array([rng.choice(len(one), p=one) for one in q])[:, None]
        own_p, own_q = (np.take_along_axis(x, drawn, 1)[:, 0] for x in (p, q))
        overlap = np.minimum(p, q).sum(axis=1)
        found.append([q.max(axis=1), overlap, own_q, np.minimum(1, own_p / own_q)])
    top, overlap, own, accepted = np.concatenate(found, axis=1)
    return fit(top, overlap), fit(own, accepted)


def contexts(pair: Pair, fits, chosen: Sequence[tuple[int, int]]) -> Iterator[Context]:
    """Draft behind each (output, position)."""
    gamma, key, known = max(pair.config.bias.gammas), jax.random.key(pair.config.seed), None
    for number, (index, position) in enumerate(
        command_line.Steps(chosen, unit="context", resumes=False)
    ):
        if known != index:
            (ps, qs, (context, cache, prompt)), known = pair.along(index), index
        p, q = ps[position], qs[position]
        ids = np.argsort(-q)
        ids = ids[: 1 + np.searchsorted(np.cumsum(q[ids]), 1 - pair.config.bias.mass)]
        repeats = 2 * np.maximum(1, np.rint(pair.config.bias.samples * q[ids] / 2)).astype(int)
        tokens = np.repeat(ids, repeats)
        count = -(-len(tokens) // CHUNK) * CHUNK
        filled = np.resize(tokens, count).astype(np.int32)
        keys = jax.random.split(jax.random.fold_in(key, number), count // CHUNK)
        parts = [
            go_on(pair.draft, context, cache, part, jnp.int32(prompt + position), pair.sampling,
                  one, count=gamma - 1)
            for part, one in zip(jnp.split(jnp.asarray(filled), len(keys)), keys, strict=True)
        ]  # fmt: skip
        top, own = (
            np.exp(np.concatenate(each, dtype=np.float64))[: len(tokens)]
            for each in zip(*parts, strict=True)
        )
        top = np.insert(top, 0, q.max(), axis=1)
        own = np.insert(own, 0, q[tokens], axis=1)
        chances = calibrated(top, fits[0]), top, calibrated(own, fits[1]), own
        survival = tuple(np.cumprod(chance, axis=1) for chance in chances)
        yield Context(p, q, tokens, np.repeat(q[ids] / repeats, repeats), survival)


# --- Schemes -------------------------------------------------------------------------------------


def measure(on: Study) -> Iterator[dict[str, Any]]:
    """A row for each scheme, batch size and γ."""
    config, rng = on.config.bias, np.random.default_rng(on.config.seed)
    pair = Pair(on)
    fits = calibrate(pair, range(1, len(pair.outputs), 2), rng)
    places = [(i, t) for i in range(0, len(pair.outputs), 2) for t in range(len(pair.outputs[i]))]
    count = min(on.config.contexts, len(places))
    if count < max(config.batch_sizes):
        raise ValueError(
            f"{count} contexts are fewer than a batch of {max(config.batch_sizes)} rows: raise "
            "contexts and alpha_inputs."
        )
    chosen = sorted(places[at] for at in rng.choice(len(places), count, replace=False))
    found = list(contexts(pair, fits, chosen))
    facts = {
        "draft": relative(on.config.draft),
        "temperature": TEMPERATURE,
        "contexts": count,
        "calibration": [[round(float(x), 3) for x in one] for one in fits],
        **identity(on),
    }
    for cut in config.cuts:
        values = [exact(one, (one.q >= cut).astype(float)) for one in found]
        yield {"scheme": f"cut below {cut:g}", "batch": 1, **statistics(values), **facts}
    for rows in config.batch_sizes:
        beside = [neighbours(found, at, rows, config.neighbours, rng) for at in range(count)]
        for gamma in config.gammas:
            for cell, values in of_batch(found, beside, gamma, config.knees):
                yield {**cell, "batch": rows, "gamma": gamma, **statistics(values), **facts}


def neighbours(found: Sequence[Context], at: int, rows: int, count: int, rng) -> list[np.ndarray]:
    """Survival in drafts of the other rows, which continue any other contexts: an array
    [2·count, rows − 1, G] by each of CHANCES."""
    others = rng.choice(np.delete(np.arange(len(found)), at), rows - 1, replace=False)
    weights = (found[i].weights for i in others)
    drawn = [rng.choice(len(one), 2 * count, p=one / one.sum()) for one in weights]
    shape = rows - 1, 2 * count, found[at].survival[0].shape[1]
    return [
        np.array([found[i].survival[by][draft] for i, draft in zip(others, drawn, strict=True)])
        .reshape(shape)
        .swapaxes(0, 1)
        for by in range(len(CHANCES))
    ]


def of_batch(
    found: Sequence[Context], beside: Sequence[list[np.ndarray]], gamma: int, knees: Sequence[float]
) -> Iterator[tuple[dict[str, Any], list[Found]]]:
    """Each scheme, with the values of all contexts."""
    costs = {(name, knee): cost for knee in knees for name, cost in schemes.costs(knee).items()}
    for by, chances in enumerate(CHANCES):
        values = collections.defaultdict(list)
        for context, near in zip(found, beside, strict=True):
            others = near[by][:, :, :gamma].reshape(len(near[by]), -1)
            ranked = schemes.ranked(context.survival[by][:, :gamma], others)
            for name, rule in schemes.N_RULES.items():
                if name == "early stop" and chances.startswith("drawn"):
                    continue
                for cost, of in costs.items() if name != "fixed N" else [(("", 0), np.ones_like)]:
                    values[name, *cost].append(estimated(context, ranked.verified(rule, of)))
        for (name, cost, knee), each in values.items():
            yield {"scheme": name, "chances": chances, "cost": cost, "knee": knee}, each


def exact(context: Context, verified: np.ndarray) -> Found:
    """The total variation of a decision [V] about the drafted token: nothing is estimated."""
    p, q = context.p, context.q
    found = schemes.total_variation(schemes.emitted(p, q, verified), p)
    return Found(found, found, verified @ q)


def estimated(context: Context, verified: np.ndarray) -> Found:
    """The total variation of decisions [R, M] about each draft beside M drafts of the others."""
    p, q = context.p, context.q

    def given(rows: slice, columns: slice) -> np.ndarray:
        chance = verified[rows, columns].mean(axis=1)
        return schemes.by_token(chance, context.tokens[rows], context.weights[rows], q)

    halves = slice(0, None, 2), slice(1, None, 2)
    one, two = (schemes.emitted(p, q, given(half, half)) for half in halves)
    low = (schemes.gain(one, two, p) + schemes.gain(two, one, p)) / 2
    return exact(context, given(slice(None), slice(None)))._replace(at_least=low)


def statistics(values: Sequence[Found]) -> dict[str, float]:
    """Over contexts."""
    found, low, verified = np.array(values).T
    numbers = {
        "mean": found.mean(),
        "at_least": low.mean(),
        "median": np.median(found),
        "q95": np.quantile(found, 0.95),
        "largest": found.max(),
        "verified": verified.mean(),
    }
    return {name: float(f"{value:.2g}") for name, value in numbers.items()}


# --- Report --------------------------------------------------------------------------------------


def section(family: str, rows: Sequence[dict[str, Any]]) -> pages.Section:
    """A line for each biased scheme; its last columns show the cell of the largest mean."""
    by_scheme = collections.defaultdict(list)
    for row in rows:
        cost = f"{row['cost']} {row['knee']:g}" if row.get("cost") else "–"
        by_scheme[row["scheme"], row.get("chances", "–"), cost].append(row)
    lines, unbiased, most = [], collections.defaultdict(list), 0.0
    for scheme, cells in by_scheme.items():
        if (largest := max(cell["largest"] for cell in cells)) < ROUNDING:
            unbiased[" by ".join(scheme[:2])].append(scheme[2])
            most = max(most, largest)
        else:
            worst = max(cells, key=lambda row: row["mean"])
            named = dict(zip(("scheme", "chances", "cost"), scheme, strict=True))
            lines.append({**worst, **named, "cells": cells})
    batches = sorted({row["batch"] for row in rows})
    columns: list[report.Column] = [
        *((title, operator.itemgetter(title)) for title in ("scheme", "chances", "cost")),
        *((f"B = {batch}", functools.partial(means, batch)) for batch in batches),
        *((name.replace("_", " "), functools.partial(digits, name)) for name in SHOWN),
        ("rounds", lambda line: f"{line['mean'] ** -2:,.0f}"),
    ]
    listed = "; ".join(f"{name} ({', '.join(costs)})" for name, costs in unbiased.items())
    listed = listed.replace(" (–)", "")
    words = f"Unbiased, at most {most:.1g} in any context: {listed}."
    title = f"{family}, {short(rows[0]['draft'])}, {rows[0]['contexts']} contexts"
    return pages.Section(title, columns, lines, words, LEGEND, measured=rows)


SHOWN = "at_least", "median", "q95", "largest", "verified"
LEGEND = (
    "B: mean total variation of a round's first token, at each γ. Then the cell of the largest "
    "mean: a lower bound of it (by halves of the drafts), median, 95% quantile and largest over "
    "contexts, the chance that slot 1 is verified, and 1/mean²: rounds until a test notices. "
    "All but the cuts may be off by the mass of first tokens that are left out, 1e-4 in the config."
)


def digits(name: str, line: dict[str, Any]) -> str:
    """A cell with two digits."""
    return f"{line[name]:.2g}" if abs(line[name]) > ROUNDING else "0"


def means(batch: int, line: dict[str, Any]) -> str:
    """The mean at each γ."""
    return ", ".join(digits("mean", row) for row in line["cells"] if row["batch"] == batch) or "–"


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for rows and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
