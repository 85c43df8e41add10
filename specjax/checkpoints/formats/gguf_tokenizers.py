"""Builds the tokenizer that a GGUF file describes, as llama.cpp follows its metadata.

`tokenizer.ggml.model` names the kind: "gpt2" is a BPE of bytes, "llama" SentencePiece's BPE, whose
merges follow from scores, and "t5" a unigram model. Marks and flags that a file lacks are those
that llama.cpp takes (`src/llama-vocab.cpp`).
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints.config_json import NO_ID
from specjax.checkpoints.formats import gguf_files, spiece
from specjax.checkpoints.tensors import AGAIN

Fields = Mapping[str, Any]
PREFIX = "tokenizer.ggml."
TOKENS, MODEL, PRE = f"{PREFIX}tokens", f"{PREFIX}model", f"{PREFIX}pre"
CHARSMAP, TEMPLATE = f"{PREFIX}precompiled_charsmap", "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp's name of a row that has no token
MARKS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message that calls a tool
NO_IDS = (NO_ID, 2**32 - 1)  # the second is −1 without a sign
DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
SPACE = "▁"  # SentencePiece's
MAX_TOKEN = 1_000  # characters; published vocabularies stay below
REPAIR = "Correct it with the gguf package's gguf_set_metadata.py, or convert the model anew."

# --- how a BPE of bytes splits texts, by tokenizer.ggml.pre ---------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_OR_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [r"[^\r\n\p{L}\p{N}]?" + UPPER + f"{a}{LOWER}{b}" for a, b in ("*+", "+*")]
LLAMA3 = (WORD + r"\p{N}{1,3}" + SIGNS + SPACES,)
# These take a word that is a token whole, whatever the merges, and add BOS.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
SPLITS = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys((*WHOLE_WORDS, "dbrx", "smaug-bpe"), LLAMA3),
    "tekken": ("|".join([*CASED, r"\p{N}"]) + SIGNS_OR_SLASHES + SPACES,),
    "gpt-4o": (f"{SUFFIX}?|".join([*CASED, r"\p{N}{1,3}" + SIGNS_OR_SLASHES + SPACES]),),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"),
        (WORD + r"\p{N}" + SIGNS + SPACES,),
    ),
    "seed-coder": (WORD + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES,),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "a.x-4.0", "mellum"),
        (GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", GPT2),
    ),
    # Digits in threes from the last one. Only a number's beginning looks ahead, or time is squared.
    "superbpe": (r"\p{N}+", r"(?<!\d)\d{1,2}(?=(?:\d{3})+(?!\d))|\d{3}"),
    "deepseek-coder": (
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        r"\p{N}",
    ),
}


# --- marks ---------------------------------------------------------------------------------------


def mark_ids(fields: Fields, role: str, rows: int) -> list[int]:
    """Find the ids of a mark, its token's first; llama.cpp's default if the file names none.

    A default that is an ordinary token in this file does not count.

    Args:
      role: "bos", "eos", "eot", "eom", "unknown" or "padding".
      rows: the number of tokens.

    Raises:
      ValueError: an id is none of the tokens'.
    """
    found = []
    for key in (f"{PREFIX}{role}_token_id", f"{PREFIX}{role}_token_ids"):
        for value in _listed(fields.get(key, [])):
            if type(value) is int and value in NO_IDS:
                continue
            if type(value) is not int or not 0 <= value < rows:
                raise ValueError(
                    f"{key}={value!r:.80} should be an id of its {rows} tokens. {REPAIR}"
                )
            found.append(value)
    default: int = DEFAULT_IDS.get(str(fields.get(MODEL)), {}).get(role, rows)
    types = fields.get(f"{PREFIX}token_type")
    is_mark = isinstance(types, np.ndarray) and types[default : default + 1].tolist()
    if not found and is_mark in ([CONTROL], [UNKNOWN]):
        found = [default]
    return found


def _listed(value: Any) -> list[Any]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return list(value) if isinstance(value, list | tuple) else [value]


def _flag(fields: Fields, name: str, default: bool) -> bool:
    value = fields.get(f"{PREFIX}{name}", default)
    if type(value) is not bool:
        raise ValueError(f"{PREFIX}{name}={value!r:.80} should be a truth value. {REPAIR}")
    return value


# --- the tokenizer -------------------------------------------------------------------------------


def tokenizer(path: Path) -> Any:
    """Build the tokenizer of a file; None if it has no tokens.

    Raises:
      ValueError: its metadata is damaged, or not supported.
      Exception: the tokenizers library refuses it.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    fields = gguf_files.read(path).fields
    if TOKENS not in fields:
        return None
    model = fields.get(MODEL)
    if not isinstance(model, str) or model not in BUILDERS:
        raise ValueError(
            f"{MODEL}={model!r:.80} is not supported; supported are "
            f"{', '.join(map(repr, BUILDERS))}."
        )
    template, pre = fields.get(TEMPLATE, ""), fields.get(PRE, "default")
    for key, text in ((TEMPLATE, template), (PRE, pre)):
        if not isinstance(text, str):
            raise ValueError(f"{key}={text!r:.80} should be a text. {REPAIR}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(fields, "tokens"))]
    if (longest := max(map(len, tokens))) > MAX_TOKEN:
        raise ValueError(f"{TOKENS} hold one of {longest:,} characters. {AGAIN}")
    types = _numbers(fields, "token_type", len(tokens), NORMAL)
    scores = _numbers(fields, "scores", len(tokens), 0.0 if model == "gpt2" else None)
    marks = {role: ids[0] for role in MARKS if (ids := mark_ids(fields, role, len(tokens)))}
    adds = {"bos": model == "llama" or pre in WHOLE_WORDS, "eos": model == "t5"}
    adds = {role: _flag(fields, f"add_{role}_token", adds[role]) for role in adds}
    for role, needed in {**adds, "unknown": model == "t5"}.items():
        if needed and role not in marks:
            raise ValueError(f"{PREFIX}{role}_token_id is missing, and texts need it. {REPAIR}")
    if model == "gpt2" and PRE not in fields:
        warnings.warn(
            f"{path} has no {PRE}, so texts are split as llama.cpp's 'default', which may not be "
            "how its model was trained. Convert the model anew.",
            stacklevel=2,
        )
    vocabulary = _cut(Vocabulary(tokens, types, scores, marks), model)
    tokens, types = vocabulary.tokens, vocabulary.types
    built = BUILDERS[model](fields, vocabulary)
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    for kind, is_special in special.items():
        there = [token for token, one in zip(tokens, types, strict=True) if one == kind]
        built.add_tokens([AddedToken(x, normalized=False, special=is_special) for x in there])
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        chat_template=template or None,
        **{f"add_{role}_token": value for role, value in adds.items()},
        **{f"{name}_token": tokens[marks[role]] for role, name in MARKS.items() if role in marks},
    )


