"""Small timings behind docs/performance.md, so that each of its tables can be made again.

    python -m experiments.probe --config=configs/embedded.py --workdir=runs/probe

Parts: orientation (which way a weight should lie), draws (random choices over a vocabulary),
buffers (a call of a decoder by the length of its cache), positions (a call of the target by the
number of its tokens), phases (c and v(γ) of the family), calls (a call of a loop by its number of
rounds). Writes their rows to probe.jsonl, with the load of the
machine before each. Compilation excluded, medians, variants in turns; about 3 minutes on 2 idle
cores.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import config_flags
from rich.console import Console
from tqdm import tqdm

from experiments import common
from experiments.provenance import Results, dtype_of
from specjax import autoregressive, cost, decoding, devices, report, sampling, speculative
from specjax.batching import bucket
from specjax.models import hub
from specjax.models.language_model import LanguageModel
from specjax.models.layers import project
from specjax.models.t5 import T5, T5Config
from specjax.speculative import Speculative
from specjax.state import unfinished
from specjax.types import Inputs

REPEATS = 40
STEPS = 10  # inside one jitted loop, so that dispatch hardly counts
GAMMAS = (1, 2, 3, 4, 5, 7, 10)
ROUNDS = (0, 1, 2, 4, 8, 16)


def main(_) -> None:
    config = flags.FLAGS.config
    out = Results(common.make_workdir(flags.FLAGS.workdir) / "probe.jsonl")
    console = Console(width=110, markup=False)
    parts = (orientation, draws, buffers, positions, phases, calls)
    for part in tqdm(parts, unit="part", disable=None):
        load = os.getloadavg()[0]
        rows = part(config)
        columns = [_column(name) for name in rows[0]]
        console.print(report.table(columns, rows, part.__name__))
        keep(out, part.__name__, rows, config, load)


def keep(out: Results, part: str, rows: list[dict[str, Any]], config, load: float) -> None:
    """Write the rows of a part, with the load of the machine before it."""
    of_family = part in ("positions", "phases", "calls")  # the others make their arrays themselves
    dtype = dtype_of(hub.load(config.target)) if of_family else "float32"
    for row in rows:
        said = {"dtype": dtype, "batch": row.get("B", 1), "seed": config.seed}
        out.append({"part": part, **row, "load": load, **said})


def medians(variants: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each variant, all taking turns; the first turn compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-1, REPEATS):
        for name, run in variants.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * float(np.median(values)) for name, values in seconds.items()}


def orientation(_) -> list[dict[str, Any]]:
    """Milliseconds of 6 or 12 feed-forward pairs on K rows, by the way their weights lie."""
    rows = []
    for width, inner, layers in ((256, 1024, 6), (768, 2048, 12)):
        shapes = ((inner, width), (width, inner))
        key = jax.random.key(0)
        stored = [[0.02 * jax.random.normal(key, s) for s in shapes] for _ in range(layers)]
        for input_first in (False, True):
            weights = jax.tree.map(lambda w: w.T, stored) if input_first else stored
            run = partial(_stack, input_first=input_first)
            found = medians(
                {f"K={k}": partial(run, jnp.ones((1, k, width)), weights) for k in (1, 2, 4, 6, 8)}
            )
            rows.append(
                {
                    "shape": f"{layers} × {width}→{inner}→{width}",
                    "weights": "(in, out)" if input_first else "(out, in)",
                    **{name: ms / STEPS for name, ms in found.items()},
                }
            )
    return rows


@partial(jax.jit, static_argnames="input_first")
def _stack(x, weights, input_first: bool):
    def once(_, x):
        for up, down in weights:
            hidden = jax.nn.relu(project(x, up, input_first))
            x = x + 1e-3 * project(hidden, down, input_first)
        return x

    return jax.lax.fori_loop(0, STEPS, once, x)


def draws(_) -> list[dict[str, Any]]:
    """Milliseconds of one choice for one row, by V; dispatch of a call included."""
    rows = []
    for width in (2048, 32128):
        logprobs = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (1, width)))
        keys = jax.random.split(jax.random.key(1), 1)
        variants = {
            "draw": partial(jax.jit(sampling.draw), keys, jnp.exp(logprobs)),
            "draw_by_gumbel": partial(jax.jit(sampling.draw_by_gumbel), keys, logprobs),
            "argmax": partial(jax.jit(sampling.argmax), logprobs),
            "jnp.argmax": partial(jax.jit(jnp.argmax, static_argnames="axis"), logprobs, axis=-1),
            "top-k law": partial(
                jax.jit(sampling.standardize), logprobs, sampling.sampling(1.0, top_k=50)
            ),
        }
        rows.append({"V": width, **medians(variants)})
    return rows


def buffers(_) -> list[dict[str, Any]]:
    """Milliseconds of a call of 6 decoder layers of T5-base's width, by the length of its cache.

    48 slots are filled, whatever the buffer.
    """
    config = T5Config(
        vocab_size=4096, d_model=768, d_ff=2048, num_heads=12, num_layers=1, num_decoder_layers=6
    )
    model = LanguageModel.of(T5(config, rngs=nnx.Rngs(0)))
    rows = []
    for batch in (1, 8):
        started = {length: _started(model, batch, length) for length in (128, 512, 2048)}
        for count in (1, 4):
            run = partial(jax.jit(_calls), model, jnp.ones((batch, count), jnp.int32))
            found = medians({f"T={n}": partial(run, *state) for n, state in started.items()})
            rows.append({"B": batch, "K": count} | {k: ms / STEPS for k, ms in found.items()})
    return rows


def positions(config) -> list[dict[str, Any]]:
    """Milliseconds of a call of the family's target by K: as XLA compiles it, and without YNN.

    YNN is the library that XLA's CPU backend hands products with K ≥ 2 to.
    """
    model = hub.load(config.target).model
    started = _started(model, 1, 128)
    compiled = {"as it is": jax.jit(_calls)}
    if devices.device_of(model).platform == "cpu":
        options = {"xla_cpu_experimental_ynn_fusion_type": ""}
        compiled["without YNN"] = jax.jit(_calls, compiler_options=options)
    found = medians(
        {
            f"{name}, {count}": partial(run, model, jnp.ones((1, count), jnp.int32), *started)
            for count in (1, 2, 4, 6, 8, 11)
            for name, run in compiled.items()
        }
    )
    return [
        {"products": name}
        | {f"K={key.split()[-1]}": ms / STEPS for key, ms in found.items() if key.startswith(name)}
        for name in compiled
    ]


def _started(model, batch: int, length: int):
    """Context and cache for a source of 32 ids."""
    ids, ones = jnp.ones((batch, 32), jnp.int32), jnp.ones((batch,), jnp.int32)
    inputs = Inputs(ids, 32 * ones, ids[:, :1], ones)
    return jax.jit(model.start, static_argnums=1)(inputs, length)


def _calls(model, tokens, context, cache):
    """STEPS calls, each of the tokens that the one before chose, at the same 48 filled slots."""

    def once(_, carry):
        tokens, cache = carry
        start = jnp.full((tokens.shape[0],), 48, jnp.int32)
        hidden, cache = model(tokens, start, context, cache)
        return sampling.argmax(model.logits(hidden)), cache

    return jax.lax.fori_loop(0, STEPS, once, (tokens, cache))[0]


def phases(config) -> list[dict[str, Any]]:
    """A target step in milliseconds, and c and v(γ) in units of it, at batch 1."""
    target, texts = _setting(config)
    rows = []
    for path in config.drafts:
        for temperature in config.temperatures:
            method = _method(config, target, path, temperature)
            contexts, state = _prepared(config, target, method, texts, 0)
            found = cost.measure(method, contexts, state, GAMMAS, repeats=REPEATS)
            rows.append(
                {
                    "draft": path.rsplit("/", 1)[-1],
                    "T": temperature,
                    "step ms": 1e3 * found.target_step,
                    "c": found.c,
                    **{f"v({gamma})": found.v(gamma) for gamma in GAMMAS},
                }
            )
    return rows


def calls(config) -> list[dict[str, Any]]:
    """Milliseconds of a call of each loop by its number of rounds, right after the encoder.

    No row ends, so a call takes all its rounds; with 0 it is what dispatch costs. Of that,
    flattening the method's pytree is timed alone, again and again on warm caches.
    """
    target, texts = _setting(config)
    chosen = sampling.sampling(0.0)
    never = jnp.asarray([-1], jnp.int32)
    methods = {
        "autoregressive": decoding.build(target, None, gamma=1, sampling=chosen),
        "speculative, γ=5": _method(config, target, config.drafts[-1], 0.0, gamma=5),
    }
    rows = []
    for name, method in methods.items():
        method = dataclasses.replace(method, eos_ids=never)
        ms: dict[int, list[float]] = {count: [] for count in ROUNDS}
        for turn in range(-1, REPEATS):
            for count in ROUNDS:
                contexts, state = _prepared(config, target, method, texts, 0)
                begin = time.perf_counter()
                state = jax.block_until_ready(_rounds(method, contexts, state, count))
                if turn >= 0:
                    ms[count].append(1e3 * (time.perf_counter() - begin))
                assert int(state.rounds[0]) == count
        flattening = medians({"flatten": partial(jax.tree.leaves, method)})
        found = {str(count): float(np.median(values)) for count, values in ms.items()}
        spread = np.subtract(*np.quantile(ms[ROUNDS[-1]], [0.75, 0.25]))
        rows.append(
            {"loop": name, **found, f"quartiles of {ROUNDS[-1]}": float(spread)} | flattening
        )
    return rows


@partial(jax.jit, donate_argnames="state")
def _rounds(method, contexts, state, count):
    def body(state):
        if isinstance(method, Speculative):
            return speculative.step(method, contexts, state)[0]
        return autoregressive.step(method, contexts, state)

    def more(state):
        return unfinished(state) & (state.rounds[0] < count)

    return jax.lax.while_loop(more, body, state)


def _setting(config) -> tuple[hub.Checkpoint, list[str]]:
    examples = common.load_examples(config)[: config.timed_inputs]
    return hub.load(config.target), [example.input for example in examples]


def _method(
    config, target: hub.Checkpoint, path: str, temperature: float, gamma: int = GAMMAS[-1]
) -> Speculative:
    chosen = sampling.sampling(temperature)
    method = decoding.build(target, path, gamma=gamma, sampling=chosen)
    assert isinstance(method, Speculative)
    return method


def _prepared(config, target: hub.Checkpoint, method, texts: list[str], index: int):
    sources = decoding.tokenize(target, texts)
    return jax.block_until_ready(
        decoding.prepare(
            method,
            target,
            [sources[index]],
            [(index, 0)],
            max_new_tokens=config.max_new_tokens,
            key=jax.random.key(config.seed),
            rows=1,
            width=bucket(max(map(len, sources)), smallest=16),
        )
    )


def _column(name: str) -> report.Column:
    """The field under its own name."""
    return name, lambda row: _cell(row[name])


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The family.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory of probe.jsonl.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, __doc__)
