"""Acceptance rules: how many drafted tokens are kept, and the distribution of the next token.

`base` has the protocol; each rule has a file. A rule is specjax.rules.Lenient(0.3), or
rules.parse("lenient(0.3)"), or rules.parse("my_module:MyRule"), which imports and runs code.
"""

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
from specjax.rules.block import Block
from specjax.rules.declared import exactness, label, own_acceptance, remark
from specjax.rules.gumbel import Gumbel, coupled_overlap
from specjax.rules.lenience import Lenient, LenientArgmax
from specjax.rules.loading import NAMES, parse
from specjax.rules.token import Token
from specjax.rules.typical_acceptance import Typical

__all__ = [
    "NAMES",
    "AcceptanceRule",
    "Block",
    "Gumbel",
    "Lenient",
    "LenientArgmax",
    "Token",
    "Typical",
    "along",
    "at_position",
    "at_tokens",
    "coupled_overlap",
    "ends",
    "exactness",
    "given_noise",
    "label",
    "overlap",
    "own_acceptance",
    "parse",
    "remark",
    "residual",
    "resolve_rule",
    "surviving",
]
