"""Commands that measure: one contract, as a table (`check_command`)."""

import functools

import pytest

import command_line
from check_command import check_command
from experiments import tasks
from pairs import TEXTS
from tiny_models import slow

SMALL = {"max_new_tokens": 8, "batch_size": 4, "temperatures": (0.0,)}
# Of each: the config, and the fields that shrink it.
COMMANDS: dict[str, tuple[str, dict]] = {
    "experiments.adaptive": (
        "adaptive.get_config()",
        SMALL | {
            "static": (1,), "gamma_max": 2, "widths": (2,), "timed_inputs": 2, "alpha_inputs": 2,
            "policies": {"svip": {"threshold": 0.1}}, "repeats": 2, "cost_repeats": 1,
            "cost_error": 1e6,
        },
    ),
    "experiments.budgets": (
        "budgets.get_config('parse')",
        SMALL | {
            "outputs": 8, "alpha_inputs": 8, "gamma_max": 2, "static": (1, 2), "draws": 2,
            "thresholds": (0.5,), "batch_sizes": (2,), "accelerator_batch_sizes": (4,),
            "knees": (64,), "timed_inputs": 2, "cost_repeats": 1, "repeats": 1,
        },
    ),
    "experiments.reproduce": (
        "embedded.get_config('full')",
        SMALL | {"tables": ("alpha",), "ngrams": ("bigram",), "alpha_inputs": 3},
    ),
    "experiments.serve": (
        "serve.get_config()",
        SMALL | {
            "timed_inputs": 8, "repeats": 1, "gamma": 2, "admits": (1,), "lengths": ("own",),
            "shortest": 2,
        },
    ),
    "experiments.trace": (
        "embedded.get_config()",
        SMALL | {"timed_ngrams": (), "timed_inputs": 2, "alpha_inputs": 2, "repeats": 1},
    ),
}  # fmt: skip
FLAGS = {"experiments.trace": ("--gamma_max=2", "--inputs=2")}
QUICK = ("experiments.reproduce", "experiments.trace")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in COMMANDS])
def test_a_command_keeps_its_promises(name, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    examples = [tasks.Example(text, text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    make, fields = COMMANDS[name]
    file, work = tmp_path / "small.py", tmp_path / "work"
    models = {"target": pair.target.name, "draft": pair.draft.name, "drafts": (pair.draft.name,)}
    lines = [f"    config.{field} = {value!r}" for field, value in (models | fields).items()]
    file.write_text(
        f"from configs import {make.partition('.')[0]}\n\n\ndef get_config():\n"
        f"    config = {make}\n" + "\n".join(lines) + "\n    return config\n"
    )
    run = functools.partial(
        command_line.run, monkeypatch, capsys, name,
        f"--config={file}", f"--workdir={work}", *FLAGS.get(name, ()),
    )  # fmt: skip
    check_command(run, work, "--config.seed=1")
