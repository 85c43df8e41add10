"""Checks of a pair, from files to speedup: each a line with a verdict and a way out.

- `verdicts`: observations → verdict and way out, with every threshold and its reason
- `distributions`: the target's distribution by teacher forcing, and a test of draws against it
- `case`: a pair, how it will be used, and what is known of it
- `checks`: the order of the checks, and what each examines
"""

from specjax.doctor.case import TEXTS, Plan
from specjax.doctor.checks import CHECKS, examine
from specjax.doctor.verdicts import Finding, Verdict

__all__ = ["CHECKS", "TEXTS", "Finding", "Plan", "Verdict", "examine"]
