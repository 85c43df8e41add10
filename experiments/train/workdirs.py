"""Whether a workdir belongs to a config."""

import pathlib

from specjax.support import files, runs

MADE = ("final.json", "results.jsonl")  # by a run that began to work, beside its checkpoints


def claim(
    workdir: pathlib.Path,
    config,
    may_grow: tuple[str, ...] = (),
    free: tuple[str, ...] = (),
) -> None:
    """Write config.json; ValueError if the workdir holds what was made with other settings.

    A start that failed before it made anything holds nothing. Nor does a checkpoint that was being
    written when the run ended.

    Args:
      may_grow: fields that may be larger when a run is continued.
      free: fields that may be others then.
    """
    file, wanted = workdir / "config.json", runs.settings(config)
    steps = (path for path in workdir.rglob("checkpoints/*") if path.name.isdecimal())
    if any(steps) or any(path for pattern in MADE for path in workdir.rglob(pattern)):
        found = runs.read_mark(file) or wanted
        grown = {name: wanted[name] for name in may_grow if found.get(name, 0) < wanted[name]}
        way_out = "Name another directory, or repeat those settings."
        was, now = (
            {name: value for name, value in fields.items() if name not in free}
            for fields in (found | grown, wanted)
        )
        runs.check_same(f"--workdir={workdir}", was, now, way_out)
    files.write_json(file, wanted)
