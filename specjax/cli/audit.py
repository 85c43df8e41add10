"""Audit a sampler: compare the distribution of its output with the target's.

    specjax audit MODULE:FUNCTION [--kind=verify]
    specjax audit --rule=block
    specjax audit --cases

FUNCTION is Python, with numpy, jax or torch. --kind says how it is called; docs/audit.md has an
example of each kind:

{kinds}
`rng` draws like numpy's Generator, and every outcome of its draws is taken. A function that cannot
be enumerated draws samples: --rng=generator, or --rng=key for one of jax. The command prints the
total variation from the target's distribution on small tables, and the smallest table that shows an
error. Status 1 unless the sampler is exact.

MODULE:FUNCTION is code that runs. The name of a shipped case works too; --cases lists them.
"""

import sys

from absl import flags

from specjax.audit import CASES, KINDS, audit
from specjax.audit.auditing import DRAWS, TOLERANCES, Audit
from specjax.support import command_line, named

NAMES = {name: f"specjax.audit.cases:{name}" for name in CASES}


def main(argv: list[str]) -> None:
    args, names = flags.FLAGS, argv[1:]
    if len(names) + bool(args.rule) + args.cases != 1:
        raise ValueError("Give one of MODULE:FUNCTION, --rule and --cases. See --help.")
    if args.cases:
        audits = of_cases()
        print(table(audits))
        sys.exit(any(found.exact != CASES[name].exact for name, found in audits.items()))
    found = of_rule(args.rule) if args.rule else of_function(names[0])
    print(found)
    sys.exit(not found.exact)


def of_function(name: str) -> Audit:
    """Find the function and audit it as the flags say."""
    args = flags.FLAGS
    try:
        function = named.find("sampler", NAMES, name)
    except ValueError:
        raise
    except Exception as error:  # the module's own
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if args.rng != "branching":
        command_line.say("drawing samples of each table")
    return audit(
        function,
        args.kind or (CASES[name].kind if name in CASES else "verify"),
        rng=args.rng,
        draws=args.draws,
        dtype=args.dtype,
        seed=args.seed,
    )


def of_rule(name: str) -> Audit:
    """Audit an acceptance rule."""
    from specjax import rules  # it imports jax

    return audit(rules.parse(name), seed=flags.FLAGS.seed)


def of_cases() -> dict[str, Audit]:
    """Audit all shipped cases."""
    return {name: audit(case.function, case.kind) for name, case in CASES.items()}


def table(audits: dict[str, Audit]) -> str:
    """Format a row for each shipped case."""
    lines = ["| case | kind | total variation | see |", "|---|---|---|---|"]
    for name, found in audits.items():
        figure = "exact" if found.exact else f"{found.total_variation:.3f}"
        lines.append(f"| `{name}` | {found.kind} | {figure} | {CASES[name].seen} |")
    return "\n".join(lines)


def run() -> None:
    """Run the command with the flags of this process."""
    flags.FLAGS.set_gnu_getopt(True)  # flags may follow MODULE:FUNCTION
    flags.DEFINE_enum("kind", None, list(KINDS), "How the function is called; none: verify.")
    flags.DEFINE_string("rule", "", "An acceptance rule, by name or import path.")
    flags.DEFINE_bool("cases", False, "Audit all shipped cases.")
    flags.DEFINE_enum("rng", "branching", ["branching", *DRAWS], "What the function draws from.")
    flags.DEFINE_integer("draws", None, "Samples of each table, where they are drawn.")
    flags.DEFINE_enum("dtype", "float64", list(TOLERANCES), "Of the probabilities.")
    flags.DEFINE_integer("seed", 0, "Of the random tables.")
    kinds = "".join(
        f"  {name:<14}({kind.signature})\n  {'':<14}→ {kind.returns}\n"
        for name, kind in KINDS.items()
    )
    usage = (__doc__ or "").replace("{kinds}", kinds)
    command_line.run(main, usage, positional=1)
