"""What every command promises that measures something and writes rows of it."""

import json
from collections.abc import Callable
from pathlib import Path

from command_line import Outcome
from specjax.measure import provenance
from specjax.support import files

FACTS = {*provenance.NEEDED, *provenance.environment(), "command"}


def check_command(
    run: Callable[..., Outcome], work: Path, *other: str, file: str = "results.jsonl"
) -> list[dict]:
    """Run a command on small models and try its promises; return its rows.

    - Its rows say where they are from, and so does its report.
    - The same command measures nothing again.
    - Cut off within its last row, it goes on: the rows of complete cells stay, the others come
      again, in the same order.
    - With another config it is refused, in one line, and the rows stay.
    - While another process writes to the workdir, it is refused before it loads anything.

    Args:
      run: runs the command in `work`, with more flags.
      other: flags that change what is measured; none: the command has no such flag.
      file: of its rows.
    """
    outcome = run()
    assert outcome.status == 0, outcome.stderr
    path = work / file
    whole = path.read_bytes()
    rows = files.read_rows(path)
    assert rows
    for row in rows:
        assert [name for name in FACTS if row.get(name) is None] == []
    if (work / "report.md").exists():
        assert f"commit {rows[0]['commit']}; " in (work / "report.md").read_text()
    again = run()
    assert again.status == 0, again.stderr
    assert path.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    assert run().status == 0
    found = files.read_rows(path)
    assert [sorted(row) for row in found] == [sorted(row) for row in rows]
    assert [named(row) for row in found] == [named(row) for row in rows]
    if other:
        kept = path.read_bytes()
        refused(run(*other), "rows of another", str(path))
        assert path.read_bytes() == kept
    with files.only_writer(work, within=True):
        busy = run()
    refused(busy, f"{work} is being written by another process")
    assert busy.progress == []
    return rows


def named(row: dict) -> str:
    """The words of a row: what was measured, and not what came of it."""
    return json.dumps({name: value for name, value in row.items() if isinstance(value, str)})


def refused(outcome: Outcome, *words: str) -> None:
    """Status 1, and one line that has all the words."""
    assert (outcome.status, outcome.stdout) == (1, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
