"""Verdicts and ways out, from the observations of the checks.

A draft can cost speed, but never changes the output's distribution. So whatever concerns speed
alone warns and does not fail.
"""

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from specjax.checkpoints.compatibility import MAX_PADDING, Check
from specjax.devices import cpu_multiplies
from specjax.measure.doubts import AGAIN
from specjax.measure.metrics import Alpha
from specjax.models.memory import Need, gigabytes
from specjax.policies import Costs

Verdict = Literal["pass", "warn", "fail", "skip"]

UNKNOWN = 0.05  # share of the inputs' tokens; a tokenizer made for other text has more
FULL = 0.8  # share of free memory; the compiler's temporaries are not counted
# Entropy over that of a uniform distribution; the unigrams of a language have 0.5 to 0.7.
FLAT = 0.8
SHARP = 1e-3  # entropy in nats; the surest embedded target has 30 times that, logits × √E have none
LOOP = 4  # longest period of an output whose second half repeats itself
LAW_P = 1e-4  # p-value; a correct pair is below it once in 10,000 runs, for each of the two loops
LOW_ALPHA = 0.4  # α; tables of bigrams reach 0.36 to 0.52 on the embedded families
DRIFT = 0.6  # share of the first position's rate; without a fault later ones are near it, or above
MAX_USEFUL_C = 0.5  # c with which no α brings more than 1 / c = 2, however well the draft guesses
MIN_SPEEDUP = 1.05  # a speedup below it is within the noise of timing it
# Gap of logits that rounding may reverse, in units of the largest one: each logit is a sum over
# the width, so its error is some hundred units in the last place.
NEAR_TIE = {"float32": 2.0**-14, "float64": 2.0**-40}
NEAR_TIE_SHORT = 2.0**-5  # float16, bfloat16, and float32 that is multiplied in shorter parts

CONFIG = (
    "see that config.json is this checkpoint's own (tie_word_embeddings, scale_decoder_outputs, "
    "layer sizes)"
)


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    verdict: Verdict
    seen: str
    way_out: str = ""


def warn_if(name: str, seen: str, way_out: str) -> Finding:
    """Build a warning with this way out, or a pass if it is empty."""
    return Finding(name, "warn" if way_out else "pass", seen, way_out)


def tokenizer(ids: int, rows: int, unknown: float) -> Finding:
    """Judge a tokenizer.

    Args:
      ids: number of ids that stand for something.
      rows: rows of the embedding.
      unknown: share of unknown tokens.
    """
    way_out = ""
    if rows - ids > MAX_PADDING:
        way_out = "Models are padded by less: see that the tokenizer's files are this model's own."
    elif unknown > UNKNOWN:
        way_out = "Is it this model's own, and made for such text? --input takes texts of yours."
    return warn_if("tokenizer", f"{ids} ids for {rows} rows, {unknown:.0%} unknown", way_out)


def compatibility(checks: Sequence[Check], shared: tuple[int, int]) -> Finding:
    """Judge the results of `compatibility.compare`. What is not required warns.

    Args:
      shared: number of ids that mean one token in both models, and of the target's ids
        (`shared_ids`).
    """
    wrong = [check for check in checks if not check.passed]
    if not wrong:
        return Finding("compatibility", "pass", f"{len(checks)} comparisons")
    gravest = min(wrong, key=lambda check: not check.required)
    more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
    same, count = shared
    if same < count:
        more += f"; the draft is never right about {count - same:,} of the target's {count:,} ids"
    verdict: Verdict = "fail" if gravest.required else "warn"
    return Finding("compatibility", verdict, f"{gravest}{more}", gravest.way_out)


def sizes(drafts: int, targets: int) -> Finding:
    """Judge the number of ids of a drafter that is no model, and of its target."""
    same = min(drafts, targets)
    seen = f"{drafts} ids, as the target has"
    if drafts != targets:
        seen = f"{drafts} ids, and the target has {targets}: {targets - same} are never drafted"
    way_out = "" if drafts == targets else "Make the drafter for the target's vocabulary."
    return warn_if("compatibility", seen, way_out)


