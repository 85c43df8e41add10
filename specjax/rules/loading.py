"""Rules by name, or by import path."""

from typing import Any

from specjax.rules.base import AcceptanceRule
from specjax.support import named

NAMES = {
    "token": "specjax.rules.token:Token",
    "block": "specjax.rules.block:Block",
    "gumbel": "specjax.rules.gumbel:Gumbel",
    "lenient": "specjax.rules.lenience:Lenient",
    "typical": "specjax.rules.typical_acceptance:Typical",
}


def parse(name: str, **settings: Any) -> AcceptanceRule:
    """Make the rule of a name or an import path.

        parse("lenient", lenience=0.3), or parse("lenient(lenience=0.3)")
        parse("my_module:MyRule")

    An import path is code that runs: the module is imported.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("rule", NAMES, name, AcceptanceRule, **settings)
