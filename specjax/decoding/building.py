"""The loop that decodes, built from checkpoints, drafters and names; checks that they fit."""

import dataclasses
from typing import Any, TypeVar, Unpack

import jax.numpy as jnp

from specjax import drafters
from specjax.autoregressive import Autoregressive
from specjax.checkpoints.compatibility import check_ids, check_pair
from specjax.contracts import check_part
from specjax.drafters import attached, sharing
from specjax.drafters.abilities import branches, carries, seen_by
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.resizing import resized
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.policies import NAMES as POLICIES
from specjax.policies import Policy, constant, needs_costs, parse_with_costs
from specjax.policies import parse as parse_policy
from specjax.policies.base import by_slot, counts_nodes, within_a_draft
from specjax.pytrees import check_pytree
from specjax.rules import AcceptanceRule, Token
from specjax.rules import parse as parse_rule
from specjax.sampling import Sampling
from specjax.settings import Drafting, Fields, Settings
from specjax.speculative import Speculative
from specjax.support import named
from specjax.support.ranges import has, shown, whole
from specjax.trees import BestFirst, Chain, FixedTree
from specjax.trees.speculative import TreeSpeculative
from specjax.types import Model

CHECKPOINT = ("model", "config", "eos_ids")
A_CHECKPOINT = "a checkpoint, as specjax.load and specjax.wrap give it"
D = TypeVar("D")
M = TypeVar("M", bound=Speculative | TreeSpeculative)
DRAFTER = ("vocab_size", "start", "begin", "extend", "logits", "observe")


def build(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    drafting: Drafting | None = None,
    *,
    sampling: Sampling,
    **fields: Unpack[Fields],
) -> Any:
    """Build a `Method`: plain decoding where `draft` is None or γ is 0, else a chain's or a tree's.

    Args:
      drafting: default `Drafting()`.
      fields: of `drafting`, replaced.

    Raises: as `generate`.
    """
    drafting = drafting or Drafting()
    drafting = dataclasses.replace(drafting, **fields)
    if draft is None or drafting.gamma == 0:
        return plain(target, sampling, drafting.rule)
    return with_draft(target, draft, drafting, sampling)


def with_draft(
    target: Checkpoint, draft: Checkpoint | Drafter | str, drafting: Drafting, sampling: Sampling
) -> Speculative | TreeSpeculative:
    """Build a loop with a draft. Checks that the pair fits, and for a tree that both can branch."""
    shape, depth, passes = drafting.shape, drafting.depth, tuple(drafting.passes)
    model, drafter = pair(target, draft, check_tokens=drafting.check_tokens)
    rule, policy = _rule(drafting.rule), constant(depth)
    eos_ids = jnp.asarray(target.eos_ids, jnp.int32)
    made: Speculative | TreeSpeculative
    if isinstance(shape, Chain):
        made = Speculative(model, drafter, rule, policy, sampling, eos_ids, depth, passes)
    else:
        check_branches(target.name, model, drafter, shape)
        made = TreeSpeculative(model, drafter, rule, policy, sampling, eos_ids, shape, passes)
    return made if drafting.policy is None else with_policy(made, _policy(drafting))


def chosen(settings: Drafting | None, given: Drafting) -> Drafting:
    """Choose the settings, or the arguments that these replace; ValueError if both are given."""
    if settings is None:
        check_depth(given)
        return given
    if not isinstance(settings, Drafting):
        raise ValueError(
            f"settings={shown(settings)} must be a specjax.Settings: `specjax.tune` makes it, and "
            "`specjax.Settings.load` reads it from a file."
        )
    if not isinstance(settings, Settings):  # whose files may have a tree's depth as γ
        check_depth(settings)
    for name in given.given():
        if name != "check_tokens":
            raise ValueError(
                f"settings and {name} are both given: settings say how to draft. Leave one out, "
                "or change the settings with dataclasses.replace."
            )
    check_tokens = settings.check_tokens and given.check_tokens
    return dataclasses.replace(settings, check_tokens=check_tokens)


def check_depth(drafting: Drafting) -> None:
    """Raise ValueError if a draft length is given for a tree, which has its own depth."""
    if drafting.gamma is not None and not isinstance(drafting.shape, Chain):
        raise ValueError(
            f"gamma={drafting.gamma} beside tree={drafting.tree!r}: a tree has its own depth. "
            "Leave gamma out."
        )


def plain(
    target: Checkpoint, sampling: Sampling, rule: AcceptanceRule | str | None = None
) -> Autoregressive:
    """Build plain decoding, as the jitted functions take it."""
    has("target", target, CHECKPOINT, A_CHECKPOINT)
    eos_ids = jnp.asarray(target.eos_ids, jnp.int32)
    return Autoregressive(target.model, sampling, eos_ids, _rule(rule))


def check_branches(
    name: str, target: Model, drafter: Drafter, shape: FixedTree | BestFirst
) -> None:
    """Raise ValueError unless the target can score, and the drafter draft, such a tree."""
    if not getattr(target, "branches", False):
        raise ValueError(
            f"{name} cannot score a tree: its model takes no `layout` "
            '(specjax.types.BranchingModel). Take tree="chain".'
        )
    if not branches(drafter):
        raise ValueError(
            f'{type(drafter).__name__} drafts chains alone. Take another drafter, or tree="chain".'
        )
    if isinstance(shape, BestFirst) and shape.width > target.vocab_size:
        raise ValueError(
            f"width={shape.width}, but there are no more than {target.vocab_size} ids that a "
            "node's children could have: lower width."
        )


