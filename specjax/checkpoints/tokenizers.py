"""Loads a checkpoint's tokenizer, and reads ids and limits of texts from its files."""

import base64
import contextlib
import fnmatch
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoints import chat_templates
from specjax.checkpoints.formats import gguf_files, gguf_tokenizers, spiece, t5x_files
from specjax.checkpoints.tensors import AGAIN
from specjax.checkpoints.weights import PIECES
from specjax.models.checkpoint import DEFAULT_MAX_SOURCE_LEN
from specjax.support.files import read_json
from specjax.support.ranges import cause

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
# Model types whose tokenizer_class transformers follows.
GENERIC = ("t5", "mt5", "umt5", "gpt2", "llama")
# Ends of a turn, a message or a text in the templates of published chat models.
ENDS = (
    *("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>"),
    *("<|endoftext|>", "<|endofturn|>", "[|endofturn|]", "<|end_of_turn|>", "<end_of_utterance>"),
    *("<\uff5cend▁of▁sentence\uff5c>", "<EOT>", "<eos>", "</s>"),
)
BYTES = "ByT5Tokenizer"  # the class without a file: ids are bytes + 3, behind pad, EOS and unknown
# Fields of a chat that transformers follows with any template.
FOLLOWED = ("add_generation_prompt", "continue_final_message")
READ = re.compile(r"[^\W\d]\w*")  # names in a template
MIN_SHARE_OF_ROWS = 0.5  # of an embedding that have ids; published models pad by less than a tenth


def load(directory: Path) -> Any:
    """Load the tokenizer; None if the directory has none. The checkpoint's code never runs.

    Raises:
      ValueError: a file is damaged or missing.
    """
    # The imports below take a second, and advise to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if gguf_files.is_gguf(directory):
        return from_gguf(directory)
    pieces = spiece.find(directory)
    if pieces is None and t5x_files.is_checkpoint(directory):
        pieces = spiece.find(directory.absolute().parent)  # beside all steps of a run
    if pieces is not None and not (directory / FILE).is_file():
        return spiece.load(pieces)
    if not (directory / CONFIG).is_file() and not _pieces(directory):
        return None
    return from_transformers(directory)


def from_transformers(directory: Path) -> Any:
    """Load a directory with transformers; ValueError that names it if that fails.

    `trust_remote_code` is False, not left out: else transformers asks on stdin whether it may
    run the checkpoint's code.
    """
    import transformers  # imported here, as are the modules of its classes: each takes a while

    _check_charsmaps(directory / FILE)
    try:
        with panics():
            if _is_generic(directory):
                return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
            if _class_of(directory) == BYTES:
                return transformers.ByT5Tokenizer.from_pretrained(str(directory))
            auto = transformers.AutoTokenizer
            return auto.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:
        fix = AGAIN
        if "custom code" in cause(error):
            fix = (
                "specjax runs no code of a checkpoint: make a tokenizer.json of it elsewhere, "
                "and take auto_map out of tokenizer_config.json."
            )
        elif not (directory / FILE).is_file():
            fix = (
                "It has no tokenizer.json: `pip install sentencepiece protobuf` to convert the "
                "older format, or copy tokenizer.json from the model's page."
            )
        raise ValueError(
            f"The tokenizer in {directory} cannot be read ({cause(error)}). {fix}"
        ) from error


