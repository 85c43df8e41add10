"""Drafters: where proposals come from."""

from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.loading import NAMES, beside, counts_ngrams, load, maker, name_of, parameters

__all__ = [
    "NAMES",
    "Drafter",
    "ModelDrafter",
    "beside",
    "counts_ngrams",
    "load",
    "maker",
    "name_of",
    "parameters",
]
