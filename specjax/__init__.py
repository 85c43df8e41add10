"""specjax: speculative decoding in JAX, exact and measured.

    target, draft = specjax.load("google-t5/t5-3b"), specjax.load("google-t5/t5-small")
    result = specjax.generate(target, draft, texts, gamma=7, temperature=0.0)
    print(specjax.select(target, ["google-t5/t5-small", "lookup"], texts).words)

The names here are those that a user types, as above, and those that plug into the loop: methods,
protocols and drafters. Rules, policies and the shapes of trees are values, `specjax.rules.Block()`,
`specjax.policies.svip(threshold=0.3)`, `specjax.trees.fixed(3, 2, 1)`; flags and configs name them
in strings.

`import specjax` alone imports nothing else and sets nothing; a module is imported when one of its
names is first used. `__init__.pyi` has the list. `enable_compilation_cache()` keeps compiled
programs on disk for the next process; the commands call it.
"""

import importlib.metadata

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _version() -> str:
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


__version__ = _version()
