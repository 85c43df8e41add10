"""What `specjax decode` prints beside its rows: counts, rates and a comparison of both methods."""

from operator import itemgetter
from typing import TextIO

import jax
import numpy as np
from rich.console import Console

from specjax import checkpoints, rules
from specjax.decoding.texts import is_blank, tokenize
from specjax.loop import Method
from specjax.measure import report, speedup, timing
from specjax.measure.stopwatch import Stopwatch
from specjax.results import acceptance_rates, summarize


def by_position(lengths: np.ndarray, tested: np.ndarray) -> str:
    """Describe acceptance by position, given that all before were accepted, and its mean.

    Args:
      lengths, tested: `Row.accepted_lengths` and `Row.tested`, summed over rows.
    """
    rates = acceptance_rates(lengths, tested)
    shares = ", ".join("–" if np.isnan(rate) else f"{rate:.2f}" for rate in rates)
    none = " (–: none was tested)" if "–" in shares else ""
    mean = lengths @ np.arange(len(lengths)) / tested.sum() if tested.any() else np.nan
    return f"Accepted of those tested, by position in the draft: {shares}{none}; mean {mean:.2f}."


def took(
    before: int,
    seconds: float,
    compiled: float,
    outputs: int,
    tokens: int,
    calls: int,
    verified: int,
    draft_calls: int,
) -> str:
    """Describe counts and rates of a run, in a sentence.

    Args:
      before: number of outputs that an earlier run left.
      seconds: time of the run; `compiled` of them were compilation.
    """
    if not outputs:
        return f"All {before} outputs were there already."
    calls = max(calls, 1)
    nodes, levels = verified / calls, draft_calls / calls
    return (
        f"{outputs} outputs{f', {before} were there already' if before else ''}: {tokens:,} tokens "
        f"in {calls:,} target calls, τ = {tokens / calls:.2f}"
        + (f", {nodes:.1f} nodes in {levels:.1f} levels" * (nodes > levels))
        + f"; {seconds:.1f} s, {compiled:.1f} of them compiling; "
        f"{tokens / max(seconds - compiled, 1e-9):,.0f} tokens a second without compilation."
    )


def compare(method: Method, target: checkpoints.Checkpoint, texts, config) -> timing.Comparison:
    """Compare both methods on all inputs that are not blank, one output each."""
    kept = [text for text in texts if not is_blank(target, text)]
    sources = tokenize(target, kept, config.max_source_len or None)
    watch = Stopwatch(
        target, config.max_new_tokens, jax.random.key(config.seed), config.batch_size,
        names=(config.target, config.draft),
    )  # fmt: skip
    return speedup.compare(watch, method, sources)


def show(method: Method, found: timing.Comparison, file: TextIO) -> None:
    """Print the comparison as a table, and a summary."""
    both, costs, gamma = (timing.PLAIN, timing.SPECULATIVE), found.costs, method.gamma_max
    tree = method.branches
    of = (" for a level", f" for {method.slots - 1} nodes") if tree else ("", "")
    counts = [summarize(found.outputs(name)) for name in both]

    titles = ("", "autoregressive", "speculative")

    def row(name: str, cell) -> dict[str, str]:
        return dict(zip(titles, (name, *map(cell, counts, both)), strict=True))

    rows = [
        row("outputs", lambda count, _: f"{count.outputs:,}"),
        row("tokens", lambda count, _: f"{count.tokens:,}"),
        row("target calls", lambda count, _: f"{count.iterations:,}"),
        row("tokens per target call", lambda count, _: f"{count.tokens_per_iteration:.2f}"),
        row("verified", lambda count, _: f"{count.verified:,}"),
        *([row("draft calls", lambda count, _: f"{count.draft_calls:,}")] if tree else []),
        row("accepted", lambda count, _: f"{count.accepted:,}"),
        row("corrections", lambda count, _: f"{count.corrections:,}"),
        row("bonus", lambda count, name: f"{count.bonus:,}" if name != timing.PLAIN else "–"),
        row("seconds", lambda _, name: f"{np.median(found.decode[name].sum(1)):.3f}"),
        row("seconds, with prefill", lambda _, name: f"{np.median(found.whole[name].sum(1)):.3f}"),
    ]
    columns: list[report.Column] = [(title, itemgetter(title)) for title in titles]
    expected = "lost in noise" if found.predicted is None else f"{found.predicted:.2f}"
    shares = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.phases.items())
    console = Console(file=file, width=None if file.isatty() else 140, highlight=False)
    report.show(console, columns, rows, "Both methods")
    for line in (
        by_position(np.array(counts[1].accepted_lengths), np.array(counts[1].tested)),
        f"Speedup {found.speedup:.2f}, with prefill {found.speedup_end_to_end:.2f}; expected of "
        f"c = {costs.c:.3f}{of[0]} and v = {costs.v(gamma):.2f}{of[1]}: {expected}.",
        f"The speculative loop, estimated: {shares}.",
        likeness(method, found),
    ):
        console.print(line, soft_wrap=True)


def likeness(method: Method, found: timing.Comparison) -> str:
    """Describe whether the tokens agree, where they should, and the rule's guarantee."""
    pairs = list(zip(found.outputs(timing.PLAIN), found.outputs(), strict=True))
    same = sum(plain.tokens == spec.tokens for plain, spec in pairs)
    if same == len(pairs) or method.sampling.greedy:
        sentence = f"{same} of {len(pairs)} outputs are the same tokens."
    else:
        sentence = "At temperatures above 0 the methods draw different samples of one distribution."
    if remark := rules.remark(method.rule, method.sampling):
        sentence = sentence.replace("samples of one distribution", "samples")
        return f"{sentence} {remark}."
    return sentence
