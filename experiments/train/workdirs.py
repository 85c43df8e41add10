"""Whether a workdir belongs to a config."""

import pathlib

from specjax.support import files, runs

MADE = ("checkpoints/[0-9]*", "final.json", "results.jsonl")  # by a run that began to work


def claim(workdir: pathlib.Path, config, may_grow: tuple[str, ...] = ()) -> None:
    """Write config.json; ValueError if the workdir holds what was made with other settings.

    A start that failed before it made anything holds nothing.

    Args:
      may_grow: fields that may be larger when a run is continued.
    """
    file, wanted = workdir / "config.json", runs.settings(config)
    if any(path for pattern in MADE for path in workdir.rglob(pattern)):
        found = runs.read_mark(file) or wanted
        grown = {name: wanted[name] for name in may_grow if found.get(name, 0) < wanted[name]}
        way_out = "Name another directory, or repeat those settings."
        runs.check_same(f"--workdir={workdir}", found | grown, wanted, way_out)
    files.write_json(file, wanted)
