"""The order of the checks, and what each examines. `verdicts` judges.

A check that fails skips those that build on it; the others run.
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checkpoints, drafters, formulas, results
from specjax.checkpoints.compatibility import compare, shared_ids
from specjax.decoding import building
from specjax.decoding.programs import needed
from specjax.decoding.texts import tokenize
from specjax.devices import device_of
from specjax.doctor import distributions, verdicts
from specjax.doctor.case import Case, Plan
from specjax.doctor.verdicts import Finding
from specjax.drafters.abilities import guesses
from specjax.drafters.base import ByModel
from specjax.loop import Method
from specjax.measure import costing, doubts, metrics
from specjax.measure.stopwatch import Stopwatch
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import dtype_of, memory_free
from specjax.results import Result, Row
from specjax.rules import exactness, remark
from specjax.sampling import Greedy, Sampling, entropy

DRAWS = 4096  # draws from each loop: enough to find a total variation of 0.1 from the target
DRAW_SECONDS = 30.0  # limit on drawing; the test then uses the draws so far
DRAW_BATCH = 64
LAW_TOKENS = 4  # tokens of each draw, so that rounds draft beyond the tested tokens
TESTED = 30  # rounds needed for a rate by position
REPEATS = 3  # timings of each call
AGAIN = 9  # timings of each call, if the first ones contradict themselves


class Check(NamedTuple):
    """A check. An error of `run` that the user can correct counts as a failure too."""

    name: str
    run: Callable[[Case], Finding]
    needs: tuple[str, ...] = ()


def examine(plan: Plan, checks: Sequence[Check] = ()) -> Iterator[Finding]:
    """Yield one finding for each check, as they are made.

        from specjax import doctor

        for finding in doctor.examine(doctor.Plan("DIR", "DIR2")):
            print(finding.name, finding.verdict, finding.seen, finding.way_out)

    Args:
      plan: the pair, inputs and settings. Inputs are texts or lists of token ids.
      checks: some of `CHECKS`, in their order; default: all.
    """
    case, stopped = Case(plan), set()
    for check in checks or CHECKS:
        if missing := [name for name in check.needs if name in stopped]:
            finding = verdicts.skip(check.name, missing)
        else:
            try:
                finding = check.run(case)
            except (ValueError, OSError, FloatingPointError, jax.errors.JaxRuntimeError) as error:
                finding = Finding(check.name, "fail", str(error).strip().split("\n")[0])
        if finding.verdict in ("fail", "skip"):
            stopped.add(check.name)
        yield finding


# --- before anything is loaded -----------------------------------------------------------------


def files(case: Case, role: str) -> Finding:
    """Check that config, weight headers and tokenizer can be read, and fit one another."""
    name = getattr(case.plan, role)
    if role == "draft" and (drafters.maker(name) or drafters.is_attached(name)):
        target = checkpoints.outline(
            case.plan.target, **case.plan.precision("target"), mesh=case.plan.mesh
        )
        case.draft = drafters.load(name, target)
        count = drafters.parameters(case.draft)
        own = f"a drafter of {count:,} parameters" if count else "a drafter without a model"
        return Finding(f"{role} files", "pass", f"{name}, {own}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copies = role == "draft" and bool(case.plan.mesh) and case.plan.replicate_draft
        options: dict[str, Any] = {"mesh": case.plan.mesh, "replicate": copies}
        found = checkpoints.outline(name, **case.plan.precision(role), **options)
    setattr(case, role, found)
    count = sum(leaf.size for leaf in jax.tree.leaves(found.model))
    kind = type(found.config).__name__.removesuffix("Config")
    remarks = [str(warning.message) for warning in caught if warning.category is UserWarning]
    seen = f"{kind}, {count:,} parameters in {found.precision or _dtype(found)}"
    return verdicts.warn_if(f"{role} files", seen, " ".join(remarks))


def tokenizer(case: Case) -> Finding:
    """Check that the target's tokenizer reads the texts, and fits its model.

    A target without one passes if all inputs are token ids.
    """
    target = case.target
    case.sources = tokenize(target, case.plan.texts, case.plan.max_source_len)
    if target.tokenizer is None:
        return Finding("tokenizer", "pass", "none: inputs are token ids")
    ids = [i for source in case.sources for i in source]
    unknown = ids.count(target.tokenizer.unk_token_id) / len(ids)
    return verdicts.tokenizer(target.model.vocab_size, target.config.vocab_size, unknown)


def compatibility(case: Case) -> Finding:
    """Check that the draft reads and writes the target's ids."""
    if isinstance(case.draft, Checkpoint):
        checks = compare(case.target, case.draft, tokens=case.plan.drafting.check_tokens)
        return verdicts.compatibility(checks, shared_ids(case.target, case.draft))
    case.speculative(Greedy())  # refuses a drafter of more ids
    return verdicts.sizes(case.draft.vocab_size, case.target.model.vocab_size)


