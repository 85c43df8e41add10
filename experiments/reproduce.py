"""The paper's main experiment on a family of models: what speculation gains, and why.

    python -m experiments.reproduce --config=configs/embedded.py --workdir=runs/embedded

For each draft and temperature: α over prefixes that the target generated, acceptance, block
efficiency τ, c, v(γ); γ by the formula with these; then both jitted loops side by side at batch 1.
Writes results.jsonl (a row for each draft and temperature), report.md and figures to the workdir.
A run that was cut off goes on where it was.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from tqdm import tqdm

from experiments import common, decode
from specjax import cost, decoding, files, metrics, report, sampling, tasks, theory
from specjax.batching import bucket
from specjax.models import hub
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.trace import trace


def main(_) -> None:
    config = flags.FLAGS.config
    workdir = common.make_workdir(flags.FLAGS.workdir)
    # A pipe has no width of its own, and 80 columns would cut the table.
    # Code is full of brackets, which rich would take for markup.
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
    results = open_results(workdir, config)
    target = hub.load(config.target, dtype=decode.DTYPES[config.dtype])
    texts = [pair.input for pair in tasks.load(config.task, config.split)[: config.alpha_inputs]]
    if not texts:
        raise ValueError(f"Task {config.task!r} has no inputs in split {config.split!r}.")
    pairs = [(draft, t) for t in config.temperatures for draft in config.drafts]
    missing = [pair for pair in pairs if not find(results.done, *pair)]
    outputs: dict[float, list[decoding.Row]] = {}
    with tqdm(total=len(missing) * Job.stages, unit="stage", disable=None) as bar:
        for name, temperature in missing:
            bar.set_description(f"{short(name)} T={temperature:g}")
            draft = hub.load(name, dtype=decode.DTYPES[config.dtype])
            job = Job(config, target, draft, texts, temperature, outputs, bar)
            results.append(job.run() | identity(config, name))
    rows = [row for pair in pairs if (row := find(results.done, *pair))]
    lines, title = example_trace(config, target, rows, texts)
    write_report(workdir, config, rows, lines, title)
    console.print(report.table(COLUMNS, rows, "Measured and predicted gain, batch 1"))
    console.print(title, style="bold", highlight=False)
    console.print(report.coloured(lines))
    console.print(verdict(rows))
    console.print(f"Report and figures: {workdir / 'report.md'}", soft_wrap=True)


def open_results(workdir: pathlib.Path, config) -> files.Rows:
    """Rows of an earlier run of the same config, or none."""
    results = files.Rows(workdir / "results.jsonl")
    mine = common.fingerprint(config.to_dict())
    if any(row.get("run") != mine for row in results.done):
        raise ValueError(
            f"{results.path} holds rows of another config. Name another --workdir, or delete the "
            "file."
        )
    return results


def find(rows: Sequence[dict[str, Any]], draft: str, temperature: float) -> dict[str, Any] | None:
    """The row of a pair, if it is there."""
    wanted = {"draft_path": relative(draft), "temperature": temperature}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def short(name: str) -> str:
    """The last part of a directory or hub name."""
    return pathlib.PurePath(name).name


def relative(name: str) -> str:
    """A directory below the checkout by its path in there; any other name as it is."""
    return str(name).removeprefix(f"{common.ROOT}/")


def identity(config, name: str) -> dict[str, Any]:
    """What was run, and where."""
    return {
        "target": short(config.target),
        "draft_path": relative(name),
        "task": config.task,
        "split": config.split,
        "seed": config.seed,
        "run": common.fingerprint(config.to_dict()),
        **common.environment(),
    }


@dataclasses.dataclass
class Job:
    """One draft at one temperature."""

    config: Any
    target: hub.Checkpoint
    draft: hub.Checkpoint
    texts: list[str]
    temperature: float
    outputs: dict[float, list[decoding.Row]]  # of the target alone, by temperature
    bar: Any

    stages = 4

    def run(self) -> dict[str, Any]:
        """Measure everything, and return the row."""
        config = self.config
        alpha = self.alpha()
        self.bar.update()
        costs = self.costs(gammas=config.gammas)
        gains = {
            gamma: theory.walltime_gain(alpha.value, gamma, costs.c, costs.v(gamma))
            for gamma in config.gammas
        }
        gamma = max(gains, key=lambda g: gains[g])
        self.bar.update()
        timed, once = self.time(gamma)
        self.bar.update()
        spec = timed["speculative"].rows
        tau = sum(row.emitted for row in spec) / sum(row.target_calls for row in spec)
        overhead = max(once.overhead(gamma), 0.0)  # timing noise may take it below
        row = {
            "draft": short(self.draft.name),
            "temperature": self.temperature,
            "gamma": gamma,
            "alpha": alpha.value,
            "alpha_low": alpha.low,
            "alpha_high": alpha.high,
            "alpha_tokens": alpha.tokens,
            "tau": tau,
            "tau_expected": theory.expected_tokens(alpha.value, gamma),
            "drafted": sum(row.drafted for row in spec),
            "accepted": sum(row.accepted for row in spec),
            "acceptance_by_position": clean(metrics.acceptance_by_position(spec)),
            "c": once.c,
            "v": once.v(gamma),
            "v_by_gamma": {str(g): costs.v(g) for g in config.gammas},
            "overhead": overhead,
            "target_step_ms": 1e3 * once.target_step,
            "draft_step_ms": 1e3 * once.draft_step,
            "predicted_paper": theory.walltime_gain(alpha.value, gamma, once.c),
            "predicted": theory.walltime_gain_from_tau(
                tau, mean_drafted(spec), once.c, once.v(gamma), overhead
            ),
            **gain(timed),
            "identical": identical(timed) if self.temperature == 0 else None,
            "batch": 1,
            "dtype": str(jax.tree.leaves(self.target.model.params)[0].dtype),
            "timed_inputs": len(spec),
            "repeats": config.repeats,
        }
        self.bar.update()
        return row

    def alpha(self) -> metrics.Alpha:
        """α over the target's own outputs, which all drafts share."""
        chosen = sampling.sampling(self.temperature)
        if self.temperature not in self.outputs:
            plain = decoding.build(self.target, None, gamma=1, sampling=chosen)
            self.outputs[self.temperature] = list(
                decoding.stream(
                    plain,
                    self.target,
                    self.texts,
                    max_new_tokens=self.config.max_new_tokens,
                    key=jax.random.key(self.config.seed),
                    batch_size=self.config.batch_size,
                    names=(self.target.name, ""),
                )
            )
        return metrics.alpha_of_outputs(
            self.target,
            self.draft,
            self.texts,
            [row.tokens for row in self.outputs[self.temperature]],
            sampling=chosen,
            batch_size=self.config.batch_size,
        )

    def method(self, gamma: int) -> Speculative:
        """The speculative loop with this draft."""
        chosen = sampling.sampling(self.temperature)
        method = decoding.build(self.target, self.draft, gamma=gamma, sampling=chosen)
        assert isinstance(method, Speculative)
        return method

    def sources(self) -> list[list[int]]:
        """The inputs of the timed loops."""
        return decoding.tokenize(self.target, self.texts[: self.config.timed_inputs])

    def costs(self, gammas: Sequence[int]) -> cost.Costs:
        """c and v, to choose γ by."""
        return cost.measure(*self.example(), gammas, repeats=2 * self.config.repeats + 1)

    def example(self) -> tuple[Speculative, Contexts, State]:
        """What a `cost.Meter` takes: batch 1, in the shapes of the timed loops."""
        method = self.method(max(self.config.gammas))
        sources = self.sources()
        contexts, state = decoding.prepare(
            method,
            self.target,
            sources[:1],
            [(0, 0)],
            max_new_tokens=self.config.max_new_tokens,
            key=jax.random.key(self.config.seed),
            rows=1,
            width=bucket(max(map(len, sources)), smallest=16),
        )
        return method, contexts, state

    def time(self, gamma: int) -> tuple[dict[str, "Timed"], cost.Costs]:
        """Both loops on the same inputs, and the phases of a round, all taking turns."""
        chosen = sampling.sampling(self.temperature)
        methods = {
            "autoregressive": decoding.build(self.target, None, gamma=1, sampling=chosen),
            "speculative": self.method(gamma),
        }
        sources = self.sources()
        for method in methods.values():  # compilation
            first = Timed()
            first.start_repeat()
            self.time_one(first, method, 0, sources[0], sources)
        meter = cost.Meter(*self.example(), gammas=[gamma], rounds=[gamma])
        timed = {name: Timed() for name in methods}
        for _ in range(self.config.repeats):
            for name in methods:
                timed[name].start_repeat()
            for index, source in enumerate(sources):
                for name, method in methods.items():
                    self.time_one(timed[name], method, index, source, sources)
                meter.take()
        return timed, meter.costs()

    def time_one(self, timed: "Timed", method, index: int, source, sources) -> None:
        begin = time.perf_counter()
        context, state = jax.block_until_ready(
            decoding.prepare(
                method,
                self.target,
                [source],
                [(index, 0)],
                max_new_tokens=self.config.max_new_tokens,
                key=jax.random.key(self.config.seed),
                rows=1,
                width=bucket(max(map(len, sources)), smallest=16),
            )
        )
        middle = time.perf_counter()
        state = jax.block_until_ready(decoding.run(method, context, state))
        end = time.perf_counter()
        decoding.check_finite(state, (self.target.name, self.draft.name))
        rows = decoding.read_rows(state, [(index, 0)], self.target)
        timed.add(end - middle, end - begin, rows[0])


