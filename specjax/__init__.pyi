# The public names, and where they come from: `lazy_loader` imports them by this list.

from . import (
    audit as audit,
    checkpoints as checkpoints,
    decoding as decoding,
    drafters as drafters,
    loop as loop,
    measure as measure,
    models as models,
    policies as policies,
    results as results,
    rounds as rounds,
    rules as rules,
    sampling as sampling,
    speculative as speculative,
    testing as testing,
    trees as trees,
    tuning as tuning,
    types as types,
)
from .checkpoints import (
    Checkpoint as Checkpoint,
    load as load,
    save as save,
)
from .checkpoints.own import wrap as wrap
from .drafters.base import Drafter as Drafter
from .drafters.frequent import frequent as frequent
from .drafters.views import early_exit as early_exit
from .generation import (
    generate as generate,
    stream as stream,
)
from .measure.metrics import measure_alpha as measure_alpha
from .measure.speedup import measure_speedup as measure_speedup
from .policies.base import Policy as Policy
from .results import (
    Progress as Progress,
    Result as Result,
    Row as Row,
)
from .rules import AcceptanceRule as AcceptanceRule
from .sampling import (
    Greedy as Greedy,
    Sampling as Sampling,
)
from .settings import (
    Drafting as Drafting,
    Settings as Settings,
)
from .support.compilation_cache import enable_compilation_cache as enable_compilation_cache
from .tuning.tune import select as select
from .tuning.tune import tune as tune
from .types import Model as Model

__version__: str
