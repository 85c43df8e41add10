"""Audits of acceptance rules: a rule as a verifier that draws by its distributions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.audit.kinds import Fault, Function, Problem, called
from specjax.audit.randomness import Refused
from specjax.rules.base import AcceptanceRule


def tolerance() -> float:
    """The largest total variation that counts as exact, in the precision of jax."""
    return 1e-9 if jax.config.read("jax_enable_x64") else 1e-5


def verifier(rule: Any, problems: list[Problem]) -> Function:
    """The rule as a function of the kind "verify", for these problems.

    Raises:
      ValueError: the rule shares noise between target and draft. The function raises it (`Refused`)
        if the rule raises an exception, or returns arrays of other shapes.
    """
    noise = getattr(type(rule), "given_noise", AcceptanceRule.given_noise)
    if noise is not AcceptanceRule.given_noise:
        raise ValueError(
            f"{rule!r} draws by noise that target and draft share: specjax.testing.check_rule "
            "compares its tokens with those of plain decoding."
        )
    size = max(problem.tables[0].size for problem in problems)
    gamma = max(problem.tables[0].gamma for problem in problems)
    ask, known = _asking(rule), {}

    def verify(drafts, draft_probs, target_probs, rng):
        parts = target_probs, draft_probs, drafts
        key = b"".join(part.tobytes() for part in parts)
        if key not in known:
            missing, ids = (0, gamma - len(drafts)), (0, size - target_probs.shape[1])
            target, draft = (np.pad(probs, (missing, ids)) for probs in parts[:2])
            given = target, draft, np.pad(drafts, missing), np.array(len(drafts))
            try:
                stop, following = called(ask, *(x[None] for x in given))
            except Fault as error:
                raise Refused(f"It {error}.") from error
            if (stop.shape, following.shape) != ((1, gamma + 1), (1, gamma + 1, size)):
                raise Refused(
                    f"Its stop and next_probs return shapes {stop.shape} and {following.shape}, "
                    f"not {(1, gamma + 1)} and {(1, gamma + 1, size)}."
                )
            known[key] = stop[0, : len(drafts) + 1], following[0, :, : target_probs.shape[1]]
        stop, following = known[key]
        rng.used = True
        count = _drawn(rng, stop)
        return [*drafts[:count], _drawn(rng, following[count])]

    return verify


def _drawn(rng: Any, probs: np.ndarray) -> int:
    if not np.isfinite(probs).all() or not (probs > 0).any():
        raise Fault("returns probabilities that are not finite, or 0 throughout")
    return rng.branch(probs)


def _asking(rule: Any) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`stop`, and `next_probs` for every count (1, γ+1, V), from probabilities."""

    @jax.jit
    def ask(target, draft, drafts, length):
        counts = [jnp.full_like(length, count) for count in range(drafts.shape[1] + 1)]
        known = target, draft, drafts, length
        following = [rule.next_probs(*known, count) for count in counts]
        return rule.stop(*known), jnp.stack(following, axis=1)

    def asked(target, draft, drafts, length):
        dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
        logs = (jnp.asarray(np.log(probs), dtype) for probs in (target, draft))
        return jax.device_get(ask(*logs, jnp.int32(drafts), jnp.int32(length)))

    return asked
