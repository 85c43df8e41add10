"""Drafters: where proposals come from."""

from specjax.drafters.attached import is_one as is_attached
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.loading import (
    NAMES,
    beside,
    counts_ngrams,
    fingerprint,
    load,
    maker,
    name_of,
    parameters,
)

__all__ = [
    "NAMES",
    "Drafter",
    "ModelDrafter",
    "beside",
    "counts_ngrams",
    "fingerprint",
    "is_attached",
    "load",
    "maker",
    "name_of",
    "parameters",
]
