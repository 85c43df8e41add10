"""Which tree is worth it: acceptance by rank, the best tree of each size, and what it brings.

    python -m experiments.trees --config=configs/trees.py:prose --workdir=runs/trees-prose
    python -m experiments.trees --config=configs/trees.py:own --workdir=runs/trees-own \\
        --config.target=DIR --config.drafts=DIR --input=FILE

For each draft and temperature of the config: how often the drafter's first, second, … choice is the
target's token; what calls of the target cost by the number of their tokens; from both the best tree
of each size (`specjax.tuning.best_tree`) with its predicted speedup; then plain decoding, chains
and these trees on the same inputs in turns. Writes results.jsonl and report.md to the workdir. A
run that was cut off goes on where it was.

Input: as of `specjax decode`; a config with a task needs none.
"""

from collections.abc import Mapping
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from experiments.publish import publish
from experiments.reproduce import pages, speedups, study
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results
from specjax import decoding
from specjax.cli.inputs import HELP, read_texts
from specjax.loop import Method
from specjax.measure import provenance, report, timing
from specjax.measure.stopwatch import TIMED_TEXTS, costs_of
from specjax.policies import Costs
from specjax.results import Summary, summarize
from specjax.support import command_line, memory_maps
from specjax.support.named import short
from specjax.tuning.best_tree import Choice, choose
from specjax.tuning.ranks import acceptance_by_rank

ACCELERATOR = 1.0  # v where reading the weights takes all of the time


def main(_) -> None:
    config = flags.FLAGS.config
    given = flags.FLAGS.input
    with config.unlocked():
        if given is not None:
            config.task = "own"
        check(config)
        if given is not None:
            config.texts = own_texts(given, config.target, config.alpha_inputs)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    fill(on)
    rows = on.results.done
    sections = [section(rows, cell) for cell in study.keys(config, config.drafts)]
    publish(workdir, f"{config.task}: trees", sections, rows)


def own_texts(path: str, target: str, most: int) -> tuple[str, ...]:
    """The first texts that are not blank."""
    texts = [text for text in read_texts(path, target) if text.strip()]
    if not texts:
        raise ValueError(f"--input={path} is empty: give it one input a line.")
    return tuple(texts[:most])


def check(config) -> None:
    """ValueError for what a pair of one's own needs and lacks."""
    for name, given, way in (
        ("target", config.target, "--config.target=DIR, or a name on the Hugging Face hub"),
        ("drafts", config.drafts, "--config.drafts=DIR, or a name on the Hugging Face hub"),
        ("inputs", config.task, "--input=FILE, one a line, of the kind to be decoded"),
    ):
        if not given:
            raise ValueError(f"No {name}: give {way}.")


def fill(on: Study) -> None:
    """Measure every draft and temperature that is missing."""
    done = [{name: row[name] for name in ("draft", "temperature")} for row in on.results.done]
    missing = [cell for cell in study.keys(on.config, on.config.drafts) if cell not in done]
    for cell in command_line.Steps(missing, unit="pair"):
        for row in measure(on, **cell):
            on.results.append({**cell, **row, **identity(on)})


def measure(on: Study, draft: str, temperature: float) -> list[dict[str, Any]]:
    """A row for each method."""
    config, texts = on.config, speedups.timed_texts(on)
    outputs = on.outputs(temperature)
    ways = [False] if temperature == 0 else [draw != "top" for draw in config.draws]
    chances = {
        drawn: acceptance_by_rank(
            on.target,
            on.draft(draft),
            on.texts(len(outputs)),
            outputs,
            sampling=on.sampling(temperature),
            drawn=drawn,
            batch_size=config.batch_size,
            max_source_len=config.max_source_len or None,
        ).tolist()
        for drawn in ways
    }
    longest = speedups.method(on, draft, temperature, max(config.sizes))
    run: dict[str, Any] = {
        "max_new_tokens": config.max_new_tokens,
        "key": jax.random.key(config.seed),
        "repeats": config.repeats,
        "names": (config.target, draft),
    }
    lengths = sorted({1, config.sizes[0], max(config.sizes)})
    costs = costs_of(longest, on.target, texts[:TIMED_TEXTS], lengths, **run)

    def verify(tokens: int) -> float:
        return costs.v(tokens - 1)

    plain = speedups.plain_method(on, temperature)
    methods: dict[str, Method] = {}
    for gamma in config.gammas:
        methods[f"chain of {gamma}"] = speedups.method(on, draft, temperature, gamma)
    trees: dict[str, tuple[Choice, list[float]]] = {}
    for drawn, by_rank in chances.items():
        for one in choose(by_rank, config.sizes, config.depth, costs.c, verify):
            for name, tree in variants(on, draft, temperature, one, drawn):
                methods[name], trees[name] = tree, (one, by_rank)
    rows = []
    # Group by group, for the memory maps of a process do not suffice for all programs.
    for size in sorted({group(method) for method in methods.values()}):
        some = {name: method for name, method in methods.items() if group(method) == size}
        with memory_maps.kept(methods=2 * len(some)):  # loops, and those for their costs
            found = timing.side_by_side({timing.PLAIN: plain, **some}, on.target, texts, **run)
            tables = {
                name: costs_of(method, on.target, texts[:TIMED_TEXTS], **run)
                for name, method in some.items()
            }
        for name, method in some.items():
            counts = summarize(found.outputs(name))
            tau = counts.tokens_per_iteration
            row = {
                "method": name,
                "nodes": method.slots - 1,
                "depth": method.gamma_max,
                "tau": tau,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                **counts.acceptance_fields(),
                **found.speedups(name),
                "identical": found.identical(name) if temperature == 0 else None,
                "on_accelerator": tau / (method.gamma_max * costs.c + ACCELERATOR),
                **times(method, tables[name], counts),
                "batch": 1,
                "timed_inputs": len(texts),
                "repeats": config.repeats,
            }
            if name in trees:
                one, by_rank = trees[name]
                row |= {"parents": list(one.shape.parents), "tau_expected": one.tokens}
                row["foretold"] = one.speedup
                row["by_rank"] = [round(chance, 4) for chance in by_rank]
            rows.append(row)
    return rows


