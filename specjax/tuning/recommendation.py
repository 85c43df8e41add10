"""Which candidate to decode with, by its measurements, and why not the others, in sentences."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import drafters, formulas
from specjax.checkpoints import Checkpoint
from specjax.drafters.base import Drafter
from specjax.measure import doubts
from specjax.settings import Settings
from specjax.support.named import short

# Thresholds that explain a missing speedup.
LOW_ALPHA = 0.5  # every second drafted token is lost, and all that follow it
SLOW_DRAFT = 0.5  # in target steps
SLOW_VERIFY = 1.5  # in target steps, for a verify pass and the rest of a round
# Share of the promised tokens; below it, outputs end early or later tokens are worse.
MIN_SHARE_OF_PROMISED = 0.85

EQUAL_WITHIN = 0.05  # speedups that differ by less are equal: timings are no better
# A loop may be faster by this than acceptance and the costs of its rounds promise.
BOUND_SLACK = 0.1


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A draft and its measurements; numbers stay 0 if it cannot draft at all."""

    name: str
    problem: str = ""  # why it cannot draft: it does not fit the target, or cannot be loaded
    dropped: str = ""  # why it was not timed: it cannot win. Its measured speedups stay 0
    # Other differences from the target, which no loop reads; what n-grams were counted on.
    remarks: tuple[str, ...] = ()
    parameters: int = 0
    memory: int = 0  # bytes of parameters and caches of both models, at the batch size asked for
    alpha: float = 0.0
    alpha_low: float | None = None  # no interval below `metrics.MIN_OUTPUTS` outputs
    alpha_high: float | None = None
    # Rate at which both models have the same likeliest token, over the same prefixes as α.
    agreement: float = 0.0
    c: float = 0.0
    gamma: int = 0  # the best γ, by α and the times of whole rounds; of a tree its depth
    tree: str = ""  # the best tree, as `generate` takes it; empty: a chain
    policy: str = ""  # decides how long drafts are, at most `gamma`; empty: always `gamma`
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more for `Settings`
    nodes: int = 0  # drafted tokens of a round: nodes of the tree, or γ
    v: float = 0.0  # target steps of a round with that many `nodes`, without its draft steps
    steps: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of a round, by γ
    # Expected tokens per target call: along whole outputs, for a tree by the acceptance of each
    # rank, for a drafter that `guesses` by that of each position.
    promised: float = 0.0
    guesses: bool = False  # whether later tokens of a draft are accepted less often than the first
    expected: Mapping[str, float] = dataclasses.field(default_factory=dict)  # `promised`, by γ
    # Tokens per target call by the rates of each position in the timed loop, as if no output ended
    # inside a draft.
    unended: float = 0.0
    tau: float = 0.0
    tokens: float = 0.0  # mean tokens of an output
    predicted: float = 0.0  # speedup of the loop on the timed tokens, by acceptance and `steps`
    # Plain decoding's time over speculation's, both without prefill.
    speedup: float = 0.0
    speedup_low: float = 0.0
    speedup_high: float = 0.0
    speedup_end_to_end: float = 0.0  # with encoder and prefill of both models
    # End-to-end speedup on those timed inputs that choose among candidates; 0: there is no rest.
    # All other speedups are of the rest, since the winner was lucky on the inputs that chose it.
    choosing: float = 0.0
    doubts: Sequence[str] = ()  # contradictions in its timings: nothing follows from them
    load: float | None = None  # load average per processor, after it was timed
    tuned_for: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # as in `Settings`

    @property
    def chosen_by(self) -> float:
        """The speedup that is compared with those of other candidates."""
        return self.choosing or self.speedup_end_to_end

    @property
    def surely(self) -> float:
        """The least of its measured speedups, which a rival has to reach."""
        return min(self.chosen_by, self.speedup_end_to_end, self.speedup_low)


# Plain decoding as a candidate: a draft that is not faster loses to it.
PLAIN = Candidate("plain decoding", tau=1.0, predicted=1.0, speedup=1.0, speedup_low=1.0,
                  speedup_high=1.0, speedup_end_to_end=1.0)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Selection:
    """All candidates, in the order given, and the draft and settings to decode with."""

    candidates: list[Candidate]
    settings: Settings  # for `generate`, with the chosen draft; γ = 0: plain decoding
    draft: str | Checkpoint | Drafter | None = None  # None: plain decoding

    @property
    def words(self) -> str:
        """The recommendation and its reasons, in sentences."""
        return self.settings.words


def counts_ngrams(draft: str | Checkpoint | Drafter) -> bool:
    """Whether a draft is made from counts of the target's own outputs."""
    try:
        return isinstance(draft, str) and drafters.counts_ngrams(draft)
    except ValueError:  # no such drafter, which `Candidates.measure` reports
        return False