def check_models(target: Any, draft: Any) -> None:
    """Raise ValueError that names the argument, unless both can decode and draft."""
    has("target", target, CHECKPOINT, A_CHECKPOINT)
    if not isinstance(draft, str | Checkpoint):
        has("draft", draft, DRAFTER, "a checkpoint, a drafter, or a name")


def pair(
    target: Checkpoint, draft: Checkpoint | Drafter | str, *, check_tokens: bool = True
) -> tuple[Any, Drafter]:
    """Adapt the target to what the drafter reads, and the drafter to the target's ids.

    A drafter that is not on its target's mesh is replicated there.

    Args:
      check_tokens: as in `generate`.

    Raises:
      ValueError: they do not fit.
    """
    check_models(target, draft)
    if isinstance(draft, str):
        draft = drafters.load(draft, target)
    if isinstance(draft, Checkpoint):
        check_pair(target, draft, check_tokens=check_tokens)
        shared = sharing.shared_layers(draft.model, target.model)
        draft = ModelDrafter(draft.model, shared=shared)
    else:
        check_pytree("draft", draft)
        attached.check_target(draft, target)
        name = drafters.name_of(draft)
        size = whole(f"{name}.vocab_size", draft.vocab_size, "[1, ∞)")
        check_ids(name, size, target, check_tokens=check_tokens)
    drafter = resized(draft, target.model.vocab_size)
    return seen_by(drafter, target.model), _beside(target, drafter)


def _beside(target: Checkpoint, drafter: D) -> D:
    return sharding.join(drafter, sharding.placement_of(target.model))


def _rule(rule: AcceptanceRule | str | None) -> AcceptanceRule:
    if isinstance(rule, str):
        rule = parse_rule(rule)
        check_part("rule", rule)
    return Token() if rule is None else rule


def _policy(drafting: Drafting) -> Any:
    policy = drafting.policy
    if not isinstance(policy, str):
        return policy
    if drafting.costs is None and needs_costs(policy):
        raise ValueError(
            f"policy={policy!r} weighs costs, and none are given. Measure them: "
            f"settings = specjax.tune(target, draft, texts, policy={policy!r}), then "
            "generate(..., settings=settings)."
        )
    if named.lacks("policy", POLICIES, policy, "times"):
        raise ValueError(
            f"policy={policy!r} weighs times, and none are given. Measure them: "
            "from specjax.measure.batches import pass_times; times = pass_times(...), then "
            "policy=specjax.policies.early_stop(times)."
        )
    costs = drafting.costs
    made = parse_policy(policy) if costs is None else parse_with_costs(policy, costs)
    check_part("policy", made)
    return made


def with_policy(method: M, policy: Policy) -> M:
    """Replace the policy of a loop; ValueError if it cannot learn from the loop's rule."""
    name = type(policy).__name__
    if method.branches and within_a_draft(policy):
        raise ValueError(
            f"{name} decides token by token whether a chain goes on, or what of it is verified. "
            'Trees go with policies that decide before a draft, such as "goodput" and "nodes".'
        )
    if by_slot(policy) and not policy.reads_batch:
        raise ValueError(
            f"{name} decides which slots of all rows are verified, so a row depends on its "
            "neighbours: declare reads_batch = True in its class."
        )
    if counts_nodes(policy) and not method.branches:
        raise ValueError(f"{name} sets the number of a tree's nodes: give a tree, or leave it out.")
    if method.passes and by_slot(policy) and not getattr(method.target, "packs", False):
        raise ValueError(
            f"passes={method.passes} with {name}: this target is on a mesh or a model of your own, "
            "and computes all positions of a batch (specjax.types.PackingModel). Leave passes out."
        )
    # Where rows have trees of their own, a shorter draft is not the beginning of a longer one.
    if policy.needs_shorter and (method.dynamic or not method.rule.reveals_shorter):
        raise ValueError(
            f"{name} learns from a round what shorter drafts would have got, which "
            f"{type(method.rule).__name__}{' with this tree' if method.branches else ''} does not "
            "show: take another policy, or rules.Token()."
        )
    return dataclasses.replace(method, policy=policy)


def plain_if_preferred(method: Method, rounds: int, rows: int = 1) -> Method:
    """Choose plain decoding if the policy's costs promise more for it than for the loop.

    It gives the same tokens without a drafter. Otherwise the method is returned.

    Args:
      rounds: of a row, at most.
      rows: of a batch. They count where a policy reads the batch, and all rows wait for the last
        one. Otherwise another input takes the place of a finished row.
    """
    if method.policy is None:
        return method
    rows = rows if method.policy.reads_batch else 1
    prefers = method.policy.prefers_plain(method.gamma_max, rounds, rows)
    return plain_of(method) if prefers else method


def plain_of(method: Method) -> Autoregressive:
    """Build plain decoding from the distribution that the method keeps."""
    return Autoregressive(method.target, method.sampling, method.eos_ids, method.rule)


def reads_batch(method: Method) -> bool:
    """Whether a row's tokens may depend on its neighbours."""
    return method.policy is not None and method.policy.reads_batch


def check_log(method: Method) -> None:
    """Raise ValueError unless the loop drafts chains, whose rounds can be logged."""
    if method.drafter is None or method.branches:
        raise ValueError(
            "Rounds are logged of speculative decoding with chains: give a draft, and no tree."
        )


def check_carry(method: Method) -> None:
    """Raise ValueError unless something that this loop learns can carry over to the next batch."""
    policy, drafter = method.policy, method.drafter
    if not (policy and policy.carries) and not (drafter and carries(drafter)):
        of = f"{type(policy).__name__} learns nothing" if policy else "plain decoding has no policy"
        raise ValueError(
            f"carry_state=True: {of} that later inputs could begin with. Leave it out, or take a "
            'policy such as "goodput".'
        )
