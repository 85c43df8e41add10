"""`tune`: measure costs on this machine, try ways to draft, and return the best as `Settings`."""

from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax import decoding, devices, drafters, trees
from specjax.defaults import BATCH_SIZE, LONGEST, NEW_TOKENS
from specjax.drafters.base import Drafter
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs, check
from specjax.sampling import Sampling, as_sampling, key_for
from specjax.settings import Settings
from specjax.tuning import fitting, trials
from specjax.types import Text


def tune(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    gamma: int = LONGEST,
    policy: str | None = None,
    tree: trees.Shape | str | None = None,
    rule: str = "",
    widths: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    check_tokens: bool = True,
) -> Settings:
    """Measure what rounds cost on this machine, and find the fastest way to decode such texts.

    Some texts are decoded with drafts of a few lengths, which gives the costs of rounds and α. Then
    the policy with these costs, drafts of one length and plain decoding are compared: in a trial
    from 128 texts on, else by the costs and α alone. It takes a few seconds, and the compilation
    of several loops.

    Args:
      target, draft, texts, rule, max_new_tokens, batch_size, max_source_len, check_tokens: as in
        `generate`, with the values of later use. The rule is a name.
      gamma: the longest draft that is tried.
      policy: name of a draft-length policy, with any settings that it needs; default "lookahead",
        and "goodput" for trees. "lookahead" and "together" are compared with drafts of one length.
      widths: verify passes of fewer positions; those that do not pay are left out. Default: 1, 2, 4
        and so on for chains on a CPU, and none elsewhere.
      sampling: default `Greedy()`.
      key: as in `generate`. A run may have the same key: it draws independently.

    Returns:
      Settings for `generate`. `str` of them describes what was found.

    Raises:
      ValueError: as `generate`.
    """
    decoding.check_texts(texts)
    decoding.check_models(target, draft)
    chosen = as_sampling(sampling)
    key = key_for(chosen, key)
    shape = trees.parse(tree)
    branches = not isinstance(shape, trees.Chain)
    policy = policy or ("goodput" if branches else "lookahead")
    check(policy)
    if widths is None:
        on_cpu = not devices.is_accelerator(target.model)
        widths = [] if branches or not on_cpu else _doubling(gamma)
    method: Any = decoding.build(
        target,
        draft,
        gamma=gamma,
        sampling=chosen,
        rule=rule or None,
        widths=widths,
        tree=shape,
        check_tokens=check_tokens,
    )
    run: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "key": key,
        "batch_size": min(batch_size, max(1, len(texts))),
        "max_source_len": max_source_len,
        "names": (target.name, drafters.name_of(draft)),
    }
    costs = fitting.costs_for(policy, method, target, texts, **run)
    tuned = fitting.with_costs(method, policy, costs)
    fastest = trials.fastest(tuned, target, texts, **run)
    return settings_of(fastest, tuned, policy, costs, tree=trees.text_of(shape), rule=rule)


def settings_of(
    fastest: Any, tuned: Any, policy: str, costs: Costs, *, tree: str = "chain", rule: str = ""
) -> Settings:
    """Convert the choice of `trials.fastest` to settings.

    Args:
      fastest: plain decoding, drafts of one length, or `tuned` itself.
      tuned: the loop with the policy and its costs.
    """
    found = fitting.words(costs)
    if fastest is tuned:
        why = f"{policy} decides how long drafts are, at most {tuned.gamma_max} tokens. {found}"
        return Settings(tuned.gamma_max, policy, costs, tree, rule, tuple(tuned.widths), why)
    if fastest.gamma_max == 0:  # plain decoding drafts nothing
        return Settings(0, rule=rule, words=f"No draft is worth its time. {found}")
    why = f"Drafts of {fastest.gamma_max} in every round are faster than {policy}. {found}"
    return Settings(fastest.gamma_max, rule=rule, words=why)


def _doubling(gamma: int) -> list[int]:
    """1, 2, 4, … below γ + 1."""
    return [1 << power for power in range(max(gamma, 1).bit_length()) if 1 << power <= gamma]
