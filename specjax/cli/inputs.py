"""Inputs of a command: the texts and chats of a file."""

import contextlib
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from specjax.checkpoints import finding, tokenizers
from specjax.decoding.texts import SURROGATE
from specjax.support import command_line, files
from specjax.support.ranges import shown

HELP = "A file of inputs, one a line; FILE.jsonl with objects; - for standard input."
"""What --input names, for --help."""
MAX_BYTES = 1 << 28  # of inputs
FOLLOWED = {
    "tools": list, "documents": list, "chat_template_kwargs": dict, "add_generation_prompt": bool,
    "continue_final_message": bool,
}  # fmt: skip
"""Fields of a chat that change its prompt, with their types."""
REFUSED = ("chat_template", "functions", "reasoning_effort")
"""Fields of a chat that change its prompt elsewhere."""
TURNS = 'Give {"question_id": 1, "category": "qa", "turns": ["…"]} on each line.'
WAY_OUT = (
    'Give {"input": "…"} or {"messages": [{"role": "user", "content": "…"}]} on each line, or end '
    "the name in .txt for lines of plain text."
)


def read_texts(path: str, target: str) -> list[str]:
    """Read the inputs of a file or of standard input.

    In a file *.jsonl each line is a JSON object with `input`, a text; `messages`, a chat, which the
    target's chat template turns into a prompt; or `turns`, as in Spec-Bench's question.jsonl, whose
    first turn becomes a prompt, by the template if there is one. Beside messages the fields of
    `FOLLOWED` are followed and those of `REFUSED` refused. Other fields are ignored. Elsewhere each
    line is a text.

    Args:
      path: a file, or - for standard input.
      target: the checkpoint that has the template; it is not read unless there are chats.

    Raises:
      FileNotFoundError: the target is needed, and is not found.
      ValueError: there is no such file, it is too large, a line is wrong, or the target cannot
        write a chat.
    """
    file = pathlib.Path(path)
    if path != "-" and not file.is_file():
        raise ValueError(f"--input={path}: no such file. Use - for standard input.")
    if path == "-" and sys.stdin is None:
        raise ValueError("--input=-: there is no standard input. Name a file.")
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"--input={path} has more than {MAX_BYTES:,} bytes. Split it.")
    if path.endswith(".jsonl"):
        return _read_objects(data, f"--input={path}", target)
    text = files.decode(data, f"--input={path}")
    # Not splitlines(): form feeds and such belong to a line.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _read_objects(data: bytes, name: str, target: str) -> list[str]:
    """Read the inputs of JSON lines; the tokenizer is loaded once, at the first chat."""

    @functools.cache
    def tokenizer() -> Any:
        command_line.say(f"loading the chat template of {target}")
        return tokenizers.load(finding.locate(target))

    @functools.cache
    def writer_of_turns() -> Callable[[str], str]:
        return turn_writer(tokenizer(), target)

    texts = []
    for place, row in files.json_objects(data, name, WAY_OUT):
        text = _checked(row, place)
        if has_turns(row):
            text = writer_of_turns()(text)
        elif "messages" in row:
            writer = tokenizer()
            try:
                text = tokenizers.chat_prompt(writer, row["messages"], target, **_fields(row))
            except ValueError as error:
                raise ValueError(f"{place}: {error} Or give the prompt itself as input.") from error
        if wrong := SURROGATE.search(text):
            raise ValueError(
                f"{place}: {wrong[0]!r} is half a character, which no tokenizer reads. Write the "
                "character itself, or both halves."
            )
        texts.append(text)
    return texts


def has_turns(row: Mapping[str, Any]) -> bool:
    """Whether an object is a question in turns; beside an input or a chat `turns` is ignored."""
    return "turns" in row and "input" not in row and "messages" not in row


def turns_of(row: Mapping[str, Any], place: str, way_out: str = TURNS) -> tuple[str, ...]:
    """Check and return a row's turns; ValueError that begins with `place` if they are no texts."""
    turns = row.get("turns")
    if turns is None:
        raise ValueError(f"{place}: no turns. {way_out}")
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{place}: turns={shown(turns)} should be a list of one text or more. {way_out}"
        )
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(
                f"{place}: turns[{index}]={shown(turn)} should be a text that is not blank. "
                f"{way_out}"
            )
        if re.search("[\ud800-\udfff]", turn):
            raise ValueError(
                f"{place}: turns[{index}] holds half a character, which no tokenizer reads. Write "
                "the character itself, or both halves."
            )
    return tuple(turns)


def _checked(row: Mapping[str, Any], place: str) -> str:
    """Check an object's fields, and return its input or first turn; empty if it has messages."""
    given = [field for field in ("input", "messages") if field in row]
    if has_turns(row):
        return turns_of(row, place)[0]
    if len(given) != 1:
        problem = "both input and messages" if given else "neither input nor messages nor turns"
        raise ValueError(f"{place}: {problem}. {WAY_OUT}")
    if given == ["input"]:
        if not isinstance(row["input"], str):
            raise ValueError(f"{place}: input={shown(row['input'])} should be a text. {WAY_OUT}")
        return row["input"]
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place}: messages={shown(messages)} should be a list of one message or more. "
            f"{WAY_OUT}"
        )
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        calls = fields.get("tool_calls") and fields.get("content") is None
        texts = ("role",) if calls else ("role", "content")
        if not all(isinstance(fields.get(field), str) for field in texts):
            raise ValueError(
                f"{place}: messages[{index}]={shown(message)} should be an object whose role and "
                f"content are texts. {WAY_OUT}"
            )
    return ""


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields beside messages that change the prompt; ValueError if one cannot be followed."""
    given = {name: value for name, value in row.items() if value is not None}
    if refused := [name for name in REFUSED if name in given]:
        raise ValueError(
            f"{refused[0]} is not followed: what the template reads stands in tools and "
            "chat_template_kwargs."
        )
    found = {name: given[name] for name in FOLLOWED if name in given}
    for name, value in found.items():
        if not isinstance(value, FOLLOWED[name]):
            kind = {list: "a list", dict: "an object", bool: "true or false"}[FOLLOWED[name]]
            raise ValueError(f"{name}={shown(value)} should be {kind}.")
    return found.pop("chat_template_kwargs", {}) | found


def turn_writer(tokenizer: Any, target: str) -> Callable[[str], str]:
    """Return a function that writes a user's turn as a prompt; say if these are raw texts."""
    if not tokenizers.has_template(tokenizer):
        command_line.say(tokenizers.raw_note(target))
    return lambda turn: tokenizers.prompt_of(tokenizer, [{"role": "user", "content": turn}], target)
