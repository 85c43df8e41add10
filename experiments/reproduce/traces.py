"""Figure 1: what happened to each token of one output."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.text import Text

from experiments import figure1
from experiments.reproduce import speedups
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax.decoding import building
from specjax.decoding.outputs import text_of
from specjax.support import command_line
from specjax.support.named import short


def keys(_) -> list[dict[str, Any]]:
    """One output."""
    return [{}]


def measure(on: Study, _) -> dict[str, Any]:
    """One output of the timed inputs, by the config's tree and the best draft at the last
    temperature, where a small model repeats itself less."""
    best, tree = speedups.best(on, -1), on.config.tree
    sampling = on.sampling(best["temperature"])
    draft, gamma = on.draft(best["draft"]), best["gamma"]
    method = building.build(on.target, draft, gamma=gamma, sampling=sampling, tree=tree)
    command_line.say("compiling a round, and decoding one output round by round")
    texts, index = on.shown
    rounds = figure1.trace(method, *speedups.start(on, method, texts, index))
    decode = partial(text_of, on.target, texts[index], skip_special_tokens=False)
    return {
        **{name: best[name] for name in ("draft", "temperature", "gamma")},
        "tree": tree,
        "input": on.examples[index].input,
        "lines": figure1.spans(rounds, decode),
        "tokens": sum(len(r.accepted) + len(r.next_token) for r in rounds),
        "target_calls": len(rounds),
        "batch": 1,
    }


def setting(row: dict[str, Any]) -> str:
    """What was run, and what came of it."""
    tree = row.get("tree", "chain")  # older rows do not say
    size = f"γ={row['gamma']}" if tree == "chain" else tree
    return (
        f"{short(row['draft'])}, {size}, T={row['temperature']:g}: {row['tokens']} tokens in "
        f"{row['target_calls']} target calls"
    )


def section(_, rows: Sequence[dict[str, Any]]) -> Section:
    """The picture."""
    return Section(
        "Figure 1: one output, a line for each target call",
        words=f"{setting(rows[0])}, where the paper's example has 38 in 9.",
        images=("trace.png",),
        measured=rows,
    )


def coloured(row: dict[str, Any]) -> Text:
    """For the terminal."""
    head = Text(f"{figure1.printable(row['input'])}\n", style="bold")
    return head.append(f"{setting(row)}\n", style="not bold").append_text(
        figure1.coloured(row["lines"])
    )
