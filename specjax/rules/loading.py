"""Rules by name."""

from typing import Any

from specjax.rules.base import AcceptanceRule
from specjax.support import named

NAMES = {
    "token": "specjax.rules.token:TokenRule",
    "block": "specjax.rules.block:BlockRule",
    "gumbel": "specjax.rules.gumbel:GumbelRule",
    "lenient": "specjax.rules.lenience:lenient",
    "typical": "specjax.rules.typical_acceptance:typical",
}


def parse(name: str, **settings: Any) -> AcceptanceRule:
    """The rule that a name or an import path stands for.

        parse("lenient", lenience=0.3), or parse("lenient(lenience=0.3)")
        parse("my_module:MyRule")

    An import path is code that runs: the module is imported.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("rule", NAMES, name, AcceptanceRule, **settings)