def group(method: Method) -> int:
    """All chains are one, and all trees of a size."""
    return method.slots if method.branches else 0


def variants(on: Study, draft: str, temperature: float, one: Choice, drawn: bool):
    """(name, method) of a tree whose children are drawn, by each rule, or chosen."""
    size, how = one.shape.nodes, [("top", "token")]
    if drawn:
        draws = [draw for draw in on.config.draws if draw != "top"]
        how = [(draw, rule) for draw in draws for rule in on.config.rules]
    for draw, rule in how:
        shape = type(one.shape)(one.shape.parents, draw)
        method = decoding.branching(
            on.target, on.draft(draft), shape, sampling=on.sampling(temperature), rule=rule
        )
        yield f"tree of {size}, {draw}" + ("" if draw == "top" else f", {rule}"), method


def times(method: Method, costs: Costs, counts: Summary) -> dict[str, Any]:
    """What a round costs in steps, and the speedup that follows from it and from τ."""
    tokens, rounds = (n / counts.outputs for n in (counts.tokens, counts.iterations))
    gamma = method.gamma_max
    return {
        "draft_steps": gamma * costs.c,
        "verify_steps": costs.v(gamma),
        "overhead": costs.overhead(gamma),
        "predicted": costs.speedup(gamma, tokens, rounds),
    }


def section(rows: list[dict[str, Any]], cell: Mapping[str, Any]) -> Section:
    """A line for each method of a draft and temperature."""
    mine = [row for row in rows if cell.items() <= row.items()]
    columns: list[report.Column] = [
        ("method", lambda row: row["method"]),
        ("nodes", lambda row: str(row["nodes"])),
        ("depth", lambda row: str(row["depth"])),
        ("τ", lambda row: number(row["tau"])),
        *report.acceptance(mine),
        ("draft", lambda row: number(row["draft_steps"])),
        ("verify", lambda row: number(row["verify_steps"])),
        ("rest", lambda row: number(row["overhead"])),
        ("predicted", lambda row: number(row["predicted"])),
        ("decode", lambda row: number(row["speedup_decode"])),
        ("v = 1", lambda row: number(row["on_accelerator"])),
        ("identical", lambda row: {None: "–", True: "yes", False: "NO"}[row["identical"]]),
    ]
    shown = {tuple(row["by_rank"]): row["method"] for row in mine if "by_rank" in row}
    ranks = "; ".join(
        f"{', '.join(f'{chance:.3f}' for chance in chances)} ({name.split(', ')[1]})"
        for chances, name in shown.items()
    )
    return Section(
        f"{short(cell['draft'])}, T={cell['temperature']:g}",
        columns,
        mine,
        provenance.busy(mine) or words(mine),
        f"The chance that a node's first, second, … child is accepted: {ranks}. Trees are the best "
        "of their size by these and by the measured costs. draft, verify, rest: of a "
        "round, in steps of the target. predicted: from τ, what a round takes and the fixed times "
        "of calls. decode: measured, the loops "
        "alone, medians of interleaved repeats. v = 1: the speedup to expect where a call of the "
        "target costs one step, whatever it reads, and a level of the draft one draft step.",
        measured=mine,
    )


def words(rows: list[dict[str, Any]]) -> str:
    """Whether a tree is worth it."""
    if not rows:
        return ""
    chains = [row for row in rows if row["method"].startswith("chain")]
    trees = [row for row in rows if row["method"].startswith("tree")]
    chain, tree = (max(of, key=lambda row: row["speedup_decode"]) for of in (chains, trees))
    off = [row["speedup_decode"] / row["predicted"] for row in rows]
    return (
        f"Best chain: {chain['method']}, {chain['speedup_decode']:.2f} times plain decoding. Best "
        f"tree: {tree['method']}, {tree['speedup_decode']:.2f}. Measured speedups lie "
        f"{pages.percent(min(off))} to {pages.percent(max(off))} from the predictions."
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Pair, sizes and inputs.", lock_config=True)
    flags.DEFINE_string("input", None, HELP)
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
