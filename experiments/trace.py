"""Trace once: record what both models say along the target's outputs, for `experiments.replay`.

    python -m experiments.trace --config=configs/embedded.py --workdir=runs/trace

For each draft and temperature of the config: outputs of the target, a rollout of --gamma_max
drafted tokens from every position of them with what both models said there, and what a draft step,
a verify pass and a round take here. Writes an npz file for each and results.jsonl, a row for each,
to the workdir. A run that was cut off goes on where it was.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments import common
from experiments.reproduce import gains, study
from experiments.reproduce.study import Study, find, short
from specjax import cost, decoding, replay, report, rollouts
from specjax.policies.constant import Constant
from specjax.rollouts import Rollouts

COLUMNS: list[report.Column] = [
    ("draft", lambda row: short(row["draft"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("outputs", lambda row: str(row["outputs"])),
    ("positions", lambda row: str(row["positions"])),
    ("α", lambda row: f"{row['alpha']:.3f}"),
    ("c", lambda row: f"{row['c']:.3f}"),
    ("v(γ_max)", lambda row: f"{row['v'][-1]:.2f}"),
    ("MB", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    ("s", lambda row: f"{row['seconds']:.0f}"),
]


def main(_) -> None:
    config, args = flags.FLAGS.config, flags.FLAGS
    if args.gamma_max < 1 or args.inputs < 1:
        raise ValueError(f"--gamma_max={args.gamma_max} and --inputs={args.inputs} must be ≥ 1.")
    with config.unlocked():
        config.trace = {name: args[name].value for name in ("gamma_max", "inputs", "hidden")}
    workdir = common.make_workdir(args.workdir)
    on = Study(config, study.open_results(workdir, config))
    cells = study.keys(config, (*config.timed_ngrams, *config.drafts))
    for cell in cells:
        if not find(on.results.done, cell):
            on.results.append({**cell, **measure(on, cell, workdir), **study.identity(on)})
    rows = [row for cell in cells if (row := find(on.results.done, cell))]
    console = Console()
    console.print(report.table(COLUMNS, rows, f"Rollouts of {args.gamma_max} tokens: {workdir}"))


def measure(on: Study, cell: dict[str, Any], workdir) -> dict[str, Any]:
    """Record and save; and time the phases."""
    config, draft, temperature = on.config, cell["draft"], cell["temperature"]
    count, gamma_max = min(config.trace.inputs, len(on.examples)), config.trace.gamma_max
    begin = time.perf_counter()
    outputs = [row.tokens for row in on.decode(None, temperature, count)]
    found = rollouts.record(
        on.target,
        on.draft(draft),
        on.texts(count),
        outputs,
        gamma_max=gamma_max,
        sampling=on.sampling(temperature),
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
        hidden=config.trace.hidden,
    )
    seconds = time.perf_counter() - begin
    file = workdir / f"{short(draft)}-T{temperature:g}.npz"
    rollouts.save(file, found)
    emitted = np.asarray(found.emitted)
    tokens = np.arange(found.tokens.shape[1]) < emitted[:, None]
    texts = decoding.tokenize(on.target, on.texts(1), config.max_source_len or None)
    return {
        "file": file.name,
        "gamma_max": gamma_max,
        "outputs": len(emitted),
        "positions": int(tokens.sum()),
        "alpha": float(np.asarray(found.overlap)[:, :, 0][tokens].mean()),
        "bytes": file.stat().st_size,
        "seconds": seconds,
        **costs(on, draft, temperature, found, texts),
    }


def costs(on: Study, draft, temperature, found: Rollouts, texts) -> dict[str, Any]:
    """What `Meter` shows at batch 1, in target steps."""
    meter = make_meter(on, draft, temperature, found, texts)
    for _ in range(2 * on.config.repeats):
        meter.take()
    return in_steps(meter.costs(), found.gamma_max)


def make_meter(on: Study, draft, temperature, found: Rollouts, texts, widths=None) -> cost.Meter:
    """Of phases, of rounds for some γ up to γ_max, of rounds in the loop of a policy that drafts
    0 … γ_max tokens, and of calls that are as long as outputs.

    Args:
      widths: those of the policies' loop; default: one for each length.
    """
    gamma_max = found.gamma_max
    plain = gains.plain_method(on, temperature)
    spec = gains.method(on, draft, temperature, gamma_max)
    lengths = replay.replay([spec.policy], found, jax.random.key(on.config.seed)).drafted
    rounds, tokens = float(lengths.sum(-1).mean()), float(np.mean(found.emitted))
    calls = [
        cost.Call(plain, lambda: gains.start(on, plain, texts), max(1, round(tokens))),
        cost.Call(spec, lambda: gains.start(on, spec, texts), max(1, round(rounds))),
    ]
    contexts, state = gains.start(on, spec, texts)
    sizes = sorted({1, 2, 4, 8, gamma_max} & {*range(1, gamma_max + 1)})
    drafted = range(gamma_max + 1)
    widths = tuple(range(1, gamma_max + 1) if widths is None else widths)
    loops = {
        (name, gamma): dataclasses.replace(spec, policy=Constant(jnp.int32(gamma)), widths=some)
        for name, some in (("full", ()), ("narrow", widths))
        for gamma in drafted
    }
    return cost.Meter(spec, contexts, state, drafted, sizes, calls=calls, loops=loops)


def in_steps(costs: cost.Costs, gamma_max: int) -> dict[str, Any]:
    """c and v(0 … γ_max) of a verify pass; what rounds take beside, by γ where it was measured, and
    calls beside their rounds; rounds of the policies' loop, by drafted tokens.
    """
    step, drafted = costs.target_step, range(gamma_max + 1)
    return {
        "c": costs.c,
        "v": [costs.v(gamma) for gamma in drafted],
        "overhead": {str(gamma): costs.overhead(gamma) for gamma in costs.round},
        "call": costs.fixed[gamma_max] / step,
        "plain_call": costs.plain_fixed / step,
        **{name: [costs.loops[name, n] / step for n in drafted] for name in ("full", "narrow")},
        "target_step_ms": 1e3 * step,
    }


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to decode, by what.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for the traces.")
    flags.DEFINE_integer("gamma_max", 8, "Drafted tokens from every position.")
    flags.DEFINE_integer("inputs", 200, "Inputs, the first of the config's split.")
    flags.DEFINE_bool("hidden", False, "Record the drafter's hidden states too.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, __doc__)
