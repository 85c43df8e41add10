"""How far from the target is the output of samplers with a known error?

    python -m experiments.audit

Audits the shipped cases of `specjax.audit`, and prints the table of experiments/audit/README.md.
"""

from specjax.cli.audit import of_cases, table
from specjax.support import command_line


def main(_) -> None:
    print(table(of_cases()))


if __name__ == "__main__":
    command_line.run(main, __doc__)
