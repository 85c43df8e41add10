"""What is wrong with a pair: checks from files to speedup, each a line with a verdict and a way
out.

- `verdicts`: what is seen → verdict and way out, with every threshold and its reason
- `distributions`: the target's distribution by teacher forcing, and whether draws follow it
- `checks`: the order of the checks, and what each looks at
"""

from specjax.doctor.checks import CHECKS, TEXTS, Plan, examine
from specjax.doctor.verdicts import Finding, Verdict

__all__ = ["CHECKS", "TEXTS", "Finding", "Plan", "Verdict", "examine"]
