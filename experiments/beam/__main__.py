"""How many drafted steps speculative beam search keeps (A.4), and what they cost, by u and γ.

    python -m experiments.beam --workdir=runs/beam
    python -m experiments.beam --workdir=runs/beam --config=configs/embedded.py

The first runs on table models, whose drafts differ from the target by noise on their logits; it
takes about a minute. The second takes target, drafts and inputs from the config of a trained
family and takes some minutes. Both compare all hypotheses with those of plain beam search. Prints a
table and writes it to report.md in the workdir.

A plain step is one call of the target that scores w prefixes. A round is one call that scores up
to w + uγ, and makes 1 step more than it keeps.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments import command
from experiments.beam import search as beam
from experiments.beam.decoding import BeamRow, beam_search
from experiments.beam.search import Hypothesis, Stats
from experiments.reproduce.pages import Section
from experiments.tasks.config import load_examples
from specjax import checkpoints
from specjax.cli import defaults
from specjax.measure import provenance, report
from specjax.models.table import Table
from specjax.support import command_line
from specjax.types import Inputs

VOCAB = 64
STEPS = 32
NOISES = (0.1, 0.3, 1.0)  # deviation on the draft's logits; the target's have deviation 2
WIDTH = 4  # w, unless flags say otherwise; so are the next two
DRAFT_WIDTHS = (4, 8, 16)  # u
GAMMAS = (2, 4, 8)
BATCH = 8  # inputs of a family at once
FIELDS = ("target_calls", "steps", "verified", "kept", "evaluations")
COLUMNS: tuple[report.Column, ...] = (
    ("draft", lambda row: row["draft"]),
    ("u", lambda row: f"{row['draft_width']}"),
    ("γ", lambda row: f"{row['gamma']}"),
    ("kept", lambda row: f"{row['kept'] / max(row['verified'], 1):.2f}"),
    ("steps a call", lambda row: f"{row['steps'] / row['target_calls']:.2f}"),
    ("scored a call", lambda row: f"{row['evaluations'] / row['target_calls']:.1f}"),
    ("scored a step, × plain", lambda row: f"{ratio(row):.1f}"),
    ("identical", lambda row: f"{row['identical']}/{row['inputs']}"),
)


def main(_) -> None:
    options = flags.FLAGS
    workdir = command_line.make_workdir(options.workdir)
    sizes = [
        (options.width, draft_width, gamma)
        for draft_width in command.numbers("draft_widths", options.draft_widths, int)
        for gamma in command.numbers("gammas", options.gammas, int)
    ]
    if options.config:
        measured = family(options.config, options.inputs, sizes)
    else:
        noises = command.numbers("noises", options.noises, float)
        measured = tables(options.seed, sizes, noises, nested=options.nested)
    rows = sorted(measured, key=lambda row: row["draft"])
    title = f"Speculative beam search, w = {options.width}"
    rows = [row | provenance.environment() | {"seed": options.seed} for row in rows]
    command.publish(workdir, title, [Section("Steps that are kept", COLUMNS, rows)], rows)


def ratio(row: dict[str, Any]) -> float:
    """Prefixes scored for each step, against the w of plain beam search."""
    return row["evaluations"] / (row["steps"] * row["width"])


def tables(
    seed: int,
    sizes: Sequence[tuple[int, int, int]],
    noises: Sequence[float] = NOISES,
    *,
    nested: bool = True,
) -> Iterator[dict[str, Any]]:
    """Random distributions by last token; 64 inputs start from the 64 tokens and never end."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2.0, size=(VOCAB, VOCAB))
    noise = rng.normal(size=logits.shape)
    target = table(logits)
    one = jnp.ones((VOCAB,), jnp.int32)
    empty = jnp.zeros((VOCAB, 0), jnp.int32)
    inputs = Inputs(empty, 0 * one, jnp.arange(VOCAB, dtype=jnp.int32)[:, None], one)
    task = inputs, STEPS * one, jnp.int32([-1])
    for width, draft_width, gamma in sizes:
        plain = beam.n_best(beam.search(target, *task, width=width, buffer_len=1 + STEPS + 1))
        for scale in noises:
            draft = table(logits + scale * noise)
            overlap = jnp.minimum(jnp.exp(target.table), jnp.exp(draft.table)).sum(axis=1).mean()
            state = beam.speculative(
                target,
                draft,
                *task,
                width=width,
                draft_width=draft_width,
                gamma=gamma,
                buffer_len=1 + STEPS + gamma + 1,
                nested=nested,
            )
            yield {
                "draft": f"α = {float(overlap):.2f}",
                **shape(width, draft_width, gamma),
                **totals([state.stats]),
                **compare(plain, beam.n_best(state)),
                "dtype": str(target.table.dtype),
            }