class Timed:
    """Seconds of one method, by repeat, summed over inputs, and the rows of the last repeat."""

    def __init__(self):
        self.decode: list[float] = []
        self.end_to_end: list[float] = []
        self.rows: list[decoding.Row] = []

    def start_repeat(self) -> None:
        """Begin a new pass over the inputs."""
        self.decode.append(0.0)
        self.end_to_end.append(0.0)
        self.rows = []

    def add(self, decode: float, end_to_end: float, row: decoding.Row) -> None:
        """One input."""
        self.decode[-1] += decode
        self.end_to_end[-1] += end_to_end
        self.rows.append(row)

    def per_token(self, seconds: list[float]) -> np.ndarray:
        """Seconds per emitted token, for each repeat."""
        return np.array(seconds) / sum(row.emitted for row in self.rows)


def gain(timed: dict[str, Timed]) -> dict[str, float]:
    """Medians over repeats of the ratio within one repeat, with the quartiles as noise."""
    plain, spec = timed["autoregressive"], timed["speculative"]
    decode_only = plain.per_token(plain.decode) / spec.per_token(spec.decode)
    whole = plain.per_token(plain.end_to_end) / spec.per_token(spec.end_to_end)
    low, median, high = np.quantile(decode_only, [0.25, 0.5, 0.75])
    return {
        "gain_decode": float(median),
        "gain_decode_low": float(low),
        "gain_decode_high": float(high),
        "gain_end_to_end": float(np.median(whole)),
        "autoregressive_ms_per_token": float(1e3 * np.median(plain.per_token(plain.decode))),
        "speculative_ms_per_token": float(1e3 * np.median(spec.per_token(spec.decode))),
        "tokens": sum(row.emitted for row in spec.rows),
        "target_calls": sum(row.target_calls for row in spec.rows),
    }