def devices(kind: str, count: int, dtypes: Mapping[str, str], encodes: bool) -> Finding:
    """Judge where a pair runs; the most serious finding comes first.

    Args:
      kind: "cpu", or the name of an accelerator.
      dtypes: of each role's parameters.
      encodes: whether both are encoder-decoders (T5s).
    """
    way_out = ""
    narrow = {"float16", "bfloat16"} & set(dtypes.values())
    if "float16" in narrow and encodes:
        way_out = "T5's activations overflow float16: take --config.dtype=bfloat16 or float32."
    elif kind == "cpu" and narrow and not (narrow == {"bfloat16"} and cpu_multiplies("bfloat16")):
        way_out = "Half precision is slow on this CPU, and rounds more: leave --config.dtype empty."
    elif kind == "cpu" and shutil.which("nvidia-smi"):
        way_out = "There is a GPU that JAX does not use: pip install -e '.[cuda13]'."
    elif kind != "cpu" and count > 1:
        way_out = "Only the first is used: hide the others, or give each a process of its own."
    listed = " and ".join(dict.fromkeys(dtypes.values()))
    return warn_if("devices", f"{count} × {kind}, {listed}", way_out)


def memory(needs: Sequence[Need], free: int | None, batch: int, longest: int) -> Finding:
    """Judge the memory that a pair, or each model, needs for a batch of texts of that length."""
    total = sum(need.total for need in needs)
    params = " + ".join(gigabytes(need.params) for need in needs)
    rest = gigabytes(sum(need.state + need.temporary for need in needs))
    seen = f"{gigabytes(total)}: parameters {params}, and {rest} for {batch} × {longest} tokens"
    if free is None:
        return Finding("memory", "pass", f"{seen}; the device does not say what it has")
    seen += f"; {gigabytes(free)} are free"
    if total <= FULL * free:
        return Finding("memory", "pass", seen)
    way_out = "Lower --config.batch_size or max_new_tokens, or take bfloat16 or smaller models."
    return Finding("memory", "fail" if total > free else "warn", seen, way_out)


def weights(bad: Sequence[str], count: int) -> Finding:
    """Judge parameters. Args: names of those that are not finite, and the number of all."""
    if not bad:
        return Finding("weights", "pass", f"{count} arrays, all finite")
    seen = f"{len(bad)} of {count} arrays are not finite, first {bad[0]}"
    way_out = "Copy or download the checkpoint again; if it was trained here, look where the loss "
    return Finding("weights", "fail", seen, way_out + "ceased to be a number.")


def outputs(tokens: Sequence[Sequence[int]], entropy: float, vocab_size: int) -> Finding:
    """Judge a target's outputs, which show a wrong config: wrongly tied, or logits wrongly scaled.

    Args:
      tokens: of the target's greedy outputs.
      entropy: mean over their positions, in nats.
    """
    live = [list(row) for row in tokens if row]
    length = float(np.mean([len(row) for row in live] or [0]))
    looped, share = sum(map(in_loop, live)), entropy / math.log(max(vocab_size, 2))
    way_out = ""
    if share > FLAT:
        way_out = f"Hardly better than chance: the weights are untrained, or {CONFIG}."
    elif entropy < SHARP:
        way_out = f"Sampling will not differ from greedy decoding: {CONFIG}."
    elif len(live) > 1 and len({tuple(row) for row in live}) == 1:
        way_out = f"Every text has the same output: {CONFIG}, and give prompts of the model's kind."
    elif looped > len(live) / 2:
        way_out = (
            "Small models loop at temperature 0. Give the prompts that it was trained on (T5: a "
            f"task prefix), or sample; if it should not loop, {CONFIG}."
        )
    seen = f"{len(live)} outputs of {length:.0f} tokens on average, {looped} in a loop; entropy "
    return warn_if(
        "outputs", f"{seen}{entropy:.3g} nats, {share:.0%} of a uniform distribution's", way_out
    )


