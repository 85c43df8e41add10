"""specjax: speculative decoding in JAX, exact and measured.

target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
"""

from specjax.beam import Hypothesis
from specjax.beam_decoding import BeamRow, beam_search
from specjax.decoding import Result, Row, generate
from specjax.metrics import Alpha, measure_alpha
from specjax.models.hub import Checkpoint, load, save

__all__ = [
    "Alpha",
    "BeamRow",
    "Checkpoint",
    "Hypothesis",
    "Result",
    "Row",
    "beam_search",
    "generate",
    "load",
    "measure_alpha",
    "save",
]
