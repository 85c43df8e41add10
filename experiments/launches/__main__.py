"""What policies cost on a GPU, without one: the operations that a round launches there.

    python -m experiments.launches --target=families/parse/target --draft=families/parse/draft-small

XLA compiles for an H100 that is described to it, from shapes alone: a minute for a few policies.
No GPU is needed, but jax's plugin for CUDA: pip install 'jax[cuda13]'. With --platform=cpu it is
the program for this machine.

A model is a directory that need hold no more than a config.json, a name on the hub, or one of
experiments/plan/published.py. The table has the operations of a round that drafts nothing, one
token, and γ, and how often the host reads a condition in the last of these; and beside them those
of a token of plain decoding. With one row, an operation takes some microseconds on a GPU, however
small it is. A policy whose drafts are fixed drafts γ tokens there in every round.
"""

import sys

import jax
from absl import flags
from rich.console import Console

from experiments.launches import programs
from experiments.plan.published import PUBLISHED
from specjax import checkpoints, decoding
from specjax.cli.defaults import DTYPES
from specjax.measure import report
from specjax.policies import Costs, Policy, needs_costs, parse
from specjax.sampling import Sampling
from specjax.support import command_line

UNDECIDED = "specjax.tuning.counting:Undecided"
POLICIES = ("constant", UNDECIDED, "svip", "goodput", "first_descent", "lookahead")
COLUMNS: list[report.Column] = [
    ("policy", lambda row: row["policy"]),
    ("no draft", lambda row: str(row["none"].operations)),
    ("one token", lambda row: str(row["one"].operations) if "one" in row else "–"),
    ("γ tokens", lambda row: str(row["all"].operations) if "all" in row else "–"),
    ("reads", lambda row: str((row["all"] if "all" in row else row["none"]).reads)),
]


def main(_) -> None:
    args = flags.FLAGS
    if args.gamma < 1:
        raise ValueError(f"--gamma={args.gamma} must be at least 1.")
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and the plugin need find no GPU
    layout = {"cuda": "gpu", "cpu": "cpu"}[args.platform]
    target, draft = (
        checkpoints.described(PUBLISHED.get(name, name), dtype=DTYPES[args.dtype], platform=layout)
        for name in (args.target, args.draft)
    )
    chosen, console = (
        Sampling(args.temperature),
        Console(width=None if sys.stdout.isatty() else 100),
    )
    rows = []
    for name in ("plain", *(args.policy or POLICIES)):
        with console.status(f"Compiling {name}"):
            method = decoding.build(
                target,
                None if name == "plain" else draft,
                gamma=args.gamma,
                sampling=chosen,
                rule=args.rule,
                policy=None if name == "plain" else policy_of(name, args.gamma),
            )
            text = programs.compiled(
                method,
                target,
                args.source,
                max_new_tokens=args.tokens,
                platform=args.platform,
                rows=args.batch,
            )
        round_ = programs.read(text).loop("decode")
        drafted = {"none": 0} if name == "plain" else {"none": 0, "one": 1, "all": args.gamma}
        counts = {key: programs.of_round(round_, count) for key, count in drafted.items()}
        rows.append({"policy": name.rpartition(":")[2], **counts})
    console.print(report.table(COLUMNS, rows, f"Operations of a round, γ = {args.gamma}"))


def policy_of(name: str, gamma: int) -> Policy:
    """By its name; what it is told of costs does not change its program."""
    if name == "constant":
        return parse(name, gamma=gamma)
    table = Costs(0.1, [1.0] * (gamma + 1))
    return parse(name, **({"costs": table} if needs_costs(name) else {}))


if __name__ == "__main__":
    flags.DEFINE_string("target", "families/parse/target", "A model.")
    flags.DEFINE_string("draft", "families/parse/draft-small", "A model.")
    flags.DEFINE_multi_string("policy", [], "A name, or module:attribute; may be repeated.")
    flags.DEFINE_string("rule", None, "The acceptance rule.")
    flags.DEFINE_integer("gamma", 10, "The longest draft.")
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
    flags.DEFINE_enum("dtype", "bfloat16", [name for name in DTYPES if name], "Of both models.")
    flags.DEFINE_integer("batch", 1, "Rows.")
    flags.DEFINE_integer("source", 32, "Tokens of the text.")
    flags.DEFINE_integer("tokens", 64, "New tokens.")
    flags.DEFINE_enum("platform", "cuda", ["cuda", "cpu"], "What to compile for.")
    command_line.run(main, __doc__)