def in_loop(tokens: Sequence[int]) -> bool:
    """Whether the second half repeats itself three times or more, with a period of ≤ `LOOP`."""
    tail = list(tokens[len(tokens) // 2 :])
    periods = [period for period in range(1, LOOP + 1) if len(tail) >= 3 * period]
    return any(tail[period:] == tail[:-period] for period in periods)


def identity(gaps: Sequence[float], outputs: int, tokens: int, tolerance: float) -> Finding:
    """Judge greedy identity. Args: `distributions.gap` of outputs that differ, and its limit."""
    name = "greedy identity"
    if not gaps:
        return Finding(name, "pass", f"{outputs} of {outputs} outputs, {tokens} tokens")
    seen = f"{len(gaps)} of {outputs} outputs differ, at tokens up to {max(gaps):.1e} apart"
    if max(gaps) <= tolerance:
        return Finding(
            name,
            "warn",
            f"{seen}: near-ties, which a pass over γ+1 tokens rounds otherwise than over one",
            "Take --config.dtype=float32 and set JAX_DEFAULT_MATMUL_PRECISION=highest, or accept "
            "it: each output is the target's, up to its own rounding.",
        )
    return Finding(
        name,
        "fail",
        f"{seen}: not rounding",
        "A model or drafter that breaks contract 1 of docs/design.md does this. Run the doctor on "
        "families/parse: if that fails too, please report it.",
    )


def distribution(p_values: Mapping[str, float], draws: int, probs: Collection[float]) -> Finding:
    """Judge draws.

    Args:
      p_values: of each loop, from `distributions.chi_square`.
      probs: of each outcome. Where one is nearly sure, any draws give a p-value of 1.
    """
    listed = ", ".join(f"{name} {value:.2g}" for name, value in p_values.items())
    seen = (
        f"chi-square against the target's distribution: p-value {listed}; below {LAW_P:g} is a "
        f"fault ({draws} draws of {len(probs)} outcomes, the likeliest of probability "
        f"{max(probs):.3f})"
    )
    if min(p_values.values()) >= LAW_P:
        return Finding("draws", "pass", seen)
    return Finding(
        "draws",
        "fail",
        seen,
        "Run it again with another --config.seed. If it stays, a drafter of your own gives another "
        "distribution than it draws from, or looks at a token before it decides "
        "(docs/design.md, contract 9). If both loops fail, so does the model itself: see "
        "greedy identity.",
    )


def acceptance(alpha: Alpha, tau: float, rates: np.ndarray) -> Finding:
    """Judge acceptance. Args: rates by position once reached; NaN where too few rounds did."""
    shown = " ".join("–" if np.isnan(rate) else f"{rate:.2f}" for rate in rates)
    known = rates[~np.isnan(rates)]
    way_out = ""
    if alpha.value < LOW_ALPHA:
        way_out = (
            "A table of bigrams would do as well. Give texts of the kind that both models know "
            "(--input), or distil the draft from the target (docs/training.md)."
        )
    elif len(known) > 1 and known[-1] < DRIFT * known[0]:
        way_out = (
            "Later positions fall off, as with a fault in a draft's own cache or positions; until "
            "that is found, lower --config.gamma, or take a tree of fewer levels."
        )
    seen = f"α {alpha.value:.3f} ({alpha.interval}, {alpha.tokens} tokens), "
    seen += f"τ {tau:.2f}; by position {shown}"
    if "–" in seen:
        seen += " (–: too few outputs or rounds to say)"
    return warn_if("acceptance", seen, way_out)


def doubtful(contradictions: Sequence[str], busy: str) -> str:
    """Explain why nothing follows from timings; "" if something does."""
    if contradictions:
        return f"The timings contradict themselves: {'; '.join(contradictions)}. {busy or AGAIN}"
    return busy


def speed(costs: Costs, gamma: int, size: str, doubts: str = "") -> Finding:
    """Judge the times of a draft step, or a tree's level, and of a verify pass, in target steps.

    Args:
      size: size of a draft, in words.
      doubts: why nothing follows from the costs.
    """
    way_out = doubts
    if costs.c >= MAX_USEFUL_C and not doubts:
        way_out = (
            "The draft is too slow to help, however accurate it is: take one with fewer layers (at "
            "most a tenth of the target's step time), or a larger target."
        )
    seen = f"c {costs.c:.3f}, v({size}) {costs.v(gamma):.2f}"
    return warn_if("speed", f"{seen}; a target step is {1e3 * float(costs.token):.3g} ms", way_out)


def speedup(expected: float, gamma: int, best: int, size: str) -> Finding:
    """Judge the expected speedup.

    Args:
      best: the best γ of 1 … gamma, or gamma where it is unknown; 0: none is faster.
      size: size of a draft, in words.
    """
    seen = f"{expected:.2f} times plain decoding at batch 1, {size}"
    if expected >= MIN_SPEEDUP:
        return Finding("speedup", "pass", seen + (f"; γ={best} promises more" * (0 < best < gamma)))
    if 0 < best < gamma:
        return Finding("speedup", "warn", seen, f"Draft less: --config.gamma={best} promises most.")
    return Finding(
        "speedup",
        "warn",
        seen,
        "Decode plainly here, or take a cheaper or better draft, a larger target, or a device on "
        "which a verify pass costs about a step (v near 1).",
    )


def skip(name: str, because: Collection[str]) -> Finding:
    """Skip a check. Args: checks that it builds on, and that did not pass."""
    return Finding(name, "skip", f"needs {', '.join(because)}")
