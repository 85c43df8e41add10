"""specjax: speculative decoding in JAX, exact and measured.

    target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
    result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
    print(specjax.select(target, ["google-t5/t5-small", "lookup"], texts).words)

The names here are those that a user types:

- decode: `generate`, `stream`; their values `Drafting`, `Sampling`, `Greedy`, `Settings`, and what
  they return, `Result`, `Row`, `Progress`
- measure: `tune`, `select`, `measure_alpha`, `measure_speedup`
- models and drafters: `load`, `save`, `wrap`, `Checkpoint`, `early_exit`, `frequent`
- protocols of parts of one's own: `Model`, `Drafter`, `Policy`, `AcceptanceRule`
- `enable_compilation_cache()` keeps compiled programs on disk; the commands call it

All else is imported from its module. Rules, policies and the shapes of trees are values,
`specjax.rules.Block()`, `specjax.policies.svip(threshold=0.3)`, `specjax.trees.fixed(3, 2, 1)`;
flags and configs name them in strings.

`import specjax` alone imports nothing else and sets nothing; a module is imported when one of its
names is first used. `__init__.pyi` has the list.
"""

import importlib.metadata
from typing import Any

import lazy_loader

_lazily, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


WERE_AT_THE_TOP = {  # names of `specjax`, with their modules
    "Alpha": "measure.metrics", "Autoregressive": "autoregressive", "Bigram": "drafters.ngram",
    "Candidate": "tuning.recommendation", "Comparison": "measure.speedup", "Filter": "sampling",
    "Inputs": "types", "Medusa": "drafters.medusa", "Method": "loop",
    "ModelDrafter": "drafters.base", "PromptLookup": "drafters.ngram", "Round": "rounds",
    "Selection": "tuning.recommendation", "Speculative": "speculative", "Summary": "results",
    "Unigram": "drafters.ngram", "switch": "drafters.switch",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _lazily(name)
    if name in WERE_AT_THE_TOP:
        raise ImportError(f"specjax.{name} is specjax.{WERE_AT_THE_TOP[name]}.{name} now.")
    raise AttributeError(f"specjax has no {name}.")


def _version() -> str:
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


__version__ = _version()