class Vocabulary(NamedTuple):
    """Tokens with their types and scores, and the ids of marks."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    marks: dict[str, int]

    def ids(self) -> dict[str, int]:
        """The id of each token; of one that is there twice, the first."""
        return {token: i for i, token in reversed([*enumerate(self.tokens)])}


def _cut(whole: Vocabulary, model: str) -> Vocabulary:
    """Cut off the rows without a token, but for those that are a T5's `<extra_id_…>`."""
    end, marked = len(whole.tokens), max(whole.marks.values(), default=-1)
    while end - 1 > marked and PADDING.fullmatch(whole.tokens[end - 1]):
        end -= 1
    is_t5 = model == "t5" and len(whole.tokens) - end >= spiece.EXTRA_IDS
    extra = [f"<extra_id_{i}>" for i in reversed(range(spiece.EXTRA_IDS))] if is_t5 else []
    tokens = whole.tokens[:end] + extra
    types = whole.types[:end] + [CONTROL] * len(extra)
    return Vocabulary(tokens, types, whole.scores[: len(tokens)], whole.marks)


def _bytes_bpe(fields: Fields, vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = fields.get(PRE, "default")
    if pre not in SPLITS:
        raise ValueError(
            f"{PRE}={pre!r:.80} is not supported; supported are {', '.join(SPLITS)}. Another split "
            "would give its model other tokens: take the model's own directory instead."
        )
    if f"{PREFIX}merges" not in fields:
        raise ValueError(f"{PREFIX}merges are missing, and a BPE needs them. {REPAIR}")
    merges = []
    for merge in _texts(fields, "merges"):
        at = merge.find(" ", 1)
        if at < 0:
            raise ValueError(f"{PREFIX}merges: {merge!r:.80} should be two tokens. {REPAIR}")
        merges.append((merge[:at], merge[at + 1 :]))
    built = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    built.decoder = decoders.ByteLevel()
    return built


def _sentencepiece(fields: Fields, vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids, merges = vocabulary.ids(), []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        for at in range(1, len(token)):
            if token[:at] in ids and token[at:] in ids:
                merges.append((score, at, (token[:at], token[at:])))
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    pairs = [pair for *_, pair in merges]
    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if (unknown := vocabulary.marks.get("unknown")) is not None:
        options["unk_token"] = vocabulary.tokens[unknown]
    built = Tokenizer(models.BPE(ids, pairs, **options))
    prefix = _flag(fields, "add_space_prefix", True)
    # Each text between two marks gets a space, as in llama.cpp: also one that begins with spaces.
    first = [normalizers.Prepend(SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return built


def _unigram(fields: Fields, vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    # The score of an unknown character follows from the lowest one: marks and padding do not count.
    pieces = [
        (token, score if kind == NORMAL else 0.0)
        for token, kind, score in zip(*vocabulary[:3], strict=True)
    ]
    built = Tokenizer(models.Unigram(pieces, unk_id=vocabulary.marks["unknown"]))
    prefix, charsmap = _flag(fields, "add_space_prefix", True), fields.get(CHARSMAP)
    steps: list[Any] = []
    if charsmap is not None:
        table = charsmap.tobytes() if isinstance(charsmap, np.ndarray) else b""
        if not spiece.is_charsmap(table):
            raise ValueError(f"{CHARSMAP} is not a table of its stated length. {AGAIN}")
        steps.append(normalizers.Precompiled(table))
    if _flag(fields, "remove_extra_whitespaces", True):
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    steps.append(normalizers.Replace(" ", SPACE))
    built.normalizer = normalizers.Sequence(steps + [normalizers.Prepend(SPACE)] * prefix)
    built.decoder = decoders.Metaspace(SPACE, "always" if prefix else "never")
    return built


BUILDERS = {"gpt2": _bytes_bpe, "llama": _sentencepiece, "t5": _unigram}


def _texts(fields: Fields, name: str) -> list[str]:
    """The texts of a list that is not empty."""
    found = fields[f"{PREFIX}{name}"]
    if not isinstance(found, list) or not found:
        raise ValueError(f"{PREFIX}{name} should be a list of texts. {REPAIR}")
    return found


def _numbers(fields: Fields, name: str, count: int, default: float | None = None) -> list[Any]:
    """The numbers of a list, one for each token."""
    if f"{PREFIX}{name}" not in fields and default is not None:
        return [default] * count
    found = fields.get(f"{PREFIX}{name}", ())
    if not isinstance(found, np.ndarray) or len(found) != count or not np.isfinite(found).all():
        raise ValueError(f"{PREFIX}{name} should be {count} finite numbers, one a token. {REPAIR}")
    return found.tolist()
