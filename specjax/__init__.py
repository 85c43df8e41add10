"""specjax: speculative decoding in JAX, exact and measured.

target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
"""

from specjax.decoding import Result, Row, generate
from specjax.metrics import Alpha, measure_alpha
from specjax.models.hub import Checkpoint, load, save

__all__ = ["Alpha", "Checkpoint", "Result", "Row", "generate", "load", "measure_alpha", "save"]
