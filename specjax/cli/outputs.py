"""The files that `specjax decode` writes: rows, a log of rounds, and how they were made."""

import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax import checkpoints, drafters
from specjax.checkpoints import weights
from specjax.cli.lines import Lines
from specjax.cli.pairs import with_draft
from specjax.measure import provenance
from specjax.support import command_line, files, processes, runs
from specjax.support.processes import ALONE, Group
from specjax.support.ranges import shown


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


def check_place(file: pathlib.Path, flag: str, args, target: str, *drafts: str) -> None:
    """Raise ValueError if a file cannot be written, is no regular file, or is one that is read."""
    if not file.name:
        raise ValueError(f"--{flag}={file} names no file: name one.")
    files.check_regular(file, f"--{flag}={file}")
    files.check_regular(mark_of(file))
    command_line.make_workdir(str(file.parent), flag=flag)
    read = ("input", args.input or "-"), ("settings", args.settings)
    models = ("config.target", target), *(("config.draft", name) for name in drafts)
    for of, source in (*read, *models):
        quoted = re.findall(r"['\"](.*?)['\"]", source) if of == "config.draft" else []
        for place in filter(None, (source, *quoted)):
            if of != flag:
                command_line.check_apart(file, place, flag, of)
                command_line.check_apart(mark_of(file), place, flag, of)
            if (of, source) in models and weights.holds(pathlib.Path(place), file):
                raise ValueError(
                    f"--{flag} would write to {file}, which is a file of --{of}={place}: name "
                    "another."
                )


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


def check_resumes(args, config, texts: list[str], lines: Lines) -> None:
    """Raise ValueError if the output holds rows of other settings, inputs or models, or other rows.

    Args:
      lines: makes the lines of the output, whose labels its rows have to have.
    """
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
    for number, row in processes.rows_of(file).items():
        due = lines.label(number)
        held = {name: row.get(name) for name in lines.label(0)}
        if held != due:
            total = len(texts) * config.samples
            what = f"{shown(due)} is due" if due else f"there are only {total} rows"
            raise ValueError(
                f"--output={args.output} was edited: row {number + 1} has {shown(held)}, where "
                f"{what}. Delete it and the rows behind it, which the same command makes again. Or "
                f"{way_out[0].lower()}{way_out[1:]}"
            )


def open_output(
    group: Group, together: bool, args, config, texts: list[str], lines: Lines
) -> Output:
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
            check_resumes(args, config, texts, lines)
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
    commits = [*runs.commits(mark_of(file)), provenance.commit()]
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
    before: tuple[int, int] = -1, 0
    for number, line in enumerate(log.done, start=1):
        label: list[Any] = [line.get(name) for name in ("input", "sample", "round")]
        if all(type(value) is int for value in label):
            at = label[0] * config.samples + label[1], label[2]
            if at == (before[0], before[1] + 1) or (at[0] > before[0] and not at[1]):
                before = at
                continue
        raise ValueError(
            f"rounds_file={config.rounds_file} was edited: line {number} has input, sample and "
            f"round {shown(label)}, which do not follow. Name another file and another --output, "
            "or give --overwrite to make both again."
        )
    log.keep(lambda line: line["input"] * config.samples + line["sample"] < done)
    return log
