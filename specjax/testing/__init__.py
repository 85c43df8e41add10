"""Checks for your own rule, drafter, policy or model, in your own tests:

    from specjax.testing import check_drafter, check_policy, check_rule

    check_rule(MyRule())  # raises an AssertionError that names the error and its size

A check runs the real loop over a vocabulary of few tokens and takes every outcome of every round
(`enumeration`). It computes in float32 and allows a total variation of 1e-5; within
`jax.enable_x64(True)` it computes in float64 and allows 1e-9. `check_model` takes real models too.
"""

from specjax.testing.drafters import check_drafter
from specjax.testing.models import check_model
from specjax.testing.policies import check_policy
from specjax.testing.rules import check_rule

__all__ = ["check_drafter", "check_model", "check_policy", "check_rule"]
