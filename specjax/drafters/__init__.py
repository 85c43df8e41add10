"""Drafters: the sources of proposals. A module is imported when one of its names is first used, so
a drafter without files imports no file reader. `__init__.pyi` has the list of names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
