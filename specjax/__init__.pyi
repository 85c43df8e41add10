# The public names, and where they come from: `lazy_loader` imports them by this list.

from . import (
    accept as accept,
)
from . import (
    decoding as decoding,
)
from . import (
    drafters as drafters,
)
from . import (
    loop as loop,
)
from . import (
    measure as measure,
)
from . import (
    models as models,
)
from . import (
    policies as policies,
)
from . import (
    sampling as sampling,
)
from . import (
    speculative as speculative,
)
from . import (
    tasks as tasks,
)
from . import (
    training as training,
)
from . import (
    trees as trees,
)
from .accept import (
    AcceptanceRule as AcceptanceRule,
)
from .accept import (
    BlockRule as BlockRule,
)
from .accept import (
    GumbelRule as GumbelRule,
)
from .accept import (
    LenientArgmax as LenientArgmax,
)
from .accept import (
    LenientRule as LenientRule,
)
from .accept import (
    TokenRule as TokenRule,
)
from .accept import (
    TypicalRule as TypicalRule,
)
from .accept import (
    lenient as lenient,
)
from .accept import (
    typical as typical,
)
from .autoregressive import (
    Autoregressive as Autoregressive,
)
from .beam.decoding import (
    BeamRow as BeamRow,
)
from .beam.decoding import (
    beam_search as beam_search,
)
from .beam.search import (
    Hypothesis as Hypothesis,
)
from .drafters.base import (
    Drafter as Drafter,
)
from .drafters.base import (
    ModelDrafter as ModelDrafter,
)
from .drafters.exits import (
    early_exit as early_exit,
)
from .drafters.frequent import (
    frequent as frequent,
)
from .drafters.medusa import (
    Medusa as Medusa,
)
from .drafters.ngram import (
    Bigram as Bigram,
)
from .drafters.ngram import (
    PromptLookup as PromptLookup,
)
from .drafters.ngram import (
    Unigram as Unigram,
)
from .drafters.switch import (
    switch as switch,
)
from .generation import (
    generate as generate,
)
from .generation import (
    stream as stream,
)
from .loop import (
    Method as Method,
)
from .measure.metrics import (
    Alpha as Alpha,
)
from .measure.metrics import (
    measure_alpha as measure_alpha,
)
from .measure.timing import (
    Comparison as Comparison,
)
from .measure.timing import (
    measure_speedup as measure_speedup,
)
from .models.hub import (
    Checkpoint as Checkpoint,
)
from .models.hub import (
    load as load,
)
from .models.hub import (
    save as save,
)
from .models.own import (
    wrap as wrap,
)
from .policies.base import (
    Policy as Policy,
)
from .results import (
    Progress as Progress,
)
from .results import (
    Result as Result,
)
from .results import (
    Row as Row,
)
from .results import (
    Summary as Summary,
)
from .rounds import (
    Round as Round,
)
from .sampling import (
    Filter as Filter,
)
from .sampling import (
    Sampling as Sampling,
)
from .speculative import (
    Speculative as Speculative,
)
from .support.compilation_cache import (
    enable_compilation_cache as enable_compilation_cache,
)
from .tools.selection import (
    Candidate as Candidate,
)
from .tools.selection import (
    Selection as Selection,
)
from .tools.selection import (
    select as select,
)
from .types import (
    Inputs as Inputs,
)
from .types import (
    Model as Model,
)

__version__: str