def table(logits: np.ndarray) -> Table:
    """A model that looks at the last token."""
    return Table(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def family(
    config: Any, inputs: int, sizes: Sequence[tuple[int, int, int]] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each draft of the config and each (w, u, γ) on the task's first `inputs`.

    A row says how many drafted steps were kept, over all inputs, and what it took (`COLUMNS` shows
    the table); plain beam search of the same inputs is run to compare with.

    Args:
      config: with target, drafts, dtype, task, split and max_new_tokens, as configs/embedded.py.
      sizes: default: w = 4 and γ = 4 with u = 4, 8 and 16.
    """
    if sizes is None:
        sizes = [(WIDTH, draft_width, 4) for draft_width in DRAFT_WIDTHS]
    precision = defaults.precision(config)
    command_line.say_loading(config.target, *config.drafts)
    target = checkpoints.load(config.target, **precision)
    texts = [pair.input for pair in load_examples(config)[:inputs]]
    limit = config.max_new_tokens
    command_line.say("compiling beam search, without a draft and with each")
    plain = {
        width: beam_search(target, None, texts, width=width, max_new_tokens=limit, batch_size=BATCH)
        for width in {width for width, *_ in sizes}
    }
    for name in config.drafts:
        draft = checkpoints.load(name, dtype=precision["dtype"])
        for width, draft_width, gamma in sizes:
            own: dict[str, Any] = shape(width, draft_width, gamma)
            found = beam_search(target, draft, texts, **own, max_new_tokens=limit, batch_size=BATCH)
            yield {
                "draft": pathlib.PurePath(name).name,
                **own,
                **totals(found),
                **compare(*([row.hypotheses for row in rows] for rows in (plain[width], found))),
                "dtype": provenance.dtype_of(target),
                "batch": BATCH,
            }


def shape(width: int, draft_width: int, gamma: int) -> dict[str, int]:
    """w, u and γ of a row."""
    return {"width": width, "draft_width": draft_width, "gamma": gamma}


def totals(counts: Sequence[Stats | BeamRow]) -> dict[str, int]:
    """Sums over all inputs."""
    return {name: int(sum(np.sum(getattr(count, name)) for count in counts)) for name in FIELDS}


def compare(plain: Sequence[list[Hypothesis]], found: Sequence[list[Hypothesis]]) -> dict[str, int]:
    """For how many inputs all hypotheses are those of plain beam search, in the same order."""
    same = [
        [one.tokens for one in before] == [one.tokens for one in after]
        for before, after in zip(plain, found, strict=True)
    ]
    return {"identical": sum(same), "inputs": len(same)}


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "A trained family; none: table models.")
    flags.DEFINE_string("workdir", None, "Directory for the table; made if it does not exist.",
                        required=True)  # fmt: skip
    flags.DEFINE_integer("width", WIDTH, "w, beams of the target.", lower_bound=1)
    flags.DEFINE_list("draft_widths", list(map(str, DRAFT_WIDTHS)), "u, beams of the draft.")
    flags.DEFINE_list("gammas", list(map(str, GAMMAS)), "γ, drafted steps in a round.")
    flags.DEFINE_integer("inputs", 20, "Of a family's task.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the table models.")
    flags.DEFINE_list("noises", list(map(str, NOISES)), "On the drafts of the table models.")
    flags.DEFINE_bool("nested", True, "With table models; --nonested: the appendix to the letter.")
    command_line.run(main, __doc__)
