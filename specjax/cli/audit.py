"""Audit a sampler: is the distribution of its output the target's?

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

MODULE:FUNCTION is code that runs. NAME of a shipped case works too; --cases lists them.
"""

import argparse
import sys
from collections.abc import Sequence

from specjax.audit import CASES, KINDS, audit
from specjax.audit.auditing import TOLERANCES
from specjax.support import command_line, named

NAMES = {name: f"specjax.audit.cases:{name}" for name in CASES}
RNGS = "branching", "generator", "key"


def main(argv: Sequence[str] | None = None) -> None:
    """Audit as the arguments say; an error is one sentence, with status 1.

    Args:
      argv: the function and flags; None: those of this process.
    """
    kinds = "".join(
        f"  {name:<14}({kind.signature})\n  {'':<14}→ {kind.returns}\n"
        for name, kind in KINDS.items()
    )
    parser = argparse.ArgumentParser(
        prog="specjax audit",
        description=(__doc__ or "").replace("{kinds}", kinds),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", nargs="?", help="what to audit")
    parser.add_argument("--kind", choices=KINDS, help="how it is called; without it verify")
    parser.add_argument("--rule", help="an acceptance rule, by name or import path")
    parser.add_argument("--cases", action="store_true", help="audit all shipped cases")
    parser.add_argument("--rng", choices=RNGS, default=RNGS[0], help="what it draws from")
    parser.add_argument("--draws", type=int, help="samples of each table, if they are drawn")
    parser.add_argument(
        "--dtype", choices=TOLERANCES, default="float64", help="of the probabilities"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random tables")
    arguments = parser.parse_args(argv)
    given = [bool(arguments.function), bool(arguments.rule), arguments.cases]
    if sum(given) != 1:
        command_line.fail("Give one of MODULE:FUNCTION, --rule and --cases. See --help.")
    try:
        if arguments.cases:
            lines, as_declared = cases()
            print("\n".join(lines))
            sys.exit(not as_declared)
        found = audit(
            *_named(arguments),
            rng=arguments.rng,
            draws=arguments.draws,
            dtype=arguments.dtype,
            seed=arguments.seed,
        )
        print(found)
        sys.exit(not found.exact)
    except BrokenPipeError:
        command_line.leave_without_reader()
    except ValueError as error:
        command_line.fail(str(error))
    except KeyboardInterrupt:
        command_line.say("interrupted")
        sys.exit(130)


run = main  # the name that the command `specjax` calls


def _named(arguments: argparse.Namespace) -> tuple:
    """Find the function or rule, and its kind."""
    if arguments.rule:
        from specjax import rules  # it imports jax

        return rules.parse(arguments.rule), "verify"
    name = arguments.function
    try:
        function = named.find("sampler", NAMES, name)
    except ValueError:
        raise
    except Exception as error:  # of the module's own code
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    return function, arguments.kind or (CASES[name].kind if name in CASES else "verify")


def cases() -> tuple[list[str], bool]:
    """Audit all shipped cases: the lines of a table, and whether each is what it declares."""
    lines = ["| case | kind | total variation | seen in |", "|---|---|---|---|"]
    as_declared = True
    for name, case in CASES.items():
        found = audit(case.function, case.kind)
        as_declared &= found.exact == case.exact and not found.fault
        figure = "exact" if found.exact else f"{found.total_variation:.3f}"
        lines.append(f"| `{name}` | {case.kind} | {figure} | {case.seen} |")
    return lines, as_declared
