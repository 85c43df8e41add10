"""Write the pairs of a config's task and split, a JSON line each.

python -m experiments.tasks --config=configs/embedded.py --output=runs/parse.jsonl
specjax select --config=configs/embedded.py --input=runs/parse.jsonl
"""

import dataclasses
import pathlib

from absl import flags
from ml_collections import config_flags

from experiments.tasks.config import load_examples
from specjax.support import command_line, files


def main(_) -> None:
    output = pathlib.Path(flags.FLAGS.output)
    files.check_regular(output, f"--output={output}")
    command_line.make_workdir(str(output.parent), flag="output")
    pairs = load_examples(flags.FLAGS.config)
    files.write_rows(output, [dataclasses.asdict(pair) for pair in pairs])
    print(f"{len(pairs):,} pairs are in {output}.")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Task, split and data_dir.", lock_config=True)
    flags.DEFINE_string("output", None, "A file for the pairs.")
    flags.mark_flags_as_required(["config", "output"])
    command_line.run(main, __doc__)
