"""Pack a trace to be shipped: a file for each draft and temperature, with what replay reads.

    python -m experiments.trace.pack --trace=runs/mixed --workdir=docs/results/mixed

Numbers are rounded to 7 bits. A rollout is left out where the target accepts the output's own token
for certain, since no round drafts along it. The target's entropy and ids of rollouts are left out.
Results.jsonl has a row for each file, with the outputs of each kind of text.
"""

import pathlib
from typing import Any

import numpy as np
from absl import flags

from experiments.replay.__main__ import of_trace
from specjax.replay import rollouts
from specjax.replay.rollouts import Rollouts
from specjax.support import command_line, files
from specjax.support.named import short

BITS = 7  # of a number


def main(_) -> None:
    trace = pathlib.Path(flags.FLAGS.trace)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    rows = files.read_rows(trace / "results.jsonl")
    lines = []
    for draft, temperature in dict.fromkeys((row["draft"], row["temperature"]) for row in rows):
        row, found, _ = of_trace(trace, short(draft), temperature)
        name = f"{short(draft)}-T{temperature:g}.npz"
        rollouts.save(workdir / name, packed(found))
        unknown = dict.fromkeys(("category", "alpha", "seconds", "bytes", "load_per_core"))
        lines.append(row | unknown | {"positions": int(found.emitted.sum()), "file": name})
        command_line.say(f"{name}: {(workdir / name).stat().st_size:,} bytes")
    files.write_rows(workdir / "results.jsonl", lines)


def packed(found: Rollouts) -> Rollouts:
    """Round, and clear what no replayed round reads."""
    sure = (found.acceptance == 1) & (found.accepted < 0)
    fields: dict[str, Any] = {name: np.array(x) for name, x in found._asdict().items()}
    fields["target_entropy"] *= 0
    fields["drafts"] *= 0
    for name in ("target", "draft", "belief_logprob", "overlap", "entropy", "top1"):
        # Of the output's own token the first slot holds what does not depend on the token drawn.
        kept = 1 if name in ("overlap", "entropy", "top1") else 0
        fields[name][np.asarray(sure), kept:] = 0
    for name, x in fields.items():
        if x.dtype == np.float32:
            fields[name] = _rounded(x)
    return Rollouts(**fields)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Round to `BITS` bits, as a float16."""
    mantissa, exponent = np.frexp(x)
    rounded = np.ldexp(np.round(mantissa * (1 << BITS)) / (1 << BITS), exponent)
    with np.errstate(over="ignore"):  # of −3e38, and behind the end of a rollout
        return rounded.astype(np.float16)


if __name__ == "__main__":
    flags.DEFINE_string("trace", None, "Directory of experiments.trace.")
    flags.DEFINE_string("workdir", None, "Directory for the files.")
    flags.mark_flags_as_required(["trace", "workdir"])
    command_line.run(main, __doc__)