def devices(case: Case) -> Finding:
    """Report where the pair would run, and in which precision."""
    device = device_of(case.target.model)
    kind = "cpu" if device.platform == "cpu" else device.device_kind
    found = jax.local_devices(backend=device.platform)
    dtypes = {role: _dtype(model) for role, model in case.checkpoints.items()}
    return verdicts.devices(kind, len(found), dtypes, case.target.config.is_encoder_decoder)


def memory(case: Case) -> Finding:
    """Compare parameters, caches and distributions of both models with the free memory."""
    plan, longest = case.plan, max(map(len, case.sources))
    try:
        loops: list[Any] = [(case.speculative(plan.sampling), case.target)]
    except ValueError:  # no pair: each by itself
        loops = [(building.plain(c, plan.sampling), c) for c in case.checkpoints.values()]
    shapes = {"rows": plan.batch_size, "max_new_tokens": plan.max_new_tokens}
    needs = [needed(method, c, longest, **shapes) for method, c in loops]
    device, times = sharding.held_by(case.target.model)
    free = memory_free(device)
    if free is not None and device.platform == "cpu":
        free //= times  # shared by the devices of a CPU
    return verdicts.memory(needs, free, plan.batch_size, longest)


# --- one model at a time -----------------------------------------------------------------------


def weights(case: Case) -> Finding:
    """Load the models, and check that every parameter is finite."""
    bad, count = [], 0
    for role in case.checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `files` reported them
            name, precision = getattr(case.plan, role), case.plan.precision(role)
            loaded: Any = (
                checkpoints.load(name, **precision, mesh=case.plan.mesh)
                if role == "target"
                else drafters.load(
                    name, case.target, **precision, replicate=case.plan.replicate_draft
                )
            )
        setattr(case, role, loaded)
        for path, leaf in jax.tree.leaves_with_path(loaded.model):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                count += 1
                if not jnp.all(jnp.isfinite(leaf)):
                    name = jax.tree_util.keystr(path, simple=True, separator=".")
                    bad.append(f"{role}.{name.removeprefix('params.')}")
    if drafters.is_attached(case.plan.draft):  # it shares the weights that were just loaded
        case.draft = drafters.load(case.plan.draft, case.target)
        bad += [
            f"draft.{name}"
            for name, array in case.draft.tensors().items()  # type: ignore[union-attr]
            if not np.all(np.isfinite(array))
        ]
    return verdicts.weights(bad, count)


def logits(case: Case) -> Finding:
    """Decode plainly and feed the outputs to the models: no logit is NaN or infinite."""
    way_out = (
        f"The weights are finite, so activations overflow {_dtype(case.target)}: take "
        "--config.dtype=bfloat16 or float32."
    )
    seen: list[str] = []
    method = case.speculative(Greedy())
    models = {"target": method.target}
    drafter = getattr(method.drafter, "inner", method.drafter)
    if isinstance(drafter, ByModel):
        models["draft"] = drafter.model
    for role, model in models.items():
        try:
            if role == "target":
                case.plain = list(case.decode(case.autoregressive(Greedy())))
            read = case.over_outputs(model)
        except FloatingPointError:
            read = [np.full(1, np.nan)]
        if not all(np.isfinite(row).all() for row in read):
            return Finding("logits", "fail", f"those of the {role} are not finite", way_out)
        if role == "target":
            case.logits = read
        seen.append(f"{role} up to {max(np.abs(row).max(initial=0) for row in read):.3g}")
    return Finding("logits", "pass", f"finite; {', '.join(seen)}")


