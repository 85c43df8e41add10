"""Acceptance rules: how many drafted tokens are kept, and the distribution of the token that
follows. `base` says what a rule is; each rule has a file."""

from specjax.rules.base import (
    AcceptanceRule,
    along,
    at_position,
    at_tokens,
    ends,
    given_noise,
    overlap,
    residual,
    resolve_rule,
    surviving,
)
from specjax.rules.block import BlockRule
from specjax.rules.declared import exactness, label, own_acceptance, remark
from specjax.rules.gumbel import GumbelRule, coupled_overlap
from specjax.rules.lenience import LenientArgmax, LenientRule, lenient
from specjax.rules.loading import NAMES, parse
from specjax.rules.token import TokenRule
from specjax.rules.typical_acceptance import TypicalRule, typical

__all__ = [
    "NAMES",
    "AcceptanceRule",
    "BlockRule",
    "GumbelRule",
    "LenientArgmax",
    "LenientRule",
    "TokenRule",
    "TypicalRule",
    "along",
    "at_position",
    "at_tokens",
    "coupled_overlap",
    "ends",
    "exactness",
    "given_noise",
    "label",
    "lenient",
    "overlap",
    "own_acceptance",
    "parse",
    "remark",
    "residual",
    "resolve_rule",
    "surviving",
    "typical",
]
