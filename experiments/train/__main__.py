"""Train a model on a task, or a draft on its target's probabilities.

    python -m experiments.train --config=configs/train.py:target --workdir=runs/target

An interrupted run goes on from its latest checkpoint with the same command, and a finished one with
more steps; other settings need another workdir. The workdir holds the
loss curve, the metrics, a few decoded samples and, at the end, model/: a Hugging Face directory.
configs/train.py:head trains no model but the acceptance head of a draft, head.npz, and
configs/train.py:eagle-parse a drafter that belongs to one target, drafter/; medusa2-parse trains
that target along, and writes target/ too. configs/paper_train.py fine-tunes T5 v1.1.
Fields of the config can be set one by one: --config.steps=100 --config.model.d_model=64.

--config.mesh=data=4,model=2 trains one model on eight devices. Devices of several processes need
the same command in each, with a workdir that all share, --coordinator=HOST:PORT --processes=N
--process=I, or --coordinator=auto on a cluster that jax knows.
"""

import contextlib
import io
import json
import pathlib

from absl import flags
from ml_collections import config_flags

from experiments.train import train, train_drafter, train_head
from experiments.train.config import TrainConfig
from experiments.train.loop import fields_of
from experiments.train.workdirs import claim
from specjax.cli import hosts
from specjax.support import command_line


def main(_) -> None:
    args = flags.FLAGS
    why = "processes that train one model exchange gradients"
    with hosts.on_one_mesh(args, args.config, why) as group:
        if not group.index:
            run(args.config, args.workdir)
            return
        with contextlib.redirect_stderr(io.StringIO()):  # process 0 shows what there is to see
            train.run(TrainConfig(**fields_of(args.config)), pathlib.Path(args.workdir))


def run(config, directory: str) -> None:
    """Train what the config names, or go on, and print what came of it."""
    workdir = command_line.make_workdir(directory)
    if "draft" in config:
        head = train_head.HeadConfig(**fields_of(config))
        print(json.dumps(train_head.run(head, workdir, claim(workdir, config)), indent=2))
        print(f"The head is {workdir / 'head.npz'}; policies look for it beside the draft.")
        return
    if "drafter" in config:
        chosen = train_drafter.DrafterConfig(**fields_of(config))
        mark = claim(workdir, config, may_grow=("steps",))
        print(json.dumps(train_drafter.run(chosen, workdir, mark), indent=2))
        made = workdir / "target"
        target = made if made.is_dir() else chosen.target
        print(f"The drafter is {workdir / 'drafter'}: name it as the draft of {target}.")
        return
    settings = TrainConfig(**fields_of(config))
    mark = claim(workdir, config, may_grow=("steps",), free=("mesh",))
    print(json.dumps(train.run(settings, workdir, mark), indent=2))
    print(f"The model is in {workdir / 'model'}, its loss curve in {workdir / 'curve.png'}.")


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", None, "What to train: FILE.py, or FILE.py:MODEL.", lock_config=True
    )
    flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.")
    hosts.define_flags("train together")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