def recommend(
    candidates: Sequence[Candidate], drafts: Sequence[str | Checkpoint | Drafter] = ()
) -> Selection:
    """Choose the candidate with the fastest outputs; among equals the one with the least memory.

    Plain decoding is a candidate and needs the least memory. A draft is recommended if it beats
    plain decoding by more than timings vary, on the inputs that choose and on the others. Nothing
    follows from timings that contradict themselves, or that were taken on a busy machine.

    Args:
      drafts: the draft of each candidate; default: its name.
    """
    usable = [candidate for candidate in candidates if not candidate.problem]

    def plain(*words: str) -> Selection:
        known = usable[0].tuned_for if usable else {}
        settings = Settings(0, words="\n".join(words), tuned_for=known)
        return Selection(list(candidates), settings)

    if busy := doubts.busy(candidate.load for candidate in usable):
        guess = recommend([dataclasses.replace(one, load=None) for one in candidates])
        first = guess.words.split("\n")[0]
        return plain(f"No draft is recommended. {busy}", f"By these timings it would be: {first}")
    refused = [
        f"{short(c.name)} cannot {'branch' if c.tree else 'draft'}: {c.problem}"
        for c in candidates
        if c.problem
    ]
    sound = [candidate for candidate in usable if not candidate.doubts]
    faster = [candidate for candidate in sound if beats_plain(candidate)]
    if not faster:
        if not usable:
            advice = f"Use {PLAIN.name}: no draft can be used."
        elif not sound:
            advice = "No draft is recommended: the timings contradict themselves."
        else:
            advice = (
                f"Use {PLAIN.name}: no draft here makes outputs come sooner by more than timings "
                f"vary ({EQUAL_WITHIN:.0%})."
            )
        return plain(advice, *map(why_not, usable), *refused)
    best = max(candidate.chosen_by for candidate in faster)
    equals = [candidate for candidate in faster if candidate.chosen_by > (1 - EQUAL_WITHIN) * best]
    winner = min(equals, key=lambda candidate: (candidate.memory, bool(candidate.tree)))
    words = _praise(winner, equals, usable, refused)
    settings = Settings(
        winner.gamma, tree=winner.tree or "chain", words=words, tuned_for=winner.tuned_for,
        **winner.settings,
    )  # fmt: skip
    place = next(i for i, candidate in enumerate(candidates) if candidate is winner)
    return Selection(list(candidates), settings, drafts[place] if drafts else winner.name)


def beats_plain(candidate: Candidate) -> bool:
    """Whether outputs come sooner beyond the noise.

    By `EQUAL_WITHIN`, on the inputs that choose and on the others, with a loop that is faster in
    three repeats of four. False where timings contradict themselves.
    """
    slower = min(candidate.chosen_by, candidate.speedup_end_to_end)
    sooner = (1 - EQUAL_WITHIN) * slower >= PLAIN.speedup_end_to_end
    return not candidate.doubts and sooner and candidate.speedup_low > PLAIN.speedup


def cannot_win(most: float, best: Candidate | None) -> str:
    """Explain why a candidate need not be timed; "" if it may win.

    Args:
      most: its speedup by the costs of rounds and the acceptance along known outputs.
      best: the candidate to beat beside plain decoding, if there is one.
    """
    most *= 1 + BOUND_SLACK
    by = f"it is at most {most:.2f} times as fast by its costs and acceptance"
    if most <= PLAIN.speedup:
        return by
    if best is None or most > (1 - EQUAL_WITHIN) * best.surely:
        return ""
    return f"{by}, and {_called(best)} at least {best.surely:.2f} times"


def _praise(winner, equals, usable, refused) -> str:
    one = winner
    promise = f"; predicted {one.predicted:.2f}" if one.predicted else ""  # 0: not known
    sentences = [
        f"Use {short(one.name)} with {_how(one)}: outputs come {one.speedup_end_to_end:.2f} times "
        f"as fast end to end as without a draft. The loop alone is {one.speedup:.2f} times as fast "
        f"(quartiles {one.speedup_low:.2f} to {one.speedup_high:.2f}{promise}): {one.tau:.2f} "
        f"tokens for each call of the target, with α = {one.alpha:.2f} and c = {one.c:.2f}."
    ]
    others = ", ".join(_called(c) for c in equals if c is not winner)
    if others:
        sentences.append(f"No slower within {EQUAL_WITHIN:.0%}, but larger: {others}.")
    if winner.tree:
        sentences.append(f'tree="{winner.tree}"')
    if counts_ngrams(winner.name):
        sentences += [f"{winner.name} {remark}." for remark in winner.remarks]
    losing = [why_not(c) for c in usable if not beats_plain(c)]
    return "\n".join([*sentences, *losing, *refused])