def outputs(case: Case) -> Finding:
    """Check that the target's greedy outputs and distributions are those of a trained model."""
    entropies = np.concatenate([entropy(jax.nn.log_softmax(read)) for read in case.logits])
    outputs = [row.tokens for row in case.plain]
    return verdicts.outputs(outputs, float(entropies.mean()), case.logits[0].shape[1])


# --- the pair ----------------------------------------------------------------------------------


def identity(case: Case) -> Finding:
    """Check that both loops give the same tokens at temperature 0."""
    method = case.speculative(Greedy())
    case.greedy = list(case.decode(method))
    if exactness(method.rule, method.sampling) is False:
        return Finding("greedy identity", "skip", remark(method.rule, method.sampling))
    gaps = [
        distributions.gap(logits, ours.tokens, theirs.tokens)
        for logits, ours, theirs in zip(case.logits, case.plain, case.greedy, strict=True)
        if ours.tokens != theirs.tokens
    ]
    tokens = sum(row.emitted for row in case.plain)
    return verdicts.identity(gaps, len(case.plain), tokens, _tolerance(case.target))


def distribution(case: Case) -> Finding:
    """Check that both loops draw the first two tokens from the target's distribution.

    For a greedy plan it is the distribution at temperature 1.
    """
    drawn = Sampling() if case.plan.sampling.greedy else case.plan.sampling
    method, plain = case.speculative(drawn), case.autoregressive(drawn)
    if exactness(method.rule, method.sampling) is False:
        return Finding("draws", "skip", remark(method.rule, method.sampling))
    shortest = min(range(len(case.sources)), key=lambda index: len(case.sources[index]))
    likely, expected = distributions.distribution_of_two(
        method, case.target, case.sources[shortest]
    )
    p_values, draws = {}, DRAWS
    for name, loop in (("plain", plain), ("speculative", method)):
        rows = _draws(case, loop, shortest)
        counted = Counter(distributions.outcome(row.tokens, likely) for row in rows)
        p_values[name] = distributions.chi_square(counted, expected)
        draws = min(draws, counted.total())
    return verdicts.distribution(p_values, draws, expected.values())


def _draws(case: Case, method, index: int) -> Iterator[Row]:
    """Yield whole batches of rows until there are enough, or time after compilation is up."""
    end = math.inf
    rows = case.decode(
        method,
        [case.plan.texts[index]],
        max_new_tokens=LAW_TOKENS,
        num_samples=DRAWS,
        batch_size=DRAW_BATCH,
    )
    for row in rows:
        yield row
        if row.sample == DRAW_BATCH:
            end = time.monotonic() + DRAW_SECONDS
        elif (row.sample + 1) % DRAW_BATCH == 0 and time.monotonic() > end:
            return


def acceptance(case: Case) -> Finding:
    """Measure α over the target's own outputs; τ and rates by position from the loop."""
    plan = case.plan
    if plan.sampling.greedy:
        plain, case.rows = case.plain, case.greedy
    else:
        plain = list(case.decode(case.autoregressive(plan.sampling)))
        case.rows = list(case.decode(case.speculative(plan.sampling)))
    loop = building.build(case.target, case.draft, gamma=1, sampling=plan.sampling)
    outputs = [row.tokens for row in plain]
    run = plan.batch_size, plan.max_source_len
    found = metrics.alpha_of(loop, case.target, plan.texts, outputs, *run)
    case.alpha = found.value
    enough = np.sum([row.tested for row in case.rows], axis=0) >= TESTED
    rates = np.where(enough, results.acceptance_by_position(case.rows), np.nan)
    return verdicts.acceptance(found, Result(case.rows).block_efficiency, rates)


