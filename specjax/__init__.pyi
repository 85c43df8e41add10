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
    rules as rules,
    sampling as sampling,
    speculative as speculative,
    testing as testing,
    trees as trees,
    tuning as tuning,
)
from .autoregressive import Autoregressive as Autoregressive
from .drafters.base import (
    Drafter as Drafter,
    ModelDrafter as ModelDrafter,
)
from .drafters.frequent import frequent as frequent
from .drafters.medusa import Medusa as Medusa
from .drafters.ngram import (
    Bigram as Bigram,
    PromptLookup as PromptLookup,
    Unigram as Unigram,
)
from .drafters.switch import switch as switch
from .drafters.views import early_exit as early_exit
from .generation import (
    generate as generate,
    stream as stream,
)
from .loop import Method as Method
from .measure.metrics import (
    Alpha as Alpha,
    measure_alpha as measure_alpha,
)
from .measure.speedup import (
    Comparison as Comparison,
    measure_speedup as measure_speedup,
)
from .checkpoints import (
    Checkpoint as Checkpoint,
    load as load,
    save as save,
)
from .checkpoints.own import wrap as wrap
from .policies.base import Policy as Policy
from .results import (
    Progress as Progress,
    Result as Result,
    Row as Row,
    Summary as Summary,
)
from .rounds import Round as Round
from .rules import AcceptanceRule as AcceptanceRule
from .sampling import (
    Filter as Filter,
    Greedy as Greedy,
    Sampling as Sampling,
)
from .settings import Settings as Settings
from .speculative import Speculative as Speculative
from .support.compilation_cache import enable_compilation_cache as enable_compilation_cache
from .tuning.recommendation import (
    Candidate as Candidate,
    Selection as Selection,
)
from .tuning.tune import select as select
from .tuning.tune import tune as tune
from .types import (
    Inputs as Inputs,
    Model as Model,
)

__version__: str