def _how(candidate: Candidate) -> str:
    one = candidate
    shape = f"a tree of {one.nodes} nodes, {one.gamma} deep" if one.tree else f"gamma={one.gamma}"
    return f"{shape} at most, as {one.policy} decides" if one.policy else shape


def _called(candidate: Candidate) -> str:
    return short(candidate.name) + (f" with {_how(candidate)}" if candidate.tree else "")


def reasons(candidate: Candidate) -> tuple[str, ...]:
    """List why a candidate is not faster: some of "length", "later", "alpha", "c" and "v"."""
    one = candidate
    unended = one.unended or one.promised
    if one.speedup > 1 or (one.predicted > 1 and one.tau < MIN_SHARE_OF_PROMISED * unended):
        return ("length",)
    if one.predicted > 1 and unended < MIN_SHARE_OF_PROMISED * one.promised:
        return ("later",)
    bad = {"alpha": one.alpha < LOW_ALPHA, "c": one.c >= SLOW_DRAFT, "v": one.v >= SLOW_VERIFY}
    lost = {"alpha": 1 - one.alpha, "c": one.gamma * one.c, "v": one.v - 1}
    return tuple(name for name in bad if bad[name]) or (max(lost, key=lost.__getitem__),)


def why_not(candidate: Candidate) -> str:
    """Explain in a sentence or two why a candidate is not faster, and what would change it."""
    one, name = candidate, _called(candidate)
    if one.doubts:
        return (
            f"{name}: its timings contradict themselves, and nothing follows from them "
            f"({'; '.join(one.doubts)}). {doubts.AGAIN}"
        )
    so_fast = f"{name}, {one.speedup_end_to_end:.2f} times as fast end to end"
    if one.dropped:
        so_fast = f"{name} was not timed: {one.dropped}"
    if one.dropped and (one.predicted > 1 or not one.steps):  # a rival is faster, or its policy
        return f"{so_fast}."
    if one.speedup_end_to_end > 1:
        return (
            f"{so_fast}: that is no more than timings vary (quartiles of the loop "
            f"{one.speedup_low:.2f} to {one.speedup_high:.2f}). Look again with more inputs."
        )
    size = f"{one.nodes} nodes" if one.tree else f"γ = {one.gamma}"
    sentences = {
        "length": f"outputs of {one.tokens:.0f} tokens are too short: the loop is "
        f"{one.speedup:.2f} times as fast, with {one.tau:.1f} tokens for each call of the "
        "target, and starting two models takes what that saves",
        "later": f"later tokens of a draft are right less often than the first: "
        f"{one.unended:.1f} tokens for each call of the target, where its acceptance promises "
        f"{one.promised:.1f}",
        "alpha": f"agreement is too low (α = {one.alpha:.2f})",
        "c": f"the draft is too slow (c = {one.c:.2f}: a draft step takes {one.c:.2f}x as long "
        "as a target step)",
        "v": f"verification is not free (a round of {size} takes {one.v:.2f} target steps "
        "beside its draft steps)",
    }
    causes = reasons(one)
    ways = [] if {"length", "later"} & set(causes) or one.tree else _ways_out(one)
    way = f" It would pay with {' or '.join(ways)}." if ways else ""
    return f"{so_fast}: {' and '.join(sentences[cause] for cause in causes)}.{way}"


def _ways_out(one: Candidate) -> list[str]:
    """Values of α and of c at which the predicted speedup would be 1, all else equal."""
    # A verify pass takes one target step at least; less than that is noise.
    rounds = {int(gamma): max(steps, 1 + int(gamma) * one.c) for gamma, steps in one.steps.items()}
    ways = []
    if not one.guesses:  # α does not say how often tokens of later positions are accepted
        alphas = np.linspace(0, 1, 1001)
        speedups = [formulas.expected_tokens(alphas, gamma) / s for gamma, s in rounds.items()]
        enough = alphas[np.max(speedups, axis=0) > 1]
        if len(enough) and enough[0] > one.alpha:
            ways.append(f"α above {enough[0]:.2f}")
    tokens = {int(gamma): tokens for gamma, tokens in one.expected.items()} or {
        gamma: formulas.expected_tokens(one.alpha, gamma) for gamma in rounds
    }
    most = max((tokens[gamma] - steps) / gamma + one.c for gamma, steps in rounds.items())
    if 0.005 < most < one.c:  # it is printed with two digits
        ways.append(f"c below {most:.2f}")
    return ways
