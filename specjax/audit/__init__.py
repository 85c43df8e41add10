"""Audits: anybody's verifier, sampler or length rule, enumerated on small tables.

    from specjax.audit import audit

    print(audit(my_verifier))  # (drafts, draft_probs, target_probs, rng) → token ids

- `randomness`: an rng whose every outcome is taken
- `tables`, `kinds`: what a function of each kind is called with
- `auditing`, `findings`: the enumeration, samples in its place, and the report
- `by_key`, `of_rules`: functions of jax that take a key, and acceptance rules
- `cases`: samplers that ship, exact ones and errors
"""

from specjax.audit.auditing import Audit, audit
from specjax.audit.cases import CASES
from specjax.audit.findings import Finding
from specjax.audit.kinds import KINDS
from specjax.audit.randomness import Random

__all__ = ["CASES", "KINDS", "Audit", "Finding", "Random", "audit"]
