"""The tables of the report."""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.benchmark.cases import Case, suite
from experiments.benchmark.forced import expected, rounds
from experiments.reproduce.pages import Section, number
from experiments.reproduce.printed import TABLES_2_AND_4
from experiments.reproduce.study import rows_of
from specjax.measure import report

Row = dict[str, Any]


def sections(config, rows: Sequence[Row]) -> list[Section]:
    """All tables that have rows."""
    # Rows of earlier runs lack what is derived of their figures, or have it from another formula.
    rows = [{"share": 1.0} | row | (expected(row) if "rounds" in row else {}) for row in rows]
    made = [decoding(rows), silent(rows), batches(config, rows), paper(config, rows)]
    return [section for section in made if section.rows]


FAR = 3  # standard errors, beyond which a τ is no luck
ENOUGH = 8  # keys, for a figure that hangs on what was drawn


def decoding(rows: Sequence[Row]) -> Section:
    """A line for each case and loop."""
    lines = [
        {**row, **row[loop], "loop": loop}
        for row in rows_of(rows, {"kind": "decode"})
        for loop in ("autoregressive", "speculative")
        if loop in row
    ]
    columns: list[report.Column] = [
        ("case", named),
        ("loop", _loop),
        ("ms/token", lambda r: _range(r, "ms")),
        ("tokens/s", lambda r: f"{r['tokens_per_s']:.0f}"),
        ("floor, ms", lambda r: number(r["floor_ms"])),
        ("ms/floor", lambda r: number(r["ms"] / r["floor_ms"])),
        ("with encoder, ms", lambda r: number(r["whole_ms"])),
        ("transformers, ms", lambda r: _range(r, "peer_ms")),
        ("times it", lambda r: number(r.get("times_peer"))),
        ("α seen", lambda r: number(r["alpha_seen"] if _is_speculative(r) else None)),
        ("τ", lambda r: _range(r, "tau") if _is_speculative(r) else "–"),
        ("τ expected", lambda r: _tau_expected(r) if _is_speculative(r) else "–"),
        ("keys", lambda r: str(r["keys"]) if _is_speculative(r) else "–"),
        ("speedup", lambda r: _range(r, "speedup") if _is_speculative(r) else "–"),
        ("predicted", lambda r: number(r["predicted"] if _is_speculative(r) else None)),
        ("at α", lambda r: number(r["speedup_at_alpha"] if _is_speculative(r) else None)),
        ("c", lambda r: number(r.get("c") if _is_speculative(r) else None, 3)),
        ("v(γ)", lambda r: number(r.get("v") if _is_speculative(r) else None)),
        ("overhead", lambda r: f"{r['overhead_share']:.1%}" if _is_speculative(r) else "–"),
    ]
    notes = sorted({row["peer_note"] for row in lines if row["peer_note"]})
    differ = sum(row.get("peer_tokens_equal") is False for row in lines)
    remarks = f"Peers: {'; '.join(notes)}." if notes else ""
    if differ:
        remarks += f" In {differ} lines transformers' tokens DIFFER from ours: look for near-ties."
    if odd := [line for line in lines if _is_speculative(line) and abs(line["tau_off"]) > FAR]:
        each = ", ".join(f"{named(row)} ({row['tau_off']:+.1f})" for row in odd)
        remarks += (
            f" τ is NOT what α gives: it lies more than {FAR} standard errors off, which is no "
            f"luck, in {each}."
        )
    return Section(
        "Decoding",
        columns,
        lines,
        remarks.strip(),
        "ms/token: from one token of a row to its next, the loop alone; medians with quartiles. "
        "tokens/s: of all rows. floor: weights and cache that a step must read, over the bandwidth "
        "measured in the same turns; of a speculative round, γ draft steps and one target step, "
        "over its tokens. with encoder: the whole call, which is what transformers' figure is too; "
        "times it: how many times longer that takes. Its generate stands beside plain decoding, "
        "its assisted generation beside speculation. α forced: each drafted token is accepted with "
        "this chance, at the full cost of a round. α seen: the share that was. τ: tokens for each "
        "round of the batch, over all keys, with quartiles over keys. expected: what α gives "
        "outputs of N tokens on average, ± the standard error of a mean over so many keys. "
        "speedup: over plain decoding, medians and quartiles over repeats. predicted: "
        "τ/(γc+v+overhead), with the τ that came out. at α: the speedup, had τ been the "
        "expected one. overhead: of an iteration, what is neither a draft step nor the verify "
        "pass; raw, so below 0 where phases timed apart are dearer than within a round.",
    )


def named(row: Row) -> str:
    """A case in a few words: B rows, T the buffer, S the source, N the tokens."""
    parts = [row["target"] + (f" + {row['draft']}" if row["draft"] else "")]
    if row["share"] < 1:
        parts += [f"over {row['share']:.0%} of the ids"]
    parts += [f"B{row['batch']} T{row['buffer']} S{row['source']} N{row['tokens']}"]
    if row["dtype"] != "float32":
        parts.append(row["dtype"])
    if row["temperature"]:
        parts.append(f"temperature {row['temperature']:g}")
    return " ".join(parts)


def _is_speculative(line: Row) -> bool:
    return line["loop"] == "speculative"


def _loop(line: Row) -> str:
    if not _is_speculative(line):
        return "plain" if line["weights"] == "random" else f"plain, {line['weights']}"
    return f"γ={line['gamma']}, {_acceptance(line)}"


def _acceptance(row: Row) -> str:
    return "agreeing" if row["weights"] == "agreeing" else f"α={row['alpha']:g} forced"


