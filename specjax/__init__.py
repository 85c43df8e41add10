"""specjax: speculative decoding in JAX, exact and measured.

target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
print(specjax.select(target, ["google-t5/t5-small", "lookup"], texts).words)

Compiled programs are kept on disk: see `specjax.compilation_cache`, also for how to switch it off.
"""

from specjax import compilation_cache
from specjax.beam import Hypothesis
from specjax.beam_decoding import BeamRow, beam_search
from specjax.decoding import Result, Row, generate
from specjax.metrics import Alpha, measure_alpha
from specjax.models.hub import Checkpoint, load, save
from specjax.monitor import Summary, Times
from specjax.selection import Candidate, Selection, select
from specjax.timing import measure_speedup

compilation_cache.enable()

__all__ = [
    "Alpha",
    "BeamRow",
    "Candidate",
    "Checkpoint",
    "Hypothesis",
    "Result",
    "Row",
    "Selection",
    "Summary",
    "Times",
    "beam_search",
    "generate",
    "load",
    "measure_alpha",
    "measure_speedup",
    "save",
    "select",
]
