"""Tables 2 and 4: what speculation brings at batch 1, measured beside what was predicted."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.reproduce import pages, study
from experiments.reproduce.pages import Section, number, percent
from experiments.reproduce.study import Study
from specjax import formulas
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.drafters import parameters
from specjax.measure import costing, doubts, metrics, provenance, report
from specjax.measure.costing import TIMED_TEXTS
from specjax.measure.speedup import compare
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN, SPECULATIVE, Comparison
from specjax.policies import Costs
from specjax.results import summarize
from specjax.speculative import Speculative
from specjax.support import command_line, processes
from specjax.support.named import short
from specjax.tuning.job import apart


def keys(config) -> list[dict[str, Any]]:
    """A cell for each draft and temperature."""
    return study.keys(config, (*config.timed_ngrams, *config.drafts))


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """c and v(γ), the γ that the formula picks by them and by α, and the speedup of the loops."""
    config, draft, temperature = on.config, cell["draft"], cell["temperature"]
    known = study.find(on.results.done, {**cell, "table": "alpha"})
    if known is None:
        raise ValueError('tables: "speedup" needs "alpha", which the best γ depends on.')
    alpha = known["alpha"]
    texts = timed_texts(on)
    longest = method(on, draft, temperature, max(config.gammas))
    lengths = sorted(config.gammas)
    watch = dataclasses.replace(stopwatch_of(on, draft), say=command_line.say)
    some = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
    costs = costing.costs_of(watch, longest, texts[:TIMED_TEXTS], some)
    tokens = {gamma: formulas.expected_tokens(alpha, gamma) for gamma in config.gammas}
    if config.gamma_by_position:
        tokens = tokens_by_position(on, draft, temperature)
    best_gamma = max(tokens, key=lambda g: tokens[g] / (g * costs.c + costs.v(g)))
    gamma = processes.firsts(best_gamma)  # each process has timings of its own
    found = compare(watch, method(on, draft, temperature, gamma), texts)
    whole = sum(leaf.size for leaf in jax.tree.leaves(on.target.model))
    return {
        "gamma": gamma,
        "alpha": alpha,
        "smaller": parameters(on.draft(draft), on.target) < whole,
        "tau_expected": formulas.expected_tokens(alpha, gamma),
        "v_by_gamma": {str(g): costs.v(g) for g in config.gammas},
        **outcome(found),
        "predicted_paper": formulas.walltime_speedup(alpha, gamma, found.costs.c),
        "identical": found.identical() if temperature == 0 else None,
        "batch": 1,
        "timed_inputs": len(texts),
        "repeats": config.repeats,
    }


def tokens_by_position(on: Study, draft: str, temperature: float) -> dict[int, float]:
    """`metrics.tokens_by_position` of a run with the longest drafts."""
    config = on.config
    rows = on.decode(draft, temperature, config.alpha_inputs, gamma=max(config.gammas))
    return metrics.tokens_by_position(rows, config.gammas)


def outcome(found: Comparison) -> dict[str, Any]:
    """What the comparison showed, as a row: counts, costs, and the speedup measured and predicted.

    `overhead` is with the fixed times of calls; `round_overhead` is a round's own.
    """
    costs, counts = found.costs, summarize(found.outputs())
    gamma, texts = costs.gamma_max, counts.outputs
    return {
        "tau": counts.tokens_per_iteration,
        "verified": counts.verified,
        "accepted": counts.accepted,
        **counts.acceptance_fields(),
        "c": costs.c,
        "v": costs.v(gamma),
        "round_overhead": costs.overhead(gamma),
        "overhead": costs.overhead(gamma, counts.tokens / texts, counts.iterations / texts),
        "target_step_ms": 1e3 * float(costs.token),
        "draft_step_ms": 1e3 * float(costs.draft),
        "predicted": found.predicted,
        **found.speedups(),
        "autoregressive_ms_per_token": 1e3 * float(np.median(found.per_token(PLAIN))),
        "speculative_ms_per_token": 1e3 * float(np.median(found.per_token(SPECULATIVE))),
        "tokens": counts.tokens,
        "target_calls": counts.iterations,
    }


def timed_texts(on: Study) -> list[list[int]]:
    """Ids of the inputs that are timed."""
    return ids(on, on.config.timed_inputs)


def ids(on: Study, count: int) -> list[list[int]]:
    """Ids of the first so many inputs."""
    return tokenize(on.target, on.texts(count), on.config.max_source_len or None)


def cost(
    on: Study,
    draft: str,
    temperature: float,
    loops: Mapping[str, Speculative],
    repeats: int,
    inputs: int | None = None,
    turn: int = 1,
    alpha_inputs: int = 0,
    passes_of: Mapping[str, str] | None = None,
    refusals: bool = False,
) -> dict[str, Costs]:
    """Costs of plain decoding and of the loops, at batch 1, on the inputs that are timed.

    Args:
      loops: `costing.POLICIES`, and those of static γ by `costing.static`.
      inputs: the first so many of them; None: all.
      turn: calls of a turn, as in `timing.in_turns`.
      alpha_inputs: over which α is measured; those beyond the first `inputs` are not timed.
      passes_of, refusals: as in `costing.measure`.
    """
    timed = timed_texts(on)[:inputs]
    watch = dataclasses.replace(
        stopwatch_of(on, draft), key=apart(jax.random.key(on.config.seed)), repeats=repeats,
        turn=turn,
    )  # fmt: skip
    return costing.measure(
        watch, loops, timed, plain=plain_method(on, temperature), passes_of=passes_of,
        untimed=ids(on, alpha_inputs)[len(timed) :], refusals=refusals,
    )  # fmt: skip


def method(on: Study, draft: str, temperature: float, gamma: int) -> Speculative:
    """The speculative loop with this draft."""
    sampling = on.sampling(temperature)
    return building.build(on.target, on.draft(draft), gamma=gamma, sampling=sampling)


def best(on: Study, which: int = 0) -> dict[str, Any]:
    """The row of the fastest draft at one of the temperatures, the first if none is named."""
    at = {"table": "speedup", "temperature": on.config.temperatures[which]}
    timed = [row for row in on.results.done if at.items() <= row.items()]
    if not timed:
        raise ValueError(
            'tables: the figures of one output need "speedup", which says by what draft.'
        )
    return max(timed, key=lambda row: row["speedup_decode"])


def plain_method(on: Study, temperature: float) -> Autoregressive:
    """The loop that it is compared with."""
    return building.plain(on.target, on.sampling(temperature))


def start(on: Study, by, texts: Sequence[Sequence[int]], index: int = 0):
    """Contexts and state before the first round, at batch 1, in the shapes of the timed loops."""
    return stopwatch_of(on).begin(by, texts, [index])


def stopwatch_of(on: Study, draft: str = "") -> Stopwatch:
    """The stopwatch of a study, at batch 1."""
    config = on.config
    return Stopwatch(
        on.target, config.max_new_tokens, jax.random.key(config.seed), repeats=config.repeats,
        names=(config.target, draft),
    )  # fmt: skip


def line_of(row: Mapping[str, Any]) -> str:
    """One row in a line, as soon as it is there."""
    return (
        f"{short(row['draft'])}, T = {row['temperature']:g}, γ = {row['gamma']}: "
        f"{row['speedup_decode']:.2f} times as fast as plain decoding, "
        f"{row['speedup_end_to_end']:.2f} with the encoder"
    )


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in three lines what was gained, what limited it, and why the formula differs."""
    if doubt := doubtful(rows):
        return doubt
    top = max(rows, key=lambda row: row["speedup_decode"])
    return (
        f"Gained: {line_of(top)}; {top['tau']:.1f} tokens per target call (τ), "
        f"α = {top['alpha']:.2f}.\n"
        f"Limited by {limit(top)}\n"
        f"The paper's formula predicts {top['predicted_paper']:.2f}, because it "
        f"assumes that a verify pass costs one target step (here {top['v']:.2f}) and that every "
        f"token has the same chance of acceptance ({top['tau_expected']:.1f} expected tokens per "
        f"call; measured {top['tau']:.1f}).{here(top)}"
    )


