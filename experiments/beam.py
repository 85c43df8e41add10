"""How many drafted steps speculative beam search keeps (A.4), and what they cost, by u and γ.

    python -m experiments.beam --workdir=runs/beam
    python -m experiments.beam --workdir=runs/beam --config=configs/embedded.py

The first runs on table models, whose drafts differ from the target by noise on their logits; it
takes about a minute. The second takes target, drafts and inputs from the config of a trained
family. Prints a table and writes it to report.md in the workdir.

A plain step is one call of the target that scores w prefixes. A round is one call that scores up
to w + uγ, and makes 1 step more than it keeps.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments import common, decode
from specjax import beam, files, report, tasks
from specjax.beam import Stats
from specjax.beam_decoding import BeamRow, beam_search
from specjax.models import hub
from specjax.models.table import Table
from specjax.types import Inputs

VOCAB = 64
STEPS = 32
NOISES = (0.1, 0.3, 1.0)  # deviation on the draft's logits; the target's have deviation 2
FIELDS = ("target_calls", "steps", "drafted", "kept", "evaluations")
COLUMNS: tuple[report.Column, ...] = (
    ("draft", lambda row: row["draft"]),
    ("u", lambda row: f"{row['draft_width']}"),
    ("γ", lambda row: f"{row['gamma']}"),
    ("kept", lambda row: f"{row['kept'] / max(row['drafted'], 1):.2f}"),
    ("steps a call", lambda row: f"{row['steps'] / row['target_calls']:.2f}"),
    ("scored a call", lambda row: f"{row['evaluations'] / row['target_calls']:.1f}"),
    ("scored a step, × plain", lambda row: f"{ratio(row):.1f}"),
)


def main(_) -> None:
    options = flags.FLAGS
    workdir = common.make_workdir(options.workdir)
    sizes = [
        (options.width, int(draft_width), int(gamma))
        for draft_width in options.draft_widths
        for gamma in options.gammas
    ]
    measured = family(options.config, sizes) if options.config else tables(options.seed, sizes)
    rows = sorted(measured, key=lambda row: row["draft"])
    title = f"Speculative beam search, w = {options.width}"
    console = Console()
    console.print(report.table(COLUMNS, rows, title))
    with files.replacing(workdir / "report.md") as part:
        part.write_text(f"# {title}\n\n{report.markdown(COLUMNS, rows)}\n", encoding="utf-8")
    console.print(f"The same in Markdown: {workdir / 'report.md'}", soft_wrap=True)


def ratio(row: dict[str, Any]) -> float:
    """Prefixes scored for each step, against the w of plain beam search."""
    return row["evaluations"] / (row["steps"] * row["width"])


def tables(seed: int, sizes: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Random laws by last token; 64 inputs start from the 64 tokens and never end."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2.0, size=(VOCAB, VOCAB))
    noise = rng.normal(size=logits.shape)
    target = table(logits)
    one = jnp.ones((VOCAB,), jnp.int32)
    empty = jnp.zeros((VOCAB, 0), jnp.int32)
    inputs = Inputs(empty, 0 * one, jnp.arange(VOCAB, dtype=jnp.int32)[:, None], one)
    for width, draft_width, gamma in sizes:
        for scale in NOISES:
            draft = table(logits + scale * noise)
            overlap = jnp.minimum(jnp.exp(target.table), jnp.exp(draft.table)).sum(axis=1).mean()
            state = beam.speculative(
                target,
                draft,
                inputs,
                STEPS * one,
                jnp.int32([-1]),
                width=width,
                draft_width=draft_width,
                gamma=gamma,
                buffer_len=1 + STEPS + gamma + 1,
            )
            yield row(f"α = {float(overlap):.2f}", width, draft_width, gamma, state.stats)


def table(logits: np.ndarray) -> Table:
    """A model that looks at the last token."""
    return Table(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def family(config: Any, sizes: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """The config's target, drafts and inputs."""
    dtype = decode.DTYPES[config.dtype]
    target = hub.load(config.target, dtype=dtype)
    pairs = tasks.load(config.task, config.split)[: flags.FLAGS.inputs]
    texts = [pair.input for pair in pairs]
    for name in config.drafts:
        draft = hub.load(name, dtype=dtype)
        for width, draft_width, gamma in sizes:
            found = beam_search(
                target,
                draft,
                texts,
                width=width,
                draft_width=draft_width,
                gamma=gamma,
                max_new_tokens=config.max_new_tokens,
            )
            yield row(name.rsplit("/", 1)[-1], width, draft_width, gamma, *found)


def row(
    draft: str, width: int, draft_width: int, gamma: int, *counts: Stats | BeamRow
) -> dict[str, Any]:
    """Totals over all inputs."""
    sums = {name: int(sum(np.sum(getattr(count, name)) for count in counts)) for name in FIELDS}
    return {"draft": draft, "width": width, "draft_width": draft_width, "gamma": gamma, **sums}


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "A trained family; none: table models.")
    flags.DEFINE_string("workdir", None, "Directory for the table; made if it does not exist.",
                        required=True)  # fmt: skip
    flags.DEFINE_integer("width", 4, "w, beams of the target.", lower_bound=1)
    flags.DEFINE_list("draft_widths", ["4", "8", "16"], "u, beams of the draft.")
    flags.DEFINE_list("gammas", ["2", "4", "8"], "γ, drafted steps in a round.")
    flags.DEFINE_integer("inputs", 20, "Of a family's task.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the table models.")
    common.run(main, __doc__)