def from_gguf(path: Path) -> Any:
    """Load the tokenizer of a GGUF file, None if it has none; ValueError if that fails."""
    try:
        with panics():
            return gguf_tokenizers.tokenizer(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # the tokenizers library raises any kind
        raise ValueError(
            f"The tokenizer in {path} cannot be read ({cause(error, 200)}). {AGAIN}"
        ) from error


def _is_generic(directory: Path) -> bool:
    """Whether `AutoTokenizer` would take the class that reads tokenizer.json and nothing else.

    Importing `AutoTokenizer` takes a second, and imports torch if it is installed.
    """
    if not all((directory / name).is_file() for name in (FILE, CONFIG, "config.json")):
        return False
    own, model = read_json(directory / CONFIG), read_json(directory / "config.json")
    return (
        _class_of(directory) == "TokenizersBackend"
        and model.get("model_type") in GENERIC
        and "auto_map" not in own.keys() | model.keys()
    )


def _class_of(directory: Path) -> Any:
    """The class of transformers that tokenizer_config.json names; None if there is none."""
    place = directory / CONFIG
    return read_json(place).get("tokenizer_class") if place.is_file() else None


@contextlib.contextmanager
def panics() -> Iterator[None]:
    """Turn a panic of the tokenizers library into a ValueError.

    A panic is a BaseException, which no `except Exception` catches; its class cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"the tokenizers library panicked: {reason[:200]}") from None


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], name: str | os.PathLike, /, **fields: Any
) -> str:
    """Write a chat as a prompt, by the tokenizer's chat template, up to the answer's first token.

    The prompt has the BOS that the template writes. `decoding.texts.tokenize` adds no second one.

    Args:
      messages: turns with role and content, and what else the template reads.
      name: of the checkpoint, for errors.
      fields: tools, documents, add_generation_prompt (default: unless the last message is
        continued) and continue_final_message, as transformers' `apply_chat_template` takes them,
        and variables of the template.

    Raises:
      ValueError: there is no template, it does not read a field, it refuses the messages, or it
        reaches a limit of `chat_templates`.
    """
    if not has_template(tokenizer):
        raise ValueError(f"{name} has no chat template: take a model that was made to chat.")
    fields = {"add_generation_prompt": not fields.get("continue_final_message")} | fields
    # A template may ask whether a content is none, beside tool calls.
    turns = [
        {key: value for key, value in turn.items() if value is not None or key == "content"}
        for turn in messages
    ]
    try:
        if fields["add_generation_prompt"] and fields.get("continue_final_message"):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        template = tokenizer.get_chat_template(tools=fields.get("tools"))
        if unread := [key for key in fields if key not in (*FOLLOWED, *READ.findall(template))]:
            raise ValueError(f"it does not read {', '.join(map(ascii, unread))}")
        return chat_templates.render(template, turns, tokenizer.special_tokens_map | fields)
    except Exception as error:  # of transformers, of any kind
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"The chat template of {name} refuses the messages ({reason[:200]})."
        ) from error


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_of(tokenizer: Any, messages: Sequence[Mapping[str, str]], name: str) -> str:
    """Write a chat as a prompt: `chat_prompt`, or a raw prompt if there is no chat template.

    A raw prompt is the contents of the messages, with a blank line between them.

    Args:
      name: of the checkpoint, for errors.
    """
    if has_template(tokenizer):
        return chat_prompt(tokenizer, messages, name)
    return "\n\n".join(message["content"] for message in messages)


def raw_note(name: str) -> str:
    """Explain what `prompt_of` writes without a chat template."""
    return f"{name} has no chat template: prompts are the raw text of the turns."


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a text as ids; ValueError that names it if the tokenizer fails."""
    try:
        with panics():
            # Not verbose: transformers' warning about long texts does not apply here.
            return list(tokenizer(text, verbose=False)["input_ids"])
    except Exception as error:
        shown = ascii(text if len(text) <= 60 else text[:60] + "…")
        raise ValueError(f"The tokenizer cannot read the text {shown} ({cause(error)}).") from error


def marks(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before every text, such as BOS, and behind it, such as EOS."""
    empty, letter = (encode(tokenizer, text) for text in ("", "a"))
    before = _common(empty, letter)
    return before, _common(empty[len(before) :][::-1], letter[::-1])[::-1]


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The ids that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [first for first, _ in pairs]


def end_id(tokenizer: Any, eos_ids: Sequence[int] = ()) -> int:
    """The id that ends an output: the tokenizer's EOS, or the model's where it has another.

    Raises:
      ValueError: neither has one.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None and (own in eos_ids or not eos_ids):
        return own
    if eos_ids:
        return eos_ids[0]
    raise ValueError(
        "The tokenizer has no EOS, which every target ends with: set eos_token in its "
        "tokenizer_config.json."
    )


def _pieces(directory: Path) -> list[str]:
    """Files of a directory that hold pieces of a tokenizer."""
    names = [path.name for path in directory.iterdir() if path.is_file()]
    return sorted({name for pattern in PIECES for name in fnmatch.filter(names, pattern)})


def _check_charsmaps(file: Path) -> None:
    """Raise ValueError if a table that normalizes texts does not have its stated length.

    The tokenizers library would allocate the stated length, and may abort the process.
    """
    if not file.is_file() or b'"Precompiled"' not in file.read_bytes():
        return
    found = [read_json(file).get("normalizer")]
    while found:
        value = found.pop()
        if isinstance(value, list):
            found += value
        if not isinstance(value, dict):
            continue
        found.append(value.get("normalizers"))
        if value.get("type") == "Precompiled":
            try:
                right = spiece.is_charsmap(base64.b64decode(value["precompiled_charsmap"]))
            except (LookupError, TypeError, ValueError):
                right = False
            if not right:
                raise ValueError(f"{file} is damaged (precompiled_charsmap). {AGAIN}")


def real_vocab_size(tokenizer: Any, rows: int, directory: Path) -> int:
    """Count the tokenizer's ids, without the embedding's padding.

    Tokens that were added beyond the embedding are left out, with a warning.

    Raises:
      ValueError: the tokenizer's own pieces are more than the embedding's rows, or so few that
        files of it must be missing.
    """
    if tokenizer is None:
        return rows
    with panics():
        ids = tokenizer.get_vocab()
    if len(ids) < MIN_SHARE_OF_ROWS * rows:
        wanted = getattr(tokenizer, "vocab_files_names", {}).values()
        missing = [name for name in wanted if not (directory / name).is_file()]
        lacking = (
            f" of those that {type(tokenizer).__name__} may read, {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not there."
        )
        raise ValueError(
            f"{directory}: the tokenizer has {len(ids)} pieces, and the embedding {rows} rows. "
            f"Files of the tokenizer are missing or another model's"
            f"{f';{lacking}' if missing else '.'} Copy the tokenizer's files from the model's "
            "page, or remove them all to decode ids without texts."
        )
    real = max(ids.values()) + 1
    if real <= rows:
        return real
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{directory}: the tokenizer has {real} ids and the model only {rows} (vocab_size in "
            "config.json). They belong to different models: copy or download both again."
        )
    beyond = [token for token, i in ids.items() if i >= rows]
    warnings.warn(
        f"{directory}: the tokenizer has {real} ids and the model only {rows}. The model can "
        f"neither read nor say {', '.join(map(repr, sorted(beyond)[:3]))}"
        f"{' …' if len(beyond) > 3 else ''}: a text with such a token is refused.",
        stacklevel=4,
    )
    return rows


def eos_ids(value: Any) -> tuple[int, ...]:
    """The EOS ids as a tuple, from an id, a list of them or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(ids)))


def chat_ends(tokenizer: Any) -> set[int]:
    """The ids that end a chat model's answer by their names; empty without a chat template.

    Many configs name the end of a text alone. Of the names in `ENDS` special tokens count, and
    other added tokens if the template writes them: `</s>` is a tag of HTML in Gemma's vocabulary.
    """
    if not has_template(tokenizer):
        return set()
    template, added = str(tokenizer.chat_template), tokenizer.added_tokens_decoder.items()
    named = {i: token for i, token in added if token.content in ENDS}
    return {i for i, token in named.items() if token.special or token.content in template}


def max_source_len(tokenizer: Any, raw: Mapping[str, Any], config: Any) -> int:
    """The tokenizer's limit, at most the model's positions; else those, or a default."""
    # A tokenizer without a limit has 10³⁰.
    positions = getattr(config, "max_source_positions", config.max_positions)
    limit = 10**30 if tokenizer is None else tokenizer.model_max_length
    if type(limit) not in (int, float) or not limit >= 1:
        raise ValueError(
            f"tokenizer_config.json: model_max_length={limit!r} should be a number ≥ 1."
        )
    if limit < 10**6:
        limit = int(limit)
        return min(limit, positions or limit)
    return positions or int(raw.get("n_positions") or DEFAULT_MAX_SOURCE_LEN)
