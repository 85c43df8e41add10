"""Train a model on a task, or a draft on its target's probabilities.

    python -m experiments.train --config=configs/train.py:target --workdir=runs/target

An interrupted run goes on from its latest checkpoint with the same command, and a finished one with
more steps; other settings need another workdir. The workdir holds the
loss curve, the metrics, a few decoded samples and, at the end, model/: a Hugging Face directory.
configs/train.py:head trains no model but the acceptance head of a draft, head.npz, and
configs/train.py:eagle-parse a drafter that belongs to one target, drafter/; medusa2-parse trains
that target along, and writes target/ too.
Fields of the config can be set one by one: --config.steps=100 --config.model.d_model=64.
"""

import json

from absl import flags
from ml_collections import config_flags

from experiments.train import train, train_drafter, train_head
from experiments.train.loop import fields_of
from experiments.train.workdirs import claim
from specjax.support import command_line


def main(_) -> None:
    config = flags.FLAGS.config
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    if "draft" in config:
        head = train_head.HeadConfig(**fields_of(config))
        claim(workdir, config)
        print(json.dumps(train_head.run(head, workdir), indent=2))
        print(f"The head is {workdir / 'head.npz'}; policies look for it beside the draft.")
        return
    if "drafter" in config:
        chosen = train_drafter.DrafterConfig(**fields_of(config))
        claim(workdir, config, may_grow=("steps",))
        print(json.dumps(train_drafter.run(chosen, workdir), indent=2))
        made = workdir / "target"
        target = made if made.is_dir() else chosen.target
        print(f"The drafter is {workdir / 'drafter'}: name it as the draft of {target}.")
        return
    settings = train.TrainConfig(**fields_of(config))
    claim(workdir, config, may_grow=("steps",))
    print(json.dumps(train.run(settings, workdir), indent=2))
    print(f"The model is in {workdir / 'model'}, its loss curve in {workdir / 'curve.png'}.")


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", None, "What to train: FILE.py, or FILE.py:MODEL.", lock_config=True
    )
    flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
