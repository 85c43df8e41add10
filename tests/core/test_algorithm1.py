"""`examples/algorithm1.py` and the jitted loop have the same distribution: the target's."""

import runpy
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from command_line import ROOT
from reference import total_variation
from specjax import rules
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from specjax.testing.enumeration import output_distribution
from table_models import MarkovModel, inputs_of

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "algorithm1.py"))
VOCAB, BUDGET, GAMMA = 3, 4, 2


class Choices:
    """Random numbers of which every outcome is tried, by running the program again for each."""

    def __init__(self):
        self.script: list[tuple[int, int]] = []  # outcome, and how many there are

    def rewind(self):
        self.at, self.chance = 0, 1.0

    def next_run(self):
        """Whether an outcome is left that has not been tried; the script leads to it."""
        while self.script and self.script[-1][0] + 1 == self.script[-1][1]:
            self.script.pop()
        if self.script:
            outcome, count = self.script[-1]
            self.script[-1] = outcome + 1, count
        return bool(self.script)

    def choice(self, count, p):
        if self.at == len(self.script):
            self.script.append((0, count))
        outcome = self.script[self.at][0]
        self.at, self.chance = self.at + 1, self.chance * p[outcome]
        return outcome

    def random(self, count):
        return [Uniform(self)] * count


class Uniform:
    """A number drawn from [0, 1), of which the program asks once whether it is above another."""

    def __init__(self, choices):
        self.choices = choices

    def __gt__(self, other):
        below = min(1.0, max(0.0, float(other)))
        return bool(self.choices.choice(2, [below, 1.0 - below]))


def enumerated(generate, target, draft):
    """P(output) of the example's `generate`, by the models' tables (V, V)."""
    found: dict[tuple, float] = defaultdict(float)
    choices, going = Choices(), True
    while going:
        choices.rewind()
        models = (lambda x: target[x[-1]]), (lambda x: draft[x[-1]])
        output, _ = generate(*models, [0], BUDGET, GAMMA, choices)
        found[tuple(map(int, output))] += choices.chance
        going = choices.next_run()
    return dict(found)


def tables():
    rng = np.random.default_rng(5)
    return (rng.dirichlet(np.ones(VOCAB), size=VOCAB) for _ in range(2))


def test_the_loop_has_the_distribution_of_algorithm_1():
    """All outputs of 4 tokens over 3, γ = 2: TV < 1e-12 among the example, the loop and p."""
    target, draft = tables()
    by_hand = enumerated(EXAMPLE["generate"], target, draft)
    with jax.enable_x64(True):
        method = Speculative(
            MarkovModel(jnp.log(jnp.asarray(target))),
            ModelDrafter(MarkovModel(jnp.log(jnp.asarray(draft)))),
            rules.Token(),
            constant(GAMMA),
            Sampling(1.0),
            jnp.int32([-1]),
            GAMMA,
        )
        loops = output_distribution(method, inputs_of([[0]]), BUDGET)
    exact = {
        output: np.prod([target[a, b] for a, b in zip((0, *output), output, strict=False)])
        for output in by_hand
    }
    assert total_variation(by_hand, exact) < 1e-12
    assert total_variation(loops, by_hand) < 1e-12


@pytest.mark.sweep
def test_resampling_from_the_target_would_show():
    """The enumeration sees the commonest fault: p and not the residual after a rejection."""
    source = (ROOT / "examples" / "algorithm1.py").read_text(encoding="utf-8")
    faulty: dict = {"__name__": "faulty"}
    exec(source.replace("if n < gamma:", "if False:"), faulty)
    target, draft = tables()
    found = enumerated(faulty["generate"], target, draft)
    assert total_variation(found, enumerated(EXAMPLE["generate"], target, draft)) > 0.01


def test_it_runs(capsys):
    EXAMPLE["main"](samples=300)
    tokens, distance = capsys.readouterr().out.splitlines()
    assert 2.0 < float(tokens.split()[0]) < 4.0
    assert float(distance.split()[-1]) < 0.2
