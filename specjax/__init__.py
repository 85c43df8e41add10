"""specjax: speculative decoding in JAX, exact and measured.

target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
print(specjax.select(target, ["google-t5/t5-small", "lookup"], texts).words)

Here is what is typed, as above, and what is plugged in: the two methods, the protocols, rules and
drafters of the loop. Policies are in `specjax.policies`, by name.

Compiled programs are kept on disk: `specjax.support.compilation_cache` says where, and how to
switch it off.
"""

from specjax.accept import (
    AcceptanceRule,
    BlockRule,
    GumbelRule,
    LenientArgmax,
    LenientRule,
    TokenRule,
    TypicalRule,
    lenient,
    typical,
)
from specjax.autoregressive import Autoregressive
from specjax.beam.decoding import BeamRow, beam_search
from specjax.beam.search import Hypothesis
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.exits import early_exit
from specjax.drafters.frequent import frequent
from specjax.drafters.medusa import Medusa
from specjax.drafters.ngram import Bigram, PromptLookup, Unigram
from specjax.drafters.switch import switch
from specjax.generation import generate, stream
from specjax.loop import Method
from specjax.measure.metrics import Alpha, measure_alpha
from specjax.measure.timing import Comparison, measure_speedup
from specjax.models.hub import Checkpoint, load, save
from specjax.models.own import wrap
from specjax.policies.base import Policy
from specjax.results import Progress, Result, Row, Summary
from specjax.rounds import Round
from specjax.sampling import Filter, Sampling
from specjax.speculative import Speculative
from specjax.support import compilation_cache
from specjax.tools.selection import Candidate, Selection, select
from specjax.types import Inputs, Model

compilation_cache.enable()

__all__ = [
    "AcceptanceRule",
    "Alpha",
    "Autoregressive",
    "BeamRow",
    "Bigram",
    "BlockRule",
    "Candidate",
    "Checkpoint",
    "Comparison",
    "Drafter",
    "Filter",
    "GumbelRule",
    "Hypothesis",
    "Inputs",
    "LenientArgmax",
    "LenientRule",
    "Medusa",
    "Method",
    "Model",
    "ModelDrafter",
    "Policy",
    "Progress",
    "PromptLookup",
    "Result",
    "Round",
    "Row",
    "Sampling",
    "Selection",
    "Speculative",
    "Summary",
    "TokenRule",
    "TypicalRule",
    "Unigram",
    "beam_search",
    "early_exit",
    "frequent",
    "generate",
    "lenient",
    "load",
    "measure_alpha",
    "measure_speedup",
    "save",
    "select",
    "stream",
    "switch",
    "typical",
    "wrap",
]
