"""What a drafter saves that reads its target's encoding: whole calls with and without.

    python -m experiments.reproduce.sharing --config=configs/embedded.py \\
        --draft="early_exit(layers=3)" --workdir=runs/sharing

Plain decoding and both speculative loops decode the same inputs in turns, at T = 0, for each
--draft and each --batch. Apart, the drafter runs the target's encoder again, and holds keys and
values of the source of its own. Writes results.jsonl to the workdir. A run that was cut off goes on
where it was. The two batches of one draft take about two minutes on 2 cores.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments.reproduce import speedups, study
from experiments.reproduce.study import Study, identity, open_results
from specjax.drafters import sharing
from specjax.loop import Method
from specjax.measure import timing
from specjax.measure.timing import PLAIN, quartiles
from specjax.models.language_model import LanguageModel
from specjax.models.memory import gigabytes, nbytes
from specjax.pytrees import pytree
from specjax.support import command_line

APART, SHARED = "apart", "shared"


@pytree
class Apart(LanguageModel):
    """A model whose encoding no drafter reads."""

    def encoding(self, inputs: Any) -> None:
        """None: each drafter runs the encoder."""


def apart(model: Any) -> Any:
    """A target, whole or as a drafter sees it, whose encoding no drafter reads."""
    return Apart(**vars(model))


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    on = Study(config, open_results(command_line.make_workdir(args.workdir), config))
    cells = [{"draft": draft, "batch": batch} for draft in args.draft for batch in args.batch]
    for cell in cells:
        if not study.find(on.results.done, cell):
            found = measure(on, **cell, gamma=args.gamma)
            on.results.append({**cell, **found, **identity(on)})
    for row in on.results.done:
        print(f"{row['draft']}, batch {row['batch']}, γ = {row['gamma']}")
        for name in (PLAIN, APART, SHARED):
            call, start = row["call_ms"][name], row["start_ms"][name]
            held = gigabytes(row["context_bytes"][name])
            print(f"  {name}: {call:.2f} ms a call, {start:.2f} to start it, contexts of {held}")
        saved, low, high = (100 * row[f"saved{end}"] for end in ("", "_low", "_high"))
        same = "the same tokens" if row["identical"] else "OTHER TOKENS"
        print(f"  sharing saves {saved:.1f}% of a call ({low:.1f} to {high:.1f}); {same}")


def measure(on: Study, draft: str, batch: int, gamma: int) -> dict[str, Any]:
    """Milliseconds of a call and of its start, and bytes of its contexts, by way of decoding.

    A call is a batch, encoder included; medians over repeats. `saved` is the share of the call that
    encodes again, with its quartiles.
    """
    config = on.config
    method = speedups.method(on, draft, 0.0, gamma)
    if not sharing.shares(method.drafter):
        raise ValueError(f"--draft={draft!r} shares no encoder: name one that does.")
    methods: dict[str, Method] = {
        PLAIN: speedups.plain_method(on, 0.0),
        APART: dataclasses.replace(method, target=apart(method.target)),
        SHARED: method,
    }
    texts, key = speedups.timed_texts(on), jax.random.key(config.seed)
    decoded: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "key": key}
    how: dict[str, Any] = {"repeats": config.repeats, "batch_size": batch, "say": command_line.say}
    found = timing.side_by_side(
        methods, on.target, texts, names=(config.target, draft), **how, **decoded
    )
    first = range(min(batch, len(texts)))
    row: dict[str, Any] = {"call_ms": {}, "start_ms": {}, "context_bytes": {}}
    for name, one in methods.items():
        whole, loop = found.whole[name].mean(axis=1), found.decode[name].mean(axis=1)
        row["call_ms"][name] = 1e3 * float(np.median(whole))
        row["start_ms"][name] = 1e3 * float(np.median(whole - loop))
        contexts, _ = timing.start(one, on.target, texts, first, **decoded, rows=batch)
        row["context_bytes"][name] = nbytes(contexts)
    ratio = found.whole[SHARED].sum(axis=1) / found.whole[APART].sum(axis=1)
    return {
        **row,
        **quartiles("saved", 1 - ratio),
        "gamma": gamma,
        "temperature": 0.0,
        "identical": found.identical(APART) and found.identical(SHARED),
        "timed_inputs": len(texts),
        "repeats": config.repeats,
    }


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Target and inputs.", lock_config=True)
    flags.DEFINE_multi_string("draft", None, "A draft that shares its target's encoder.")
    flags.DEFINE_multi_integer("batch", [1, 8], "Inputs decoded at once.")
    flags.DEFINE_integer("gamma", 5, "Tokens that a round drafts.")
    flags.DEFINE_string("workdir", None, "Directory for results.")
    flags.mark_flags_as_required(["config", "draft", "workdir"])
    command_line.run(main, __doc__)
