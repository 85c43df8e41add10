"""Whether a workdir belongs to a config."""

import functools
import pathlib
from collections.abc import Callable

from specjax.support import files, runs

# What runs write, and what holds weights: beside it lies the config.json of a run, or it is not
# the run's.
WRITTEN = (
    "checkpoint", "checkpoints", "curve.png", "drafter", "final.json", "head.npz", "metrics.jsonl",
    "model", "prefixes", "provenance.json", "report.md", "results.jsonl", "runs", "samples.jsonl",
    "start", "target", "tokenizer", "tokenizer.json", "*.bin", "*.gguf", "*.model", "*.msgpack",
    "*.safetensors",
)  # fmt: skip
MADE = ("final.json", "results.jsonl")  # by a run that began to work, beside its checkpoints


def claim(
    workdir: pathlib.Path,
    config,
    may_grow: tuple[str, ...] = (),
    free: tuple[str, ...] = (),
) -> Callable[[], None]:
    """Check that a workdir is a run's of these settings, or free, and return a function that
    writes config.json. Call it when everything else is checked.

    A start of the same kind that failed before it made anything holds nothing. Nor does a
    checkpoint that was being written when the run ended.

    Args:
      may_grow: fields that may be larger when a run is continued.
      free: fields that may be others then.

    Raises:
      ValueError: the workdir holds something else, or what was made with other settings.
    """
    file, wanted = workdir / "config.json", runs.settings(config)
    found = runs.read_mark(file)
    others = (found.keys() ^ wanted.keys()) - runs.LATER.keys() if found else ()
    there = sorted(path.name for pattern in WRITTEN for path in workdir.glob(pattern))
    if others or (there and not file.exists()):
        name = "config.json" if others else there[0]
        raise ValueError(
            f"--workdir={workdir} holds a {name} that is of no such run. Name another directory."
        )
    steps = (path for path in workdir.rglob("checkpoints/*") if path.name.isdecimal())
    if any(steps) or any(path for pattern in MADE for path in workdir.rglob(pattern)):
        grown = {name: wanted[name] for name in may_grow if found.get(name, 0) < wanted[name]}
        way_out = "Name another directory, or repeat those settings."
        was, now = (
            {name: value for name, value in fields.items() if name not in free}
            for fields in (found | grown, wanted)
        )
        runs.check_same(f"--workdir={workdir}", was, now, way_out)
    return functools.partial(files.write_json, file, wanted)
