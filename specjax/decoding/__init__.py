"""Decoding in steps, from texts to rows. Everything jitted lies below, in the two loops.

- `building`: checkpoints, drafters and names → the loop that decodes
- `conditions`: the conditions that a loop is tuned for or used under
- `texts`: texts → token ids, and the arrays that a model starts from
- `run`: lengths, randomness and rows of a run, as one value
- `starting`: requests → the state before the first round
- `running`: a number of rows that decode together
- `streaming`: which inputs run together, in which order; rows as they end
- `outputs`: rows → tokens, texts and counts
- `programs`: both programs of a run, compiled ahead of it, and the bytes that they need

Names are imported from these modules.
"""

import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    modules = [] if name.startswith("_") else [one.name for one in pkgutil.iter_modules(__path__)]
    for module in [] if name in modules else modules:
        place = importlib.import_module(f"{__name__}.{module}")
        if getattr(vars(place).get(name), "__module__", "") == place.__name__:
            raise ImportError(f"specjax.decoding.{name} is {place.__name__}.{name} now.")
    raise AttributeError(f"specjax.decoding has no {name}.")
