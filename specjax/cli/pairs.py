"""The models of a command's config, and the loop that decodes with them."""

import dataclasses
import os
import sys
import warnings

from specjax import checkpoints, drafters, policies, rules, trees
from specjax.checkpoints.compatibility import check_pair
from specjax.checkpoints.loading import check_memory as check_parameters
from specjax.cli import defaults
from specjax.decoding import building, streaming
from specjax.decoding.programs import needed
from specjax.decoding.texts import tokenize
from specjax.drafters.base import Drafter
from specjax.drafters.loading import NAMES as DRAFTERS
from specjax.loop import Method
from specjax.measure.timing import Say, silent
from specjax.models import meshes, sharding
from specjax.models.memory import check_fits
from specjax.settings import MAX_GAMMA, Settings
from specjax.support import command_line, named
from specjax.support.ranges import whole
from specjax.tuning import fitting
from specjax.tuning.job import Job

METHODS = ("speculative", "autoregressive")


def check(config) -> None:
    """Raise ValueError for errors that show before anything is loaded."""
    if config.method not in METHODS:
        raise ValueError(f"method={config.method!r} must be one of {', '.join(METHODS)}.")
    defaults.precision(config)
    if not config.target:
        raise ValueError("No target: give --config.target=DIR, or a name on the Hugging Face hub.")
    if with_draft(config) and not config.draft:
        raise ValueError(
            "No draft: give --config.draft=DIR, or lookup, which needs no model; or "
            "--config.method=autoregressive to do without."
        )
    if config.compare and not with_draft(config):
        raise ValueError("compare=True needs --config.method=speculative: it does the other too.")
    if config.rounds_file and not with_draft(config):
        raise ValueError("rounds_file needs --config.method=speculative: it logs its rounds.")
    if config.rounds_file and not is_chain(config):
        raise ValueError(f"rounds_file is for chains, and tree={config.tree!r} is none.")
    if config.mesh:
        meshes.mesh_of(config.mesh)
    # A misspelt name fails here, before models are loaded.
    unknown = drafters.maker(config.draft) is None and not os.path.exists(config.draft)
    if unknown and (near := named.meant(config.draft, DRAFTERS)):
        command_line.say(f"looking for the draft {config.draft} on the hub.{near}")
    if config.policy:
        policies.check(config.policy)
    if config.rule:
        rules.parse(config.rule)
    defaults.sampling(config)
    if is_chain(config) and with_draft(config) and "settings" not in config:  # whose γ may be 0
        whole("gamma", config.gamma, f"[1, {MAX_GAMMA}]")
    for name in ("max_new_tokens", "batch_size", "samples"):
        whole(name, getattr(config, name), "[1, ∞)")
    whole("max_source_len", config.max_source_len, "[0, ∞)", "0: the target's own limit")


def check_fit(config) -> None:
    """Raise ValueError if the pair fits neither together nor in memory, before it is loaded."""
    if not with_draft(config) or drafters.maker(config.draft):
        return
    if drafters.is_attached(config.draft):  # its file says which target it belongs to
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading will issue them
        precision = defaults.precision(config)
        target = checkpoints.outline(config.target, **precision)
        draft = checkpoints.outline(config.draft, dtype=precision["dtype"])
    check_pair(target, draft, check_tokens=config.get("check_tokens", True))
    if not config.mesh:
        check_parameters([target, draft])


def with_draft(config) -> bool:
    """Whether the config's method uses its draft."""
    return config.method == "speculative"


def is_chain(config) -> bool:
    """Whether drafts are chains, whose rounds can be logged."""
    return isinstance(trees.parse(config.tree), trees.Chain)


def lacks_costs(config) -> bool:
    """Whether the policy needs costs that must still be measured."""
    return with_draft(config) and bool(config.policy) and policies.needs_costs(config.policy)


def load_pair(config) -> tuple[checkpoints.Checkpoint, checkpoints.Checkpoint | Drafter | None]:
    """Load the target and, for speculation, the draft."""
    target = checkpoints.load(config.target, **defaults.precision(config), mesh=config.mesh or None)
    if not with_draft(config):
        return target, None
    options = {"dtype": defaults.DTYPES[config.dtype], "replicate": config.replicate_draft}
    return target, drafters.load(config.draft, target, **options)


def method_of(
    config,
    target: checkpoints.Checkpoint,
    draft: checkpoints.Checkpoint | Drafter | None,
    tuned: Settings | None = None,
) -> Method:
    """Build the loop, by the settings if there are any; a policy that lacks costs comes later."""
    drafting = defaults.drafting(config) if tuned is None else tuned
    if lacks_costs(config) and tuned is None:
        drafting = dataclasses.replace(drafting, policy=None)
    drafting = dataclasses.replace(drafting, check_tokens=config.get("check_tokens", True))
    return building.build(target, draft, drafting, sampling=defaults.sampling(config))


def with_costs(method, target: checkpoints.Checkpoint, texts: list[str], config) -> Method:
    """Measure and print costs, and build the loop with its policy and these costs."""
    run = job(config, target, texts)
    found = fitting.costs_for(run, config.policy, method, config.draft)
    print(f"{config.policy}: measured {fitting.words(found)}", file=sys.stderr)
    return fitting.with_costs(method, config.policy, found, run.rows)


def job(
    config, target: checkpoints.Checkpoint, texts: list[str], minutes: float = 0, say: Say = silent
) -> Job:
    """What is measured for a run by this config, by default without a limit of time."""
    return Job(
        target,
        texts,
        defaults.sampling(config),
        config.max_new_tokens,
        config.seed,
        config.max_source_len or None,
        config.batch_size,
        minutes,
        say,
        config.get("samples", 1),
    )


def check_plan(config, texts: list[str], tuned: Settings | None = None) -> None:
    """Raise ValueError if the models and a batch do not fit on the mesh, before loading them."""
    precision = defaults.precision(config)
    options = {"dtype": precision["dtype"], "mesh": config.mesh}
    draft: checkpoints.Checkpoint | Drafter | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading will issue them
        target = checkpoints.outline(config.target, **precision, mesh=config.mesh)
        if with_draft(config):
            if drafters.maker(config.draft) or drafters.is_attached(config.draft):
                draft = drafters.load(config.draft, target)
            else:
                draft = checkpoints.outline(
                    config.draft, replicate=config.replicate_draft, **options
                )
    check_memory(config, texts, target, method_of(config, target, draft, tuned), loaded=False)


def check_memory(
    config, texts: list[str], target: checkpoints.Checkpoint, method: Method, *, loaded: bool = True
) -> None:
    """Raise ValueError if a batch does not fit beside the models.

    Args:
      loaded: False: the models are outlines, and count too.
    """
    total = len(texts) * config.samples
    rows = min(config.batch_size, total)
    in_batches = config.carry or building.reads_batch(method)  # one after the other
    texts = sorted(texts, key=len)[-8:]  # the most tokens are among these, or nearly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding will warn of texts that it cuts
        sources = tokenize(target, texts, config.max_source_len or None)
    if not any(sources):
        return
    need = needed(
        method,
        target,
        max(map(len, sources)),
        rows=rows,
        max_new_tokens=config.max_new_tokens,
        admits=0 if total <= rows or in_batches else streaming.at_once(rows),
    )
    check_fits(
        f"{'C' if loaded else 'The models, c'}aches and distributions of {rows} rows",
        need.state + need.temporary + (0 if loaded else need.params),
        "Lower batch_size, max_new_tokens or max_source_len, or set dtype=bfloat16.",
        *sharding.held_by(target.model),
    )
