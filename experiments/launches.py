"""What policies cost on a GPU before there is one: the launches of a round, by its parts.

    python -m experiments.launches --target=families/parse/target --draft=families/parse/draft-small

XLA compiles for an H100 that is described to it, from shapes alone: a minute for a few policies.
No GPU is needed, but jax's plugin for CUDA: pip install 'jax[cuda13]'. With --platform=cpu it is
the program for this machine.

A model is a directory that need hold no more than a config.json, a name on the hub, or one of
specjax/models/hub/published.py. The table has the operations of a round that drafts nothing, one
token, and γ, and how often the host reads a condition in the last of these. With one row, an
operation takes some microseconds on a GPU, however small it is. A policy whose drafts are fixed
drafts γ tokens there in every round.
"""

import sys

from absl import flags
from rich.console import Console

from specjax import decoding
from specjax.measure import launches, report
from specjax.models import hub
from specjax.models.hub.published import PUBLISHED
from specjax.policies import Policy, load, needs_prices, prices
from specjax.pytrees import pytree
from specjax.sampling import sampling
from specjax.support import command_line
from specjax.tools.commands.defaults import DTYPES

UNDECIDED = "experiments.launches:Undecided"
POLICIES = ("constant", UNDECIDED, "svip", "goodput", "first_descent", "lookahead")
COLUMNS: list[report.Column] = [
    ("policy", lambda row: row["policy"]),
    ("no draft", lambda row: str(row["counts"][0].operations)),
    ("one token", lambda row: str(row["counts"][1].operations)),
    ("γ tokens", lambda row: str(row["counts"][2].operations)),
    ("reads", lambda row: str(row["counts"][2].reads)),
]


@pytree
class Undecided(Policy):
    """Drafts γ_max tokens, which the loop does not know: what is left of a policy without its
    decisions."""


def main(_) -> None:
    args = flags.FLAGS
    if args.gamma < 1:
        raise ValueError(f"--gamma={args.gamma} must be at least 1.")
    layout = {"cuda": "gpu", "cpu": "cpu"}[args.platform]
    target, draft = (
        hub.described(PUBLISHED.get(name, name), dtype=DTYPES[args.dtype], platform=layout)
        for name in (args.target, args.draft)
    )
    console, rows = Console(width=None if sys.stdout.isatty() else 100), []
    for name in args.policy or POLICIES:
        with console.status(f"Compiling {name}"):
            settings = {"prices": prices(0.1, [1.0] * (args.gamma + 1))}
            settings = settings if needs_prices(name) else {}
            if name == "constant":
                settings = {"gamma": args.gamma}
            method = decoding.build(
                target,
                draft,
                gamma=args.gamma,
                sampling=sampling(args.temperature),
                rule=args.rule,
                policy=load(name, **settings),
            )
            text = launches.compiled(
                method,
                target,
                args.source,
                max_new_tokens=args.tokens,
                platform=args.platform,
                rows=args.batch,
            )
        round_ = launches.read(text).loop("decode")
        counts = [launches.of_round(round_, drafted) for drafted in (0, 1, args.gamma)]
        rows.append({"policy": name.rpartition(":")[2], "counts": counts})
    console.print(report.table(COLUMNS, rows, f"Operations of a round, γ = {args.gamma}"))


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
