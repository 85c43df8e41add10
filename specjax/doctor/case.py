"""A pair and how it will be used, and what the checks found out about it."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Key

from specjax import policies
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.decoding import building, streaming
from specjax.decoding.texts import common_width
from specjax.defaults import BATCH_SIZE, NEW_TOKENS
from specjax.doctor import distributions
from specjax.drafters.base import Drafter
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs
from specjax.results import Row
from specjax.sampling import Greedy, Sampling, as_key, as_sampling, key_for
from specjax.settings import Drafting
from specjax.speculative import Speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.types import Text

MAX_TOKENS = 64  # tokens of an output, at most
ROLES = ("target", "draft")
TEXTS = (
    "The house is wonderful.",
    "In the beginning there was nothing but water,",
    "translate English to German: The train was late again.",
    "summarize: The council met on Monday and voted for the new bridge, which opens in May.",
    "def total(values): return sum(values)",
    "for name in names: print(name)",
    "Question: what is the capital of France? Answer:",
    "x = line.strip().split(',')",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pair and how it will be used; see `specjax.generate`."""

    target: str
    draft: str  # a model or any other drafter, see `specjax.drafters.loading`
    texts: Sequence[Text] = TEXTS
    dtype: Any = None
    weights: str | None = None  # of the target, as `specjax.load` takes it
    cache: str | None = None
    mesh: Mesh | str | None = None
    replicate_draft: bool = True
    drafting: Drafting = dataclasses.field(default_factory=Drafting)
    sampling: Sampling = dataclasses.field(default_factory=Greedy)
    max_new_tokens: int = NEW_TOKENS
    max_source_len: int | None = None
    batch_size: int = BATCH_SIZE
    key: Key[Array, ""] | int | None = None

    @property
    def budget(self) -> int:
        """New tokens of an output in the checks."""
        return min(self.max_new_tokens, MAX_TOKENS)

    def precision(self, role: str) -> dict[str, Any]:
        """Options to load a model; a draft's own name has what is in 8 bits."""
        narrow = {"weights": self.weights, "cache": self.cache} if role == "target" else {}
        return {"dtype": self.dtype, **narrow}

    def __post_init__(self):
        key_for(as_sampling(self.sampling), self.key)  # raises where a run would

    @property
    def randomness(self) -> Key[Array, ""]:
        """The key of all draws, also of a greedy plan's check at temperature 1."""
        return as_key(self.key)


class Case:
    """The plan, and results of checks for those that build on them."""

    target: Checkpoint  # outlines until `weights` has loaded them
    draft: Checkpoint | Drafter
    sources: list[list[int]]  # ids of the texts
    plain: list[Row]  # outputs of plain decoding at temperature 0
    logits: list[np.ndarray]  # the target's for `plain`
    greedy: list[Row]  # speculative outputs at temperature 0
    alpha: float
    rows: list[Row]  # outputs with the plan's sampling
    costs: Costs
    doubts = ""  # why nothing follows from the costs

    def __init__(self, plan: Plan):
        self.plan = plan

    def speculative(self, sampling: Sampling) -> Speculative | TreeSpeculative:
        """Build the speculative loop."""
        drafting = self.plan.drafting
        # The checks examine tokens, which do not depend on costs: any costs will do.
        if isinstance(drafting.policy, str) and drafting.costs is None:
            policy = policies.with_any_costs(drafting.policy, drafting.depth)
            drafting = dataclasses.replace(drafting, policy=policy)
        return building.build(self.target, self.draft, drafting, sampling=sampling)

    def autoregressive(self, sampling: Sampling) -> Autoregressive:
        """Build plain decoding."""
        method = self.speculative(sampling)
        return Autoregressive(method.target, method.sampling, method.eos_ids)

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """Models by role: the target, and the draft if it is a model."""
        both = zip(ROLES, (self.target, self.draft), strict=True)
        return {role: found for role, found in both if isinstance(found, Checkpoint)}

    def decode(self, method, texts: Sequence[Text] | None = None, **options) -> Iterator:
        """Decode the plan's texts, or others, to rows."""
        plan = self.plan
        settings: dict[str, Any] = {"max_new_tokens": plan.budget, "key": plan.randomness}
        settings |= {"batch_size": plan.batch_size, "max_source_len": plan.max_source_len}
        settings |= {"names": (plan.target, plan.draft)}
        texts = plan.texts if texts is None else texts
        return streaming.stream(method, self.target, texts, **settings | options)

    def over_outputs(self, model) -> list[np.ndarray]:
        """Compute (tokens, V) for each plain output: a model's logits for its tokens."""
        width = common_width(self.sources)
        room = self.plan.budget + (1 if self.target.config.is_encoder_decoder else width)
        shape = width, bucket(room, smallest=32)
        each = partial(distributions.over_output, model, self.target, shape)
        return list(map(each, self.sources, [row.tokens for row in self.plain]))
