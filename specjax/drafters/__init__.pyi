# The public names, and where they come from: `lazy_loader` imports them by this list.

from .attached import is_attached as is_attached
from .base import (
    Drafter as Drafter,
    ModelDrafter as ModelDrafter,
)
from .loading import (
    NAMES as NAMES,
    beside as beside,
    counts_ngrams as counts_ngrams,
    fingerprint as fingerprint,
    load as load,
    maker as maker,
    name_of as name_of,
    parameters as parameters,
)
