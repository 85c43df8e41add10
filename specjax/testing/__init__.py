"""Checks for your own rule, drafter, policy or model, in your own tests:

    from specjax.testing import check_drafter, check_policy, check_rule

    check_rule(MyRule())  # raises an AssertionError that names the error and its size

`check_drafter` and `check_policy` run the real loop over a vocabulary of few tokens and take every
outcome of every round (`enumeration`); `check_rule` audits a round (`specjax.audit`). They compute
in float32 and allow a total variation of 1e-5; within `jax.enable_x64(True)` they compute in
float64 and allow 1e-9. `check_model` takes real models too.
"""

from specjax.testing.drafters import check_drafter
from specjax.testing.models import check_model
from specjax.testing.policies import check_policy
from specjax.testing.rules import check_rule

__all__ = ["check_drafter", "check_model", "check_policy", "check_rule"]
