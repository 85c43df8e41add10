"""The loop that decodes, built from checkpoints, drafters and names; checks that they fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from specjax import drafters, trees
from specjax.autoregressive import Autoregressive
from specjax.checkpoints.compatibility import check_ids, check_pair
from specjax.contracts import check_part
from specjax.defaults import GAMMA
from specjax.drafters import attached, sharing
from specjax.drafters.abilities import branches, carries, seen_by
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.resizing import over
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
from specjax.settings import Settings
from specjax.speculative import Speculative
from specjax.support import named
from specjax.support.ranges import has, listed, shown, truth, whole
from specjax.trees import BestFirst, Chain, FixedTree, Shape
from specjax.trees.speculative import TreeSpeculative

MAX_GAMMA = 1024
CHECKPOINT = ("model", "config", "eos_ids")
OR_ITS_NAME = ", or its name"
A_CHECKPOINT = "a checkpoint, as specjax.load and specjax.wrap give it"
D = TypeVar("D")
M = TypeVar("M", bound=Speculative | TreeSpeculative)
DRAFTER = ("vocab_size", "start", "begin", "extend", "logits", "observe")


def build(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    *,
    gamma: int | None = None,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    passes: Sequence[int] = (),
    tree: Shape | str | None = None,
    check_tokens: bool = True,
) -> Method:
    """Build the loop: `plain` where `draft` is None, else `with_draft`."""
    if draft is None:
        return plain(target, sampling, rule)
    return with_draft(
        target, draft, gamma=gamma, sampling=sampling, rule=rule, policy=policy, passes=passes,
        tree=tree, check_tokens=check_tokens,
    )  # fmt: skip


def with_draft(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    *,
    gamma: int | None = None,
    tree: Shape | str | None = None,
    **options: Any,
) -> Speculative | TreeSpeculative:
    """Build a loop with a draft: `speculative`, or `branching` where the tree is no chain.

    Args:
      gamma: default `GAMMA`; a tree has its own depth and does not read it.
      options: the arguments that both functions take.
    """
    shape = trees.parse(tree)
    if not isinstance(shape, Chain):
        return branching(target, draft, shape, **options)
    return speculative(target, draft, gamma=GAMMA if gamma is None else gamma, **options)


def check_depth(gamma: int | None, tree: Shape | str | None) -> None:
    """Raise ValueError if a draft length is given for a tree, which has its own depth."""
    if gamma is not None and not isinstance(trees.parse(tree), Chain):
        raise ValueError(
            f"gamma={gamma} beside tree={tree!r}: a tree has its own depth. Leave gamma out."
        )


def tuned(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | None,
    settings: Settings,
    *,
    sampling: Sampling,
    check_tokens: bool = True,
) -> Method:
    """Build the loop that `settings` describe: plain decoding where their γ is 0.

    Raises: as `generate`.
    """
    if not isinstance(settings, Settings):
        raise ValueError(
            f"settings={shown(settings)} must be a specjax.Settings: `specjax.tune` makes it, and "
            "`specjax.Settings.load` reads it from a file."
        )
    policy: Policy | str | None = settings.policy or None
    if settings.policy and settings.costs is not None:
        policy = parse_with_costs(settings.policy, settings.costs)
    return build(
        target,
        draft if settings.gamma else None,
        gamma=settings.gamma,
        sampling=sampling,
        rule=settings.rule or None,
        policy=policy,
        passes=settings.passes,
        tree=settings.tree,
        check_tokens=check_tokens,
    )


def plain(
    target: Checkpoint, sampling: Sampling, rule: AcceptanceRule | str | None = None
) -> Autoregressive:
    """Build plain decoding, as the jitted functions take it."""
    has("target", target, CHECKPOINT, A_CHECKPOINT)
    eos_ids = jnp.asarray(target.eos_ids, jnp.int32)
    return Autoregressive(target.model, sampling, eos_ids, _rule(rule))


def speculative(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    *,
    gamma: int,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    passes: Sequence[int] = (),
    check_tokens: bool = True,
) -> Speculative:
    """Build speculative decoding, as the jitted functions take it. Checks that the pair fits.

    Raises: as `generate`.
    """
    fixed = constant(gamma)  # checks gamma, which bounds any policy
    whole("gamma", gamma, f"[1, {MAX_GAMMA}]", "a row never drafts past its max_new_tokens")
    target_model, drafter = pair(target, draft, check_tokens=check_tokens)
    made = Speculative(
        target=target_model,
        drafter=drafter,
        rule=_rule(rule),
        policy=fixed,
        sampling=sampling,
        eos_ids=jnp.asarray(target.eos_ids, jnp.int32),
        gamma_max=int(gamma),
        passes=_counts("passes", passes),
    )
    if policy is None:
        return made
    return with_policy(made, _policy(policy))


def branching(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    shape: FixedTree | BestFirst,
    *,
    sampling: Sampling,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    passes: Sequence[int] = (),
    check_tokens: bool = True,
) -> TreeSpeculative:
    """Build speculative decoding with trees. Checks that the pair fits and that both can branch.

    Raises: as `generate`.
    """
    target_model, drafter = pair(target, draft, check_tokens=check_tokens)
    if not getattr(target_model, "branches", False):
        raise ValueError(
            f"{target.name} cannot score a tree: its model takes no `layout` "
            '(specjax.types.BranchingModel). Take tree="chain".'
        )
    if not branches(drafter):
        raise ValueError(
            f'{type(drafter).__name__} drafts chains alone. Take another drafter, or tree="chain".'
        )
    if isinstance(shape, BestFirst) and shape.width > target_model.vocab_size:
        raise ValueError(
            f"width={shape.width}, but there are no more than {target_model.vocab_size} ids that a "
            "node's children could have: lower width."
        )
    made = TreeSpeculative(
        target=target_model,
        drafter=drafter,
        rule=_rule(rule),
        policy=constant(shape.depth),
        sampling=sampling,
        eos_ids=jnp.asarray(target.eos_ids, jnp.int32),
        shape=shape,
        passes=_counts("passes", passes),
    )
    if policy is None:
        return made
    return with_policy(made, _policy(policy))


def _counts(name: str, counts: Sequence[int]) -> tuple[int, ...]:
    given = listed(name, counts) if np.ndim(counts) == 0 or len(counts) else ()
    return tuple(whole(name, count, "[1, ∞)") for count in given)


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
    truth("check_tokens", check_tokens)
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
    drafter = over(draft, target.model.vocab_size)
    return seen_by(drafter, target.model), _beside(target, drafter)


def _beside(target: Checkpoint, drafter: D) -> D:
    return sharding.join(drafter, sharding.placement_of(target.model))


def _rule(rule: AcceptanceRule | str | None) -> AcceptanceRule:
    if rule is None:
        return Token()
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    check_part("rule", rule, OR_ITS_NAME)
    return rule


def _policy(policy: Policy | str) -> Policy:
    if isinstance(policy, str) and needs_costs(policy):
        raise ValueError(
            f"policy={policy!r} weighs costs, and none are given. Measure them: "
            f"settings = specjax.tune(target, draft, texts, policy={policy!r}), then "
            "generate(..., settings=settings)."
        )
    if isinstance(policy, str) and named.lacks("policy", POLICIES, policy, "times"):
        raise ValueError(
            f"policy={policy!r} weighs times, and none are given. Measure them: "
            "from specjax.measure.batches import pass_times; times = pass_times(...), then "
            "policy=specjax.policies.early_stop(times)."
        )
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    check_part("policy", policy, OR_ITS_NAME)
    return policy


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
            f"carry=True: {of} that later inputs could begin with. Leave it out, or take a policy "
            'such as "goodput".'
        )
