"""Train a model on a task, or a draft on its target's probabilities.

    python -m experiments.train --config=configs/train.py:target --workdir=runs/target

An interrupted run goes on from its latest checkpoint with the same command. The workdir holds the
loss curve, the metrics, a few decoded samples and, at the end, model/: a Hugging Face directory.
Fields of the config can be set one by one: --config.steps=100 --config.model.d_model=64.
"""

import json
import pathlib

from absl import app, flags, logging
from ml_collections import config_flags

from specjax import files, train

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    "configs/train.py:target",
    "What to train: FILE.py, or FILE.py:MODEL.",
    lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run; made if it is not there.", required=True
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Flags only, as --config=FILE; not understood: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # orbax reports every file otherwise
    workdir = pathlib.Path(_WORKDIR.value)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        config = train.from_config_dict(_CONFIG.value)
        files.write_json(workdir / "config.json", _CONFIG.value.to_dict())
        print(json.dumps(train.run(config, workdir), indent=2))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        raise SystemExit(f"error: cannot write to the workdir {workdir}: {error}") from None
    print(f"The model is in {workdir / 'model'}, its loss curve in {workdir / 'curve.png'}.")


if __name__ == "__main__":
    app.run(main)
