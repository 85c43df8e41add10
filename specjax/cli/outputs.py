"""The files that `specjax decode` writes: rows, a log of rounds, and how they were made."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax import checkpoints, drafters
from specjax.cli.pairs import with_draft
from specjax.measure import provenance
from specjax.support import command_line, files, processes, runs
from specjax.support.processes import ALONE, Group


class Output(NamedTuple):
    """Rows that are written as they come, by number."""

    missing: Sequence[int]  # numbers of the rows that are still to be made
    append: Callable[[int, dict[str, Any]], None]
    merge: Callable[[], int] = lambda: 0  # ends the output; how many rows others have yet to make


def places(args, config) -> list[tuple[pathlib.Path, str]]:
    """List the files that are written, each with its flag."""
    output = "" if args.output == "-" else args.output
    named = {"output": output, "config.rounds_file": config.rounds_file}
    return [(pathlib.Path(name), flag) for flag, name in named.items() if name]


def check_place(file: pathlib.Path, flag: str, source: str) -> None:
    """Raise ValueError if a file cannot be written, is no regular file, or is the input."""
    files.check_regular(file, f"--{flag}={file}")
    command_line.make_workdir(str(file.parent), flag=flag)
    for written in (file, mark_of(file)):
        command_line.check_apart(written, source, flag=flag)


def mark_of(output: pathlib.Path) -> pathlib.Path:
    """Path of the file that records how an output was made."""
    return output.with_name(f".{output.name}.run.json")


def began_with(config, texts: list[str]) -> dict[str, Any]:
    """The origin of an output: settings, a hash of the input, fingerprints of the models."""
    models = {"target": checkpoints.fingerprint(config.target)}
    if with_draft(config):
        models["draft"] = drafters.fingerprint(config.draft)
    return {
        "settings": runs.settings(config), "input": runs.fingerprint(texts), "models": models,
    }  # fmt: skip


def check_resumes(args, config, texts: list[str]) -> None:
    """Raise ValueError if the output holds rows of other settings, inputs or models."""
    file = pathlib.Path(args.output)
    if args.output == "-" or args.overwrite or not (file.exists() or processes.parts(file)):
        return
    way_out = "Name another file, or pass --overwrite to replace it."
    found = runs.read_mark(mark_of(file))
    if "settings" not in found:
        raise ValueError(
            f"--output={args.output} exists and is no output of this command. {way_out}"
        )
    wanted = began_with(config, texts)
    kept = {name: found.get(name) for name in wanted}
    runs.check_same(f"--output={args.output}", kept, wanted, way_out)


def open_output(group: Group, together: bool, args, config, texts: list[str]) -> Output:
    """Open the output's rows, which may hold those of an earlier run of the same command.

    A file beside the output says which command it belongs to.

    Args:
      together: whether all processes decode each row together, while process 0 writes.
    """
    file, total = pathlib.Path(args.output), len(texts) * config.samples
    if args.output == "-":
        return Output(range(total), _print)
    if together and group.index:
        return Output(range(len(files.read_rows(file)), total), lambda *_: None)
    if group.count > 1 and not together:
        with processes.beginning(file):
            check_resumes(args, config, texts)
            write_mark(file, config, texts)
            return _shared(group, file, total)
    if args.overwrite:
        for old in (file, mark_of(file), *processes.parts(file)):
            files.remove(old)
    write_mark(file, config, texts)
    if processes.parts(file):
        return _shared(ALONE, file, total)
    rows = files.Rows(file)
    return Output(range(len(rows.done), total), lambda _, row: rows.append(row))


def _print(_: int, row: dict[str, Any]) -> None:
    print(json.dumps(row, ensure_ascii=False), flush=True)


def _shared(group: Group, file: pathlib.Path, total: int) -> Output:
    rows = processes.SharedRows(group, file, total)
    return Output(rows.missing, rows.append, rows.merge)


def write_mark(file: pathlib.Path, config, texts: list[str]) -> None:
    """Record beside an output how it is made."""
    commits = [*runs.read_mark(mark_of(file)).get("commits", []), provenance.commit()]
    wanted = began_with(config, texts) | {"commits": list(dict.fromkeys(commits))}
    files.write_json(mark_of(file), wanted)


def open_log(config, args, done: int) -> files.Rows | None:
    """Open the file of rounds, with those of existing outputs; None without a rounds_file."""
    if not config.rounds_file:
        return None
    file = pathlib.Path(config.rounds_file)
    if not done and file.exists() and file.stat().st_size and not args.overwrite:
        raise ValueError(
            f"rounds_file={config.rounds_file} exists. Name another file, or give --overwrite to "
            "lose it."
        )
    log = files.Rows(file)
    log.keep(lambda line: line["input"] * config.samples + line["sample"] < done)
    return log