def identical(timed: dict[str, Timed]) -> bool:
    """Whether both loops gave the same tokens for every input."""
    both = zip(timed["autoregressive"].rows, timed["speculative"].rows, strict=True)
    return all(plain.tokens == spec.tokens for plain, spec in both)


def mean_drafted(rows: Sequence[decoding.Row]) -> float:
    """Drafted tokens per target call: below γ where the budget ends a draft."""
    return sum(row.drafted for row in rows) / sum(row.target_calls for row in rows)


def clean(values: np.ndarray) -> list[float | None]:
    """NaN is no JSON."""
    return [None if np.isnan(value) else round(float(value), 4) for value in values]


COLUMNS: list[report.Column] = [
    ("draft", lambda r: r["draft"]),
    ("T", lambda r: f"{r['temperature']:g}"),
    ("γ", lambda r: str(r["gamma"])),
    ("α", lambda r: f"{r['alpha']:.3f}"),
    ("τ", lambda r: f"{r['tau']:.2f}"),
    ("c", lambda r: f"{r['c']:.3f}"),
    ("v(γ)", lambda r: f"{r['v']:.2f}"),
    ("Thm 3.8", lambda r: f"{r['predicted_paper']:.2f}"),
    ("τ/(γc+v+o)", lambda r: f"{r['predicted']:.2f}"),
    ("decode", lambda r: f"{r['gain_decode']:.2f}"),
    ("end to end", lambda r: f"{r['gain_end_to_end']:.2f}"),
    ("identical", lambda r: "–" if r["identical"] is None else "yes" if r["identical"] else "NO"),
]


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What the table says, in words."""
    best = max(rows, key=lambda row: row["gain_decode"])
    said = [
        f"Largest gain: {best['draft']} at T={best['temperature']:g} with γ={best['gamma']}: "
        f"{best['gain_decode']:.2f} times plain decoding (quartiles {best['gain_decode_low']:.2f} "
        f"to {best['gain_decode_high']:.2f}), {best['gain_end_to_end']:.2f} with the encoder."
    ]
    off = max(rows, key=lambda row: abs(row["gain_decode"] / row["predicted"] - 1))
    ratio = off["gain_decode"] / off["predicted"] - 1
    said.append(f"Measured lies within {abs(ratio):.0%} of τ/(γc+v+overhead) in every row.")
    if any(row["identical"] is False for row in rows):
        said.append("At T=0 some outputs DIFFER from plain decoding: look for near-ties.")
    elif any(row["identical"] for row in rows):
        said.append("At T=0 every output is plain decoding's, token for token.")
    if any(row["gain_decode"] < 1 for row in rows):
        said.append("A gain below 1 means that decoding is faster without this draft.")
    return " ".join(said)


def example_trace(config, target, rows, texts):
    """Lines of Figure 1 for the best draft at the first temperature, and its title."""
    best = max(
        (row for row in rows if row["temperature"] == config.temperatures[0]),
        key=lambda row: row["gain_decode"],
    )
    path = next(name for name in config.drafts if relative(name) == best["draft_path"])
    draft = hub.load(path, dtype=decode.DTYPES[config.dtype])
    chosen = sampling.sampling(best["temperature"])
    method = decoding.build(target, draft, gamma=best["gamma"], sampling=chosen)
    assert isinstance(method, Speculative)
    # A text of some length shows more.
    text = max(texts[: config.timed_inputs], key=len)
    contexts, state = decoding.prepare(
        method,
        target,
        decoding.tokenize(target, [text]),
        [(0, 0)],
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        rows=1,
    )
    rounds = trace(method, contexts, state)
    tokens = sum(len(r.accepted) + len(r.next_token) for r in rounds)
    title = f"{text}   ({tokens} tokens in {len(rounds)} target calls)"
    return report.spans(rounds, target.tokenizer.decode), title


def write_report(workdir: pathlib.Path, config, rows, lines, title: str) -> None:
    """report.md and its figures; each file replaced when it is complete."""
    labels = [f"{row['draft']} T={row['temperature']:g} γ={row['gamma']}" for row in rows]
    for name, figure in (
        ("gains.png", report.draw_gains(rows, labels)),
        ("trace.png", report.draw_trace(lines, title)),
    ):
        with files.replacing(workdir / name) as part:
            figure.savefig(part, format="png", dpi=160)
    facts = {key: rows[-1][key] for key in (*common.environment(), "dtype", "batch", "seed")}
    text = "\n".join(
        [
            f"# {config.task}: what speculation gains",
            "",
            verdict(rows),
            "",
            report.markdown(COLUMNS, rows),
            "",
            "α: mean of Σ min(target, draft) over prefixes that the target generated. τ: tokens "
            "per target call. c, v(γ): a draft step and a verify pass in units of a target step. "
            "Thm 3.8: the paper's prediction, which takes v = 1. o: the rest of a round, measured. "
            "decode, end to end: times plain decoding, without and with the encoder and prefill; "
            "medians of interleaved repeats, compilation excluded.",
            "",
            "![gains](gains.png)",
            "",
            "![trace](trace.png)",
            "",
            "## Where",
            "",
            *(f"- {key}: {value}" for key, value in facts.items()),
            "",
        ]
    )
    files.write_text(workdir / "report.md", text)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and figures.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, __doc__)
