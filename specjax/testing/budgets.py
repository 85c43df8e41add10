"""The check of verify budgets: outputs of a batch stay the target's."""

from specjax.budgets.base import Budget
from specjax.contracts import check_part
from specjax.policies import constant
from specjax.testing.common import GAMMA, Lengths, check_joint, check_returns, report
from specjax.testing.policies import LIMITS, PAIR, lengths_of, pair_of


def check_budget(budget: Budget, *, gamma_max: int = GAMMA, seed: int = 0) -> Lengths:
    """Check a budget's decisions, and that outputs of two rows keep the target's distribution.

    Prints and returns how many drafted tokens it verified.

    - The state has a row for each row of the batch, and keeps its shapes and dtypes.
    - Decisions have the shapes and dtypes of docs/budgets.md.
    - Every outcome of every round of two rows gives the product of the target's distributions, in
      passes of all compiled sizes.

    Args:
      budget: a budget whose settings fit a batch of 2 rows.
      gamma_max: the longest draft. Enumeration takes 4^γ_max drafts of two rows: keep it at 2.
      seed: picks the distributions of target and draft.

    Raises:
      ValueError: a class or a name is given.
      AssertionError: the message names the error and its size.
    """
    check_part("budget", budget)
    name = type(budget).__name__
    sizes = tuple(range(len(LIMITS), len(LIMITS) * (gamma_max + 1)))
    method = pair_of(constant(gamma_max), gamma_max, seed, budget=budget, sizes=sizes)
    check_returns(method, PAIR)
    check_joint(f"{name}, two rows together", method, PAIR, LIMITS)
    return report(f"{name} verifies", lengths_of(method, len(LIMITS)), gamma_max)
