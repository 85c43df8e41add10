"""Learn a policy on one half of a trace, and judge it on the other, and on kinds of text that it
never saw.

    python -m experiments.adaptive.offline --trace=docs/results/mixed --draft=0.5B --c=0.3 \\
        --verify=1,1.1,1.15,1.2,1.3,1.36,1.4,1.45,1.5

The costs are those of `experiments.replay`. Prints the speed over the best constant γ that is
chosen on other outputs, beside the oracle and policies of --policies on the same outputs.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import command
from experiments.adaptive.policies import path
from experiments.adaptive.policies.learned import fit
from experiments.replay import __main__ as replaying
from experiments.replay.evaluation import evaluate
from specjax.measure import costing, report
from specjax.policies.loading import parse_with_costs
from specjax.replay.rollouts import Rollouts
from specjax.support import command_line, named


def main(_) -> None:
    args = flags.FLAGS
    row, found, _ = replaying.of_trace(pathlib.Path(args.trace), args.draft, args.temperature)
    kinds = [kind for kind, count in row["kinds"].items() for _ in range(count)]
    known = replaying.given(args, found.gamma_max)
    table, draws = known[costing.POLICIES], args.draws if args.temperature else 1
    chosen = {text: parse_with_costs(path(text), table) for text in named.split(args.policies)}
    key, lines = jax.random.key(args.seed), []
    for title, fitted, judged in splits(kinds):
        before = evaluate({}, part(found, fitted), known, key, draws)
        rate = max(line["speedup"] for line in before if line["policy"] != "oracle")
        policies = chosen | {"learned": fit(part(found, fitted), table, rate)}
        on = [kinds[i] for i in judged]
        after = evaluate(policies, part(found, judged), known, key, draws, kinds=on)
        names = "oracle", *policies
        lines.append({"judged": title} | {
            line["policy"]: line["of_chosen"] for line in after if line["policy"] in names
        })  # fmt: skip
    columns: list[report.Column] = [("judged on", lambda line: line["judged"])]
    columns += [
        (name, lambda line, name=name: replaying.interval(line[name]))
        for name in ("oracle", *chosen, "learned")
    ]
    report.show(command.console(), columns, lines, "Over the γ that is chosen on other outputs")


def splits(kinds: Sequence[str]) -> list[tuple[str, list[int], list[int]]]:
    """What is judged, on which outputs the policy is fitted, and on which it is judged."""
    half = [i for i in range(len(kinds)) if i % 4 < 2]
    rest = [i for i in range(len(kinds)) if i % 4 >= 2]
    found = [("the other half", half, rest)]
    for kind in dict.fromkeys(kinds):
        apart = [i for i, other in enumerate(kinds) if other == kind]
        found.append((f"{kind}, unseen", [i for i in range(len(kinds)) if i not in apart], apart))
    return found


def part(found: Rollouts, outputs: Sequence[int]) -> Rollouts:
    """Some of the outputs."""
    chosen: Any = np.array(outputs)
    return jax.tree.map(lambda x: x[chosen], found)


if __name__ == "__main__":
    replaying.define_flags()
    command_line.run(main, __doc__)