def speed(case: Case) -> Finding:
    """Measure c and v(γ), at batch 1 on the longest text."""
    plan, method = case.plan, case.speculative(case.plan.sampling)
    gamma, longest = method.gamma_max, [max(case.sources, key=len)]
    smaller = drafters.parameters(case.draft, case.target) < sum(
        leaf.size for leaf in jax.tree.leaves(case.target.model)
    )
    for repeats in (REPEATS, AGAIN):
        watch = Stopwatch(case.target, plan.budget, plan.randomness, repeats=repeats)
        case.costs = costing.costs_of(watch, method, longest, [1, gamma])
        wrong = doubts.contradictions(gamma, case.costs.c, case.costs.v(gamma), smaller=smaller)
        if not wrong:
            break
    case.doubts = verdicts.doubtful(wrong, doubts.busy([doubts.load_average()]))
    return verdicts.speed(case.costs, gamma, _size(method), case.doubts)


def speedup(case: Case) -> Finding:
    """Predict τ / (γc + v), and the best γ up to the plan's.

    The best γ follows from α, or from the rates of each position for a drafter that `guesses`.
    """
    if case.doubts:
        return Finding("speedup", "skip", "the timings say nothing, see speed")
    method, costs = case.speculative(case.plan.sampling), case.costs
    gamma, counts = method.gamma_max, Result(case.rows).summary
    draft_calls = counts.draft_calls / max(counts.iterations, 1)
    expected = formulas.walltime_speedup_from_tau(
        counts.tokens_per_iteration, draft_calls, costs.c, costs.v(gamma), 0.0
    )
    if method.branches:
        return verdicts.speedup(float(expected), gamma, gamma, _size(method))
    # v is interpolated between 1 and γ: two verify passes are enough to compile.
    v = np.interp(range(gamma + 1), [0, 1, gamma], [1.0, costs.v(1), costs.v(gamma)])
    by_position = guesses(method.drafter)
    best = best_gamma(case.alpha, case.rows, costs.c, v, by_position)
    return verdicts.speedup(float(expected), gamma, best, _size(method))


def best_gamma(
    alpha: float, rows: Sequence[Row], c: float, passes: np.ndarray, by_position: bool
) -> int:
    """Choose the draft length with the largest speedup; 0: none is faster than plain decoding.

    Args:
      rows: outputs with drafts of the longest length.
      passes: time of a round without its draft steps, by 0 … γ_max drafted tokens.
      by_position: whether to use the rates of each position, and not α.
    """
    if not by_position:
        return int(formulas.optimal_gamma(alpha, c, passes))
    tokens = metrics.tokens_by_position(rows, range(1, len(passes)))
    speedups = {0: 1.0} | {k: tokens[k] / (k * c + passes[k]) for k in tokens}
    return max(speedups, key=lambda k: speedups[k])


FILES = ("target files", "draft files")
LOADED = (*FILES, "tokenizer", "memory", "weights")
PAIR = (*LOADED, "compatibility", "logits")
CHECKS = (
    Check("target files", partial(files, role="target")),
    Check("draft files", partial(files, role="draft")),
    Check("tokenizer", tokenizer, FILES[:1]),
    Check("compatibility", compatibility, FILES),
    Check("devices", devices, FILES),
    Check("memory", memory, LOADED[:3]),
    Check("weights", weights, LOADED[:4]),
    Check("logits", logits, PAIR[:-1]),
    Check("outputs", outputs, PAIR),
    Check("greedy identity", identity, PAIR),
    Check("draws", distribution, PAIR),
    Check("acceptance", acceptance, (*PAIR, "greedy identity")),
    Check("speed", speed, PAIR),
    Check("speedup", speedup, ("acceptance", "speed")),
)


def _size(method: Method) -> str:
    nodes = method.slots - 1
    return f"{nodes} nodes" if method.branches else f"γ={nodes}"


def _dtype(checkpoint: Checkpoint) -> str:
    return dtype_of(checkpoint.model).name


def _tolerance(checkpoint: Checkpoint) -> float:
    """Choose the tolerance for near-ties of logits.

    Accelerators multiply float32 in shorter parts by default. In an int8 cache, a difference in
    rounding may become a whole step.
    """
    if getattr(checkpoint.model, "int8_cache", False):
        return verdicts.NEAR_TIE_SHORT
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if device_of(checkpoint.model).platform == "cpu" or precision in ("highest", "float32"):
        return verdicts.NEAR_TIE.get(_dtype(checkpoint), verdicts.NEAR_TIE_SHORT)
    return verdicts.NEAR_TIE_SHORT