def limit(row: Mapping[str, Any]) -> str:
    """Name the term of τ / (γc + v + overhead) that costs most beyond the paper's ideal, v = 1."""
    gamma, c, v, overhead = (row[name] for name in ("gamma", "c", "v", "overhead"))
    lost = {
        f"drafting: {gamma} draft steps cost {gamma * c:.2f} target steps.": gamma * c,
        f"the verify pass: its {gamma + 1} tokens cost {v:.2f} target steps (the paper assumes 1).":
            v - 1,
        f"the rest of a round, such as acceptance: it costs {overhead:.2f} target steps.": overhead,
    }  # fmt: skip
    most = max(lost, key=lambda term: lost[term])
    return f"{most} A round costs {gamma * c:.2f} + {v:.2f} + {overhead:.2f} (γc + v + overhead)."


def doubtful(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why nothing follows from the timings of these rows; "" if they agree."""
    found = []
    for row in rows:
        wrong = doubts.contradictions(
            row["gamma"],
            row["c"],
            row["v"],
            row["overhead"],
            smaller=row.get("smaller", False),  # older rows do not say
            measured=row["speedup_decode"],
            predicted=row["predicted"],
        )
        name = f"{short(row['draft'])}, T = {row['temperature']:g}"
        found += [f"{name}: {one}" for one in wrong]
    busy = provenance.busy(rows)
    if not found:
        return busy
    doubt = f"The timings contradict themselves: {'; '.join(found)}."
    return f"{doubt} {busy or doubts.AGAIN}"


MAX_CHEAP_V = 2.5  # target steps; above it the processor limits the speedup


def here(row: Mapping[str, Any]) -> str:
    """A sentence on the machine if a verify pass costs much on it, or the loop is slower."""
    cores = f"{row['cores']} core{'' if row['cores'] == 1 else 's'} of this {row['device']}"
    if row["v"] <= MAX_CHEAP_V and row["speedup_decode"] > 1:
        return ""
    if row["v"] <= MAX_CHEAP_V:
        return f" On {cores} this draft is too slow or too often wrong for this target."
    return (
        f" On {cores} a verify pass of {row['gamma'] + 1} tokens takes {row['v']:.1f} times as "
        "long as one token: arithmetic takes the time here, not the reading of weights that "
        "speculation saves. More cores or an accelerator give a larger speedup."
    )


def section(config, rows: Sequence[dict[str, Any]]) -> Section:
    """A line for each draft and temperature."""

    def papers(row):
        found = pages.paper_speedup(config, short(row["draft"]), row["temperature"])
        return f"γ={found.gamma}: {found.expected} → {found.measured}" if found else "–"

    columns: list[report.Column] = [
        ("draft", lambda row: short(row["draft"])),
        ("T", lambda row: f"{row['temperature']:g}"),
        ("γ", lambda row: str(row["gamma"])),
        ("α", lambda row: number(row["alpha"], 3)),
        ("τ", lambda row: number(row["tau"])),
        *report.acceptance(rows),
        ("c", lambda row: number(row["c"], 3)),
        ("v(γ)", lambda row: number(row["v"])),
        ("o", lambda row: number(row["overhead"])),
        ("Thm 3.8", lambda row: number(row["predicted_paper"])),
        ("τ/(γc+v+o)", lambda row: number(row["predicted"])),
        ("decode", lambda row: number(row["speedup_decode"])),
        ("end to end", lambda row: number(row["speedup_end_to_end"])),
        ("identical", lambda row: {None: "–", True: "yes", False: "NO"}[row["identical"]]),
        ("paper", papers),
    ]
    return Section(
        "Tables 2 and 4: speedup over plain decoding, batch 1",
        columns,
        rows,
        words(rows),
        "τ: tokens per target call. c, v(γ): a draft step and a verify pass in target steps. "
        "o: the rest of a round, and its share of the fixed cost of a call, measured apart from "
        "the loops; it is below 0 if phases that are timed alone take longer than within a round. "
        "Thm 3.8: the paper's prediction, which assumes v = 1 and o = 0. "
        "decode, end to end: times plain decoding, without and with the encoder and prefill; "
        "medians of interleaved repeats, compilation excluded. identical: whether "
        "all outputs are plain decoding's; at T > 0 the loops draw other samples. paper: its "
        "expected and measured speedup for the row that Table 3 names.",
        ("speedups.png",),
    )


def words(rows: Sequence[dict[str, Any]]) -> str:
    """What the timings say, if they say anything, and whether the tokens are the same."""
    doubt = doubtful(rows)
    sentences = [doubt] if doubt else gained(rows)
    if any(row["identical"] is False for row in rows):
        sentences.append("At T=0 some outputs DIFFER from plain decoding: look for near-ties.")
    elif any(row["identical"] for row in rows):
        sentences.append("At T=0 every output is plain decoding's, token for token.")
    slower = [
        f"{short(r['draft'])} T={r['temperature']:g}" for r in rows if r["speedup_decode"] < 1
    ]
    if slower and not doubt:
        sentences.append(f"Decoding is faster without these drafts: {', '.join(slower)}.")
    return " ".join(sentences)


def gained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The best row, how good the predictions are, and what Thm 3.8 leaves out."""
    top = max(rows, key=lambda row: row["speedup_decode"])
    off = [row["speedup_decode"] / row["predicted"] for row in rows if row["predicted"]]
    promised = [row["predicted_paper"] / row["speedup_decode"] for row in rows]
    lengths = [row["tau"] / row["tau_expected"] for row in rows]
    verify = [row["v"] for row in rows]
    return [
        f"Largest speedup: {short(top['draft'])} at T={top['temperature']:g} with "
        f"γ={top['gamma']}: {top['speedup_decode']:.2f} times plain decoding (quartiles "
        f"{top['speedup_decode_low']:.2f} to {top['speedup_decode_high']:.2f}), "
        f"{top['speedup_end_to_end']:.2f} with the encoder.",
        f"Measured speedups lie {percent(min(off))} to {percent(max(off))} from τ/(γc+v+o)."
        if off
        else "The timings are too noisy for a prediction.",
        f"Thm 3.8 promises {min(promised):.2f} to {max(promised):.2f} times what was measured: a "
        f"verify pass takes {min(verify):.2f} to {max(verify):.2f} steps here and not 1, and τ is "
        f"{percent(min(lengths))} to {percent(max(lengths))} from (1−α^(γ+1))/(1−α), because "
        "acceptances within an output are correlated, and outputs end.",
    ]