def _range(row: Row, name: str) -> str:
    """A median with its quartiles, where it has them; "–" where there is none."""
    if name not in row:
        return "–"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{row[name]:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _tau_expected(line: Row) -> str:
    return f"{line['tau_expected']:.2f} ± {line['tau_error']:.2f}"


def silent(rows: Sequence[Row]) -> Section:
    """A line for each loop that drafts nothing."""
    columns: list[report.Column] = [
        ("case", named),
        ("T", lambda row: f"{row['temperature']:g}"),
        ("plain, ms/token", lambda row: _range(row["autoregressive"], "ms")),
        ("drafting nothing, ms/token", lambda row: _range(row["silent"], "ms")),
        ("speedup", lambda row: _range(row, "speedup")),
    ]
    return Section(
        "A loop that drafts nothing",
        columns,
        rows_of(rows, {"kind": "silent"}),
        "",
        "A speculative loop whose policy never drafts, with a verify pass of one position. It does "
        "what plain decoding does, and more: above 1, beyond the noise, the baseline is slower "
        "than it could be, and every speedup too high. Medians and quartiles over repeats.",
    )


def batches(config, rows: Sequence[Row]) -> Section:
    """Tokens per second by batch, and where speculation stops paying."""
    base = Case(**config.base.to_dict()).cell
    del base["batch"]
    lines = [row for row in rows_of(rows, {**base, "kind": "decode"}) if "speedup" in row]
    lines.sort(key=lambda row: row["batch"])
    if len(lines) < 2:
        return Section("Batches")

    def lockstep(row: Row) -> float:
        mean, _ = rounds(row["alpha"] ** row["batch"], row["gamma"], row["tokens"], 1)
        return row["tokens"] / mean

    columns: list[report.Column] = [
        ("B", lambda row: str(row["batch"])),
        ("plain, tokens/s", lambda row: f"{row['autoregressive']['tokens_per_s']:.0f}"),
        ("speculative, tokens/s", lambda row: f"{row['speculative']['tokens_per_s']:.0f}"),
        ("keys", lambda row: str(row["keys"])),
        ("α seen", lambda row: number(row["alpha_seen"])),
        ("speedup", lambda row: number(row["speedup"])),
        ("predicted", lambda row: number(row["predicted"])),
        ("at α", lambda row: number(row["speedup_at_alpha"])),
        ("v", lambda row: number(row["v"])),
        ("c", lambda row: number(row["c"], 3)),
        ("τ of the batch", lambda row: _range(row, "tau")),
        ("expected", _tau_expected),
        ("τ of a row", lambda row: number(row["tau_rows"])),
        ("τ in lockstep", lambda row: number(lockstep(row))),
    ]
    return Section(
        f"Batches: γ={config.base.gamma}, α={config.base.alpha:g} forced",
        columns,
        lines,
        stops_paying(lines),
        "c, v: of this batch. τ: tokens per iteration and row. Of the batch, until its slowest row "
        "ends, with quartiles over keys; expected: what α gives outputs of this length and batches "
        "of this size; at α: the speedup with that; of a row, until that row ends, which it "
        "does by itself; in lockstep: what would be left if every round advanced all rows by "
        "the smallest acceptance among them.",
    )


def stops_paying(rows: Sequence[Row]) -> str:
    """From which batch on. What one key or a few drew says nothing about others."""
    at_alpha = f"{where(rows, 'speedup_at_alpha')} at the expected τ"
    if (keys := min(row["keys"] for row in rows)) < ENOUGH:
        return (
            f"Speculation stops paying {at_alpha}. The speedups as measured are those of {keys} "
            f"key{'s' if keys > 1 else ''}, too few to say: {ENOUGH} are enough."
        )
    return (
        f"Over {keys} keys speculation stops paying {where(rows, 'speedup')} as measured, "
        f"{at_alpha}, and {where(rows, 'predicted')} as predicted from what B·(γ+1) positions cost."
    )


def where(rows: Sequence[Row], name: str) -> str:
    """Between which batches a speedup falls below 1."""
    for before, after in itertools.pairwise(rows):
        if before[name] >= 1 > after[name]:
            return f"between batch {before['batch']} and {after['batch']}"
    if rows[0][name] < 1:
        return f"before batch {rows[0]['batch']}"
    return f"beyond batch {rows[-1]['batch']}"


def paper(config, rows: Sequence[Row]) -> Section:
    """Tables 2 and 4 at their α and γ."""
    lines: list[dict[str, Any]] = []
    for case in suite(config)["paper"]:
        for row in rows_of(rows, case.cell):
            setting = case.draft, case.gamma, case.alpha, case.temperature
            lines += [
                {**row, "paper": printed}
                for printed in TABLES_2_AND_4
                if setting
                == (printed.draft.lower(), printed.gamma, printed.alpha, printed.temperature)
            ]
    columns: list[report.Column] = [
        ("task", lambda line: line["paper"].task),
        ("draft", lambda line: line["draft"]),
        ("T", lambda line: f"{line['temperature']:g}"),
        ("γ", lambda line: str(line["gamma"])),
        ("α forced", lambda line: number(line["alpha"])),
        ("α seen", lambda line: number(line["alpha_seen"])),
        ("c", lambda line: number(line["c"], 3)),
        ("paper's c", lambda line: number(line["paper"].c)),
        ("v", lambda line: number(line["v"])),
        ("τ/(γc+v)", lambda line: number(line["predicted_c_v"])),
        ("speedup", lambda line: number(line["speedup"])),
        ("speedup at α", lambda line: number(line["speedup_at_alpha"])),
        ("paper's", lambda line: number(line["paper"].measured, 1)),
    ]
    return Section(
        "Tables 2 and 4: the paper's shapes, α and γ",
        columns,
        lines,
        "",
        "α is an input here: what is measured is what the paper's α brings on this machine. "
        "speedup at α: without the luck of the draw; τ/(γc+v) and speedup share the τ that "
        "came out.",
    )
