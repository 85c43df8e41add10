"""specjax: speculative decoding in JAX, exact and measured.

target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
print(specjax.select(target, ["google-t5/t5-small", "lookup"], texts).words)

Compiled programs are kept on disk: `specjax.support.compilation_cache` says where, and how to
switch it off.
"""

from specjax.beam.decoding import BeamRow, beam_search
from specjax.beam.search import Hypothesis
from specjax.generation import generate
from specjax.measure.metrics import Alpha, measure_alpha
from specjax.measure.timing import Comparison, measure_speedup
from specjax.models.hub import Checkpoint, load, save
from specjax.results import Result, Row, Summary
from specjax.support import compilation_cache
from specjax.tools.selection import Candidate, Selection, select

compilation_cache.enable()

__all__ = [
    "Alpha",
    "BeamRow",
    "Candidate",
    "Checkpoint",
    "Comparison",
    "Hypothesis",
    "Result",
    "Row",
    "Selection",
    "Summary",
    "beam_search",
    "generate",
    "load",
    "measure_alpha",
    "measure_speedup",
    "save",
    "select",
]
