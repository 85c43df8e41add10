"""Whether replay is right: its predictions beside the walltime of the real loops.

    python -m experiments.race --config=configs/embedded.py --workdir=runs/race \\
        --policies=svip,heuristic,gammatune

For each draft and temperature of the config: rollouts along the outputs of the first --inputs
inputs; then plain decoding, constants of --gammas with verify passes of their own width, and the
policies with --gamma_max and --widths take turns at each input, at batch 1, phases timed between.
Writes results.jsonl, a row for each loop, and report.md to the workdir. A run that was cut off goes
on where it was.
"""

import functools
from typing import Any

import jax
from absl import flags
from jax import Array
from jaxtyping import Key
from ml_collections import config_flags
from rich.console import Console

from experiments import common, trace
from experiments import replay as replays
from experiments.replay import Candidate, Timings
from experiments.reproduce import gains, study
from experiments.reproduce.study import Study, short
from specjax import decoding, files, replay, report, rollouts, timing
from specjax.replay import CostModel
from specjax.rollouts import Rollouts

COLUMNS: list[report.Column] = [
    ("policy", lambda row: row["policy"]),
    ("draft", lambda row: short(row["draft"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("τ replay", lambda row: f"{row['tau']:.3f}"),
    ("τ real", lambda row: f"{row['tau_real']:.3f}"),
    ("drafted replay", lambda row: f"{row['drafted']:.3f}"),
    ("drafted real", lambda row: f"{row['drafted_real']:.3f}"),
    ("gain predicted", lambda row: f"{row['gain']:.3f}"),
    ("gain measured", lambda row: f"{row['gain_decode']:.3f}"),
    ("measured/predicted", lambda row: f"{row['gain_decode'] / row['gain'] - 1:+.1%}"),
]


def main(_) -> None:
    config, args = flags.FLAGS.config, flags.FLAGS
    with config.unlocked():
        names = ("gamma_max", "inputs", "policies", "gammas", "widths", "draws")
        config.race = {name: args[name].value for name in names}
    workdir = common.make_workdir(args.workdir)
    on = Study(config, study.open_results(workdir, config))
    cells = study.keys(config, config.drafts)
    for cell in cells:
        if not study.find(on.results.done, cell):
            for row in race(on, **cell):
                on.results.append({**cell, **row, **study.identity(on)})
    rows = on.results.done
    Console(width=150).print(report.table(COLUMNS, rows, "Replay and the real loops"))
    off = [abs(row["gain_decode"] / row["gain"] - 1) for row in rows]
    text = (
        f"{sum(x <= 0.1 for x in off)} of {len(off)} measured gains lie within 10% of their "
        f"predictions; the farthest is {max(off):.1%} off."
    )
    print(text)
    page = ["# Replay and the real loops", report.markdown(COLUMNS, rows), text]
    files.write_text(workdir / "report.md", "\n\n".join(page) + "\n")


def race(on: Study, draft: str, temperature: float) -> list[dict[str, Any]]:
    """A row for each loop but the plain one."""
    config, race = on.config, on.config.race
    key, gamma_max = jax.random.key(config.seed), race.gamma_max
    sampling = on.sampling(temperature)
    widths = replays.widths_of(race.widths, gamma_max)
    outputs = [row.tokens for row in on.decode(None, temperature, race.inputs)]
    found = rollouts.record(
        on.target,
        on.draft(draft),
        on.texts(race.inputs),
        outputs,
        gamma_max=gamma_max,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
        key=key,
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
    )
    texts = decoding.tokenize(on.target, on.texts(race.inputs), config.max_source_len or None)
    meter = trace.make_meter(on, draft, temperature, found, texts, widths)
    for _ in range(9):
        meter.take()
    build = functools.partial(decoding.build, on.target, on.draft(draft), sampling=sampling)
    table = _timings(meter, gamma_max).prices(widths)
    gammas = [int(gamma) for gamma in race.gammas]
    fixed = [replays.candidate("constant", {"gamma": gamma}, table) for gamma in gammas]
    free = [replays.candidate(name, {}, table) for name in race.policies]
    methods: dict[str, Any] = {"plain": gains.plain_method(on, temperature)}
    for gamma, c in zip(gammas, fixed, strict=True):
        methods[c.label] = build(gamma=gamma)
    for c in free:
        methods[c.label] = build(gamma=gamma_max, policy=c.policy, widths=widths)
    timed = timing.side_by_side(
        methods,
        on.target,
        texts,
        max_new_tokens=config.max_new_tokens,
        key=key,
        repeats=config.repeats,
        names=(config.target, draft),
        between=meter.take,
    )
    timings = _timings(meter, gamma_max)
    rows = []
    for c in (*fixed, *free):
        # Policies were told the first prices; what rounds took is known now.
        own = timings.static(int(c.settings["gamma"])) if c in fixed else timings.prices(widths)
        score = predict(c, found, timings.model(own), key, race.draws if temperature else 1)
        real = timed[c.label].rows
        rounds = sum(row.target_calls for row in real)
        rows.append(
            {
                "policy": c.label,
                **score,
                "tau_real": sum(row.emitted for row in real) / rounds,
                "drafted_real": sum(row.drafted for row in real) / rounds,
                **timing.gain(timed["plain"], timed[c.label]),
                "timings": trace.in_steps(meter.costs(), gamma_max),
            }
        )
    return rows


def predict(
    of: Candidate, found: Rollouts, model: CostModel, key: Key[Array, ""], draws: int
) -> dict[str, float]:
    """`replay.Score` of one policy."""
    replayed = replay.replay([of.policy], found, key, draws=draws)
    score = replay.score(replayed, found, model)
    return {name: float(values[0]) for name, values in score._asdict().items()}


def _timings(meter, gamma_max) -> Timings:
    return Timings.of_row(trace.in_steps(meter.costs(), gamma_max))


if __name__ == "__main__":
    replays.define_flags()
    config_flags.DEFINE_config_file("config", None, "What to decode, by what.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for rows and report.")
    flags.DEFINE_integer("gamma_max", 8, "The longest draft.")
    flags.DEFINE_integer("inputs", 16, "Inputs, the first of the config's split.")
    flags.DEFINE_list("gammas", ["2", "4", "8"], "Constants.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, __doc__)
