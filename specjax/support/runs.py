"""The run of a file of results: the settings, models and data that made it."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from specjax.support import files
from specjax.support.command_line import ROOT

# Fields that older results lack, with the values that change nothing.
LATER = {
    "weights": "", "cache": "", "policy": "", "rule": "", "compare": False, "filters": "",
    "carry": False, "mesh": "", "replicate_draft": True, "check_tokens": True,
    "exits": (), "exit_weight": 1.0, "layer_dropout": 0.0, "skip": 0, "widths": (),
    "divergence": "forward_kl", "prefixes": "data", "prefix_temperature": 1.0,
    "prefix_inputs": 512, "refresh_every": 100,
    "start": "", "truncate": False, "optimizer": "adam", "metric": "", "accumulate": 1,
    "dropout": 0.0, "remat": False, "compute_dtype": "float32", "save_dtype": "float16",
}  # fmt: skip


PLACES = ("files",)  # fields that say where models lie; their fingerprints say what they are


def settings(config) -> dict[str, Any]:
    """Return a config for `fingerprint`, as JSON.

    Results without a newer field still belong to it, and so do those of another checkout:
    directories below it are named by their path in it.
    """
    found = config.to_dict()
    kept = {k: v for k, v in found.items() if k not in PLACES and (k not in LATER or v != LATER[k])}
    return json.loads(json.dumps(kept, default=str).replace(f"{ROOT}/", ""))


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-able values, to check that a file belongs to this run."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Each field whose value differs, as "gamma was 7 and is 5"; mappings field by field."""
    changes = []
    for name in sorted({*found, *wanted}):
        was, now = found.get(name), wanted.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += [f"{name}, {difference}" for difference in differences(was, now)]
        elif was != now:
            changes.append(f"{name} was {was!r} and is {now!r}")
    return changes


def read_mark(mark: pathlib.Path) -> dict[str, Any]:
    """Read the values that a mark's run began with; empty if there is no mark.

    Raises:
      ValueError: the mark is damaged.
    """
    try:
        return files.read_json(mark) if mark.exists() else {}
    except ValueError:
        raise _damaged(mark) from None


def commits(mark: pathlib.Path) -> list[str]:
    """Read the commits that have written a mark's run; ValueError if the mark is damaged."""
    found = read_mark(mark).get("commits", [])
    if isinstance(found, list) and all(isinstance(commit, str) for commit in found):
        return found
    raise _damaged(mark)


def _damaged(mark: pathlib.Path) -> ValueError:
    return ValueError(
        f"{mark} is damaged, so it does not say which run the files beside it belong to. Name "
        "another place, or delete it together with them."
    )


def check_same(
    place: Any, found: Mapping[str, Any], wanted: Mapping[str, Any], way_out: str
) -> None:
    """Raise ValueError if a run began with other values, `found`, than those `wanted` now.

    Args:
      place: the file or directory of the run, for the error.
      way_out: the remedy, for the error.
    """
    if differing := differences(found, wanted):
        raise ValueError(
            f"{place} belongs to a run that began with other settings, models or data: "
            f"{'; '.join(differing)}. {way_out}"
        )


MARK = "run.json"  # beside results.jsonl: settings, models and data of its rows
WAY_OUT = "Name another --workdir, or delete the file."


def keep_settings(results: files.Rows, settings: Mapping[str, Any], mine: str, what: str) -> None:
    """Note the settings of a run beside its rows; ValueError if these were made with others.

    Args:
      mine: a hash of the settings, the field "run" of each row.
      what: description of rows with another hash, for the error.
    """
    mark = results.path.with_name(MARK)
    if any(row.get("run") != mine for row in results.done):
        known = read_mark(mark).get("settings", {})
        other = "; ".join(differences(known, settings)) if known else ""
        raise ValueError(f"{results.path} holds {what}{': ' * bool(other)}{other}. {WAY_OUT}")
    if not results.done:
        files.write_json(mark, {"settings": settings})


def keep(results: files.Rows, fields: Mapping[str, Any]) -> None:
    """Note models or data beside the rows that they make.

    Args:
      fields: fingerprints by name.

    Raises:
      ValueError: rows were made with others.
    """
    mark = results.path.with_name(MARK)
    found = read_mark(mark)
    if results.done:
        check_same(results.path, {**fields, **found}, {**found, **fields}, WAY_OUT)
    files.write_json(mark, {**found, **fields})
