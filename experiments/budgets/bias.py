"""How wrong are biased verification budgets with real models?

    python -m experiments.budgets.bias --config=configs/budgets.py --workdir=runs/budgets

Along outputs that the target sampled: the total variation between the first token that a round
emits and the target's next token, for each scheme that chooses which drafted slots of a batch are
verified. First tokens of a draft are enumerated, what follows them is sampled. Writes report.md,
and results.jsonl for each family in a directory of its name, to the workdir. A run that was cut off
goes on with the next family.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments.budgets import schemes
from experiments.reproduce import pages
from experiments.reproduce.study import Study, check_counts, identity, open_results, relative
from specjax import decoding
from specjax import sampling as smp
from specjax.batching import bucket
from specjax.drafters.base import started
from specjax.measure import report
from specjax.measure.along import padded
from specjax.rules import at_tokens
from specjax.sampling import Sampling
from specjax.support import command_line
from specjax.support.named import short

TEMPERATURE = 1.0
CHANCES = "before the draw", "own draw read"
CHUNK = 512  # drafts that are continued in one call


def main(_) -> None:
    config = flags.FLAGS.config
    check_counts(config, "contexts", "samples", "neighbours")
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    rows, sections = [], []
    for family in config.families:
        with config.unlocked():
            config[family].bias = {name: config[name] for name in FIELDS}
        results = open_results(command_line.make_workdir(str(workdir / family)), config[family])
        if not results.done:
            for row in measure(Study(config[family], results)):
                results.append(row)
        rows += results.done
        sections.append(section(family, results.done))
    pages.write(workdir, "How wrong biased budgets are", sections, rows)
    console = Console(width=160, markup=False)
    pages.show(console, sections, rows)
    console.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)


FIELDS = "contexts", "batch_sizes", "gammas", "samples", "neighbours", "mass", "cuts", "seed"


class Context(NamedTuple):
    """A prefix of an output, with R drafts of G tokens."""

    p: np.ndarray  # [V], the target's next token
    q: np.ndarray  # [V], the draft's
    tokens: np.ndarray  # [R], the first token of each draft
    weights: np.ndarray  # [R], its probability
    survival: tuple[np.ndarray, np.ndarray]  # [R, G] by each of CHANCES


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
        self.target, self.draft = on.target.model, on.draft(config.draft).model
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
        chance = 1 / (1 + np.exp(-x @ found))
        curvature = x.T @ (x * (chance * (1 - chance))[:, None]) + 1e-6 * np.eye(2)
        found = found + np.linalg.solve(curvature, x.T @ (accepted - chance))
    return found


def calibrate(pair: Pair, outputs: Sequence[int], rng) -> tuple[np.ndarray, np.ndarray]:
    """The fits for both of CHANCES, at every position of these outputs."""
    found = []
    for index in outputs:
        p, q, _ = pair.along(index)
        drawn = np.array([rng.choice(len(one), p=one) for one in q])[:, None]
        own_p, own_q = (np.take_along_axis(x, drawn, 1)[:, 0] for x in (p, q))
        overlap = np.minimum(p, q).sum(axis=1)
        found.append([q.max(axis=1), overlap, own_q, np.minimum(1, own_p / own_q)])
    top, overlap, own, accepted = np.concatenate(found, axis=1)
    return fit(top, overlap), fit(own, accepted)


def contexts(pair: Pair, fits, chosen: Sequence[tuple[int, int]], rng) -> Iterator[Context]:
    """Draft behind each (output, position)."""
    gamma, key, known = max(pair.config.bias.gammas), jax.random.key(pair.config.seed), None
    for number, (index, position) in enumerate(command_line.Steps(chosen, unit="context")):
        if known != index:
            (ps, qs, (context, cache, prompt)), known = pair.along(index), index
        p, q = ps[position], qs[position]
        ids = np.argsort(-q)
        ids = ids[: 1 + np.searchsorted(np.cumsum(q[ids]), 1 - pair.config.bias.mass)]
        repeats = 2 * np.maximum(1, np.rint(pair.config.bias.samples * q[ids] / 2)).astype(int)
        tokens = np.repeat(ids, repeats)
        count = -(-len(tokens) // CHUNK) * CHUNK
        filled = np.resize(tokens, count).astype(np.int32)
        parts = [
            go_on(pair.draft, context, cache, jnp.asarray(part), jnp.int32(prompt + position),
                  pair.sampling, jax.random.fold_in(key, number * count + at), count=gamma - 1)
            for at, part in enumerate(np.split(filled, count // CHUNK))
        ]  # fmt: skip
        beliefs = []
        for first, later in zip(
            (np.full(len(q), q.max()), q), zip(*parts, strict=True), strict=True
        ):
            rest = np.exp(np.concatenate(later)[: len(tokens)].astype(np.float64))
            beliefs.append(np.concatenate([first[tokens][:, None], rest], axis=1))
        survival = tuple(
            np.cumprod(1 / (1 + np.exp(-a - b * logit(belief))), axis=1)
            for (a, b), belief in zip(fits, beliefs, strict=True)
        )
        yield Context(p, q, tokens, np.repeat(q[ids] / repeats, repeats), survival)


# --- Schemes -------------------------------------------------------------------------------------


def measure(on: Study) -> Iterator[dict[str, Any]]:
    """A row for each scheme, batch size and γ."""
    config, rng = on.config.bias, np.random.default_rng(on.config.seed)
    pair = Pair(on)
    fits = calibrate(pair, range(1, len(pair.outputs), 2), rng)
    places = [(i, t) for i in range(0, len(pair.outputs), 2) for t in range(len(pair.outputs[i]))]
    count = min(config.contexts, len(places))
    chosen = sorted(places[at] for at in rng.choice(len(places), count, replace=False))
    found = list(contexts(pair, fits, chosen, rng))
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
            for cell, values in of_batch(found, beside, gamma):
                yield {**cell, "batch": rows, "gamma": gamma, **statistics(values), **facts}


def neighbours(found: Sequence[Context], at: int, rows: int, count: int, rng):
    """Draw drafts of the other rows, whose contexts are any others: [count, rows − 1, G] by each of
    CHANCES."""
    others = rng.choice([i for i in range(len(found)) if i != at], rows - 1, replace=False)
    drawn = [rng.choice(len(found[i].tokens), count, p=norm(found[i].weights)) for i in others]
    return [
        np.stack([found[i].survival[by][d] for i, d in zip(others, drawn, strict=True)], axis=1)
        if rows > 1
        else np.zeros((1, 0, 1))
        for by in range(len(CHANCES))
    ]


def norm(weights: np.ndarray) -> np.ndarray:
    """Weights with a sum of 1."""
    return weights / weights.sum()


def of_batch(found: Sequence[Context], beside, gamma: int):
    """Each scheme with the values of all contexts."""
    for by, chances in enumerate(CHANCES):
        for name, rule in schemes.N_RULES.items():
            costs = schemes.COSTS if name != "fixed N" else {"": schemes.COSTS["affine"]}
            for cost_name, cost in costs.items():
                values = [
                    estimated(
                        one, schemes.verified(one.survival[by][:, :gamma], others, rule, cost)
                    )
                    for one, near in zip(found, beside, strict=True)
                    for others in [near[by][:, :, :gamma].reshape(len(near[by]), -1)]
                ]
                yield {"scheme": name, "chances": chances, "cost": cost_name}, values


def exact(context: Context, verified: np.ndarray) -> tuple[float, float]:
    """The total variation, twice: nothing is estimated."""
    found = schemes.total_variation(schemes.emitted(context.p, context.q, verified), context.p)
    return found, found


def estimated(context: Context, verified: np.ndarray) -> tuple[float, float]:
    """The total variation by all drafts, whose mean is too high, and by halves, too low."""

    def law(rows: slice, columns: slice) -> np.ndarray:
        chance = verified[rows, columns].mean(axis=1)
        given = context.tokens[rows], context.weights[rows], context.q
        return schemes.emitted(context.p, context.q, schemes.by_token(chance, *given))

    half = max(1, verified.shape[1] // 2)
    one, two = law(slice(0, None, 2), slice(half)), law(slice(1, None, 2), slice(-half, None))
    low = (schemes.gain(one, two, context.p) + schemes.gain(two, one, context.p)) / 2
    return schemes.total_variation(law(slice(None), slice(None)), context.p), low


def statistics(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Over contexts; to 4 digits."""
    found, low = np.array(values).T
    numbers = {
        "mean": found.mean(),
        "at_least": low.mean(),
        "median": np.median(found),
        "q95": np.quantile(found, 0.95),
        "largest": found.max(),
    }
    return {name: float(f"{value:.3g}") for name, value in numbers.items()}


def section(family: str, rows: Sequence[dict[str, Any]]) -> pages.Section:
    """A line for each scheme, batch size and γ."""
    names = "mean", "at_least", "median", "q95", "largest"
    columns: list[report.Column] = [
        ("scheme", lambda row: row["scheme"]),
        ("chances", lambda row: row.get("chances", "–")),
        ("cost", lambda row: row.get("cost") or "–"),
        ("rows", lambda row: str(row["batch"])),
        ("γ", lambda row: str(row.get("gamma", "–"))),
        *((name, functools.partial(lambda name, row: f"{row[name]:.3g}", name)) for name in names),
        ("rounds", lambda row: f"{row['mean'] ** -2:,.0f}" if row["mean"] > 1e-9 else "–"),
    ]
    return pages.Section(f"{family}, {short(rows[0]['draft'])}", columns, rows)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for rows and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
