"""Checks that a draft fits a target: each id is the same token in both.

The output's distribution is the target's with any draft over the target's ids
(`drafters.resizing.resized`). A draft that reads the ids as other tokens costs only speed: its
proposals are rarely accepted. So it is refused unless the user insists (`check_tokens=False`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from specjax.checkpoints import Checkpoint, start_field
from specjax.checkpoints.tokenizers import panics
from specjax.support.ranges import whole

INSIST = (
    "Or give check_tokens=False: outputs keep the target's distribution, and drafted tokens are "
    "lost where the two differ."
)
ANOTHER = (
    "Speculation needs a draft with the target's tokenizer: choose or train another draft. "
    f"{INSIST}"
)
INSISTED = "A draft with the target's tokenizer is right more often."
INPUT = "input"  # stays with check_tokens=False: such a draft cannot run
MAX_PADDING = 256  # rows that an embedding may have beyond its tokenizer's ids (T5: 28)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROLES = ("unk_token", "sep_token", "cls_token", "mask_token", "bos_token")
# Texts that tokenizers encode differently, by kind. Capitals, accents and runs of spaces occur only
# in their own kinds, so a difference shows in few of them.
HARD_TEXTS: dict[str, tuple[str, ...]] = {
    "spaces": ("a", " a", "a b", "a ", "a  b", "   ", "a    b"),
    "tabs and line breaks": ("\t", "\n", "a\tb", "a\nb", "a\n\n\n    b", "a\r\nb"),
    "numbers": ("0", "7", "12", "1234567890", "3.14", "-1,000,000", "1e9", "v2", "٣٤٥"),
    "punctuation": ("a.b", "end.", "a, b", "don't", "f(x)[0]->y", "!?!", "a_b", "#@$%", "“a”"),
    "letter case": ("A", "ABC", "Abc", "aBC", "ИГРА"),
    "normalisation": ("é", "e\u0301", "\ufb01", "\uff21", "\u2460", "\u212b", "a\u00a0b"),
    "marks without width": ("a\u200bb", "\ufeffa", "a\u00adb"),
    "scripts": ("язык", "γλωσσα", "语言", "くに", "언어", "שפה", "لغة", "भाषा", "ภาษา"),
    "emoji": ("🙂", "👍🏽", "👩\u200d👩\u200d👧", "🇩🇪", "a🙂🙂b"),
    "unknown characters": ("\ue000", "\ue000\ue001", "a\ue000b", "\U00013000", "\x07"),
    "words": ("one word and another", "the quick brown fox", "def f(x):\n    return x"),
    "long text": ("a" * 500, "one word and another " * 100),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison of a target with a draft, in words for reports and errors."""

    name: str
    passed: bool
    target: str
    """The target's value."""
    draft: str
    """The draft's value."""
    subject: str = ""
    """The first difference: a token, a text or a field of config.json."""
    way_out: str = ANOTHER
    required: bool = True
    """Whether a failure refuses the pair. False: it costs little speed, or for few inputs."""

    def __str__(self) -> str:
        of = f" of {self.subject}" if self.subject else ""
        return f"{self.name}{of}: {self.target} in the target and {self.draft} in the draft"


IDENTICAL = Check("tokenizer", True, "identical", "identical")


def check_pair(target: Checkpoint, draft: Checkpoint, *, check_tokens: bool = True) -> None:
    """Refuse a draft that fails a required check of `compare`.

    Args:
      check_tokens: False refuses only a draft that cannot read what the target reads.

    Raises:
      ValueError: names the checks that failed, both values, and the way out.
    """
    checks = compare(target, draft, tokens=check_tokens)
    failed = [check for check in checks if check.required and not check.passed]
    if failed:
        raise ValueError(
            f"The target {target.name} and the draft {draft.name} do not fit: "
            f"{'; '.join(map(str, failed))}. {failed[0].way_out}"
        )


def check_ids(name: str, size: int, target: Checkpoint, *, check_tokens: bool = True) -> None:
    """Refuse a drafter without a tokenizer that has more ids than the target.

    Args:
      name: the drafter's, for the error.
      size: the number of its ids.
      check_tokens: False accepts it all the same.

    Raises:
      ValueError: it has more ids, or their number is no whole number ≥ 1.
    """
    size = whole(f"the vocab_size of {name}", size, "[1, ∞)")
    if check_tokens and size > target.model.vocab_size:
        raise ValueError(
            f"{name} drafts {size} ids, and {target.name} has {target.model.vocab_size}: it was "
            f"made for another vocabulary. Make it for this one. {INSIST}"
        )


def compare(target: Checkpoint, draft: Checkpoint, *, tokens: bool = True) -> list[Check]:
    """Run every check of a pair, the gravest first.

    - input: both are encoder-decoders, or both decoder-only.
    - vocabulary size, token ids: an id means one token. Padding is not counted, nor are tokens that
      were added to the draft alone, past the target's ids: the draft is cut there. The draft never
      proposes tokens that were added to the target alone. Without a tokenizer, only sizes count.
    - special tokens: a role, such as EOS, has the same token in both. Not required.
    - encoding, decoding: texts become the same ids, and these the same text again. Not required:
      the target's tokenizer alone reads and writes texts, and the draft sees ids. A difference may
      say that the draft was trained with another tokenizer. The texts are `HARD_TEXTS`, the
      target's special tokens inside a text, and a sample of its pieces.
    - start token, end tokens, empty text, padding token, chat template, positions: not required.
      The target's tokens begin and end a text, no model sees padding, and templates are the
      caller's. A draft with fewer positions only drafts badly past its last.

    Tokenizers with equal files are not tried on texts.

    Args:
      tokens: False requires nothing of tokens, ids and texts.
    """
    kinds = ["a source" if c.config.is_encoder_decoder else "a prompt" for c in (target, draft)]
    way_out = "Choose or train a draft of the target's kind."
    checks = [_check(INPUT, kinds[0] == kinds[1], kinds, way_out=way_out)]
    if target.tokenizer is None or draft.tokenizer is None:
        checks.append(_sizes(target, draft))
    elif target.tokenizer is draft.tokenizer:
        checks.append(IDENTICAL)
    else:
        sizes = len(target.tokenizer), len(draft.tokenizer)  # they grow when tokens are added
        checks += _compare_tokenizers(target.tokenizer, draft.tokenizer, sizes)
    if not tokens:
        free: dict[str, Any] = {"required": False, "way_out": INSISTED}
        checks = [c if c.name == INPUT else dataclasses.replace(c, **free) for c in checks]
    return [*checks, *_remarks(target, draft)]


def shared_ids(target: Checkpoint, draft: Checkpoint) -> tuple[int, int]:
    """Count the ids that mean the same token in both, and the target's ids."""
    count = target.model.vocab_size
    if target.tokenizer is None or draft.tokenizer is None:
        return min(count, draft.model.vocab_size), count
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    return sum(theirs.get(token) == id for token, id in ours.items()), len(ours)


def _check(name: str, passed: bool, values: Iterable[str], **options: Any) -> Check:
    target, draft = values
    return Check(name, passed, target, draft, **options)


# --- models ------------------------------------------------------------------------------------


def _sizes(target: Checkpoint, draft: Checkpoint) -> Check:
    """Compare sizes. A model without its tokenizer may have up to `MAX_PADDING` rows more."""
    sizes = target.model.vocab_size, draft.model.vocab_size
    bare = target.tokenizer is None, draft.tokenizer is None
    padding = sizes[0] - sizes[1] if bare[0] else sizes[1] - sizes[0]
    most = MAX_PADDING if bare[0] != bare[1] else 0  # if one tokenizer says how many ids are real
    return Check("vocabulary size", 0 <= padding <= most, f"{sizes[0]} ids", f"{sizes[1]} ids")


def _remarks(target: Checkpoint, draft: Checkpoint) -> list[Check]:
    """Compare what costs little speed. Of EOS ids, one in common is enough: chat models have more
    than their base models."""

    def one(name: str, fits: bool, values: Iterable[Any], way_out: str = "", **of: str) -> Check:
        return _check(name, fits, map(str, values), way_out=way_out, required=False, **of)

    both = target, draft
    starts, pads = ([getattr(c, name) for c in both] for name in ("start_id", "pad_id"))
    ends = [set(c.eos_ids) for c in both]
    templates = [getattr(c.tokenizer, "chat_template", None) for c in both]
    words = ["one" if template else "none" for template in templates]
    if all(templates) and templates[0] != templates[1]:
        words[1] = "another"
    most, drafts = (c.config.max_positions for c in both)
    room = drafts is None or (most is not None and most <= drafts)
    counts = ("any number" if count is None else count for count in (most, drafts))
    shorter = "Keep texts within the draft's positions: set max_source_len, max_new_tokens."
    return [
        one("start token", starts[0] == starts[1], starts, subject=start_field(target.config)),
        one("end tokens", not all(ends) or bool(ends[0] & ends[1]), map(sorted, ends)),
        one("padding token", pads[0] == pads[1], pads),
        one("chat template", words[0] == words[1], words),
        one("positions", room, counts, shorter),
    ]


# --- tokenizers --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # `generate` may be called for one text at a time
def _compare_tokenizers(target: Any, draft: Any, sizes: tuple[int, int]) -> tuple[Check, ...]:
    if _same_files(target, draft):
        return (IDENTICAL,)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    added = draft.get_added_vocab()
    special = tuple(f"a{token} b" for token in _some(target.get_added_vocab()))
    pieces = tuple(_decode(target, [ours[piece]]) for piece in _some(ours))
    texts = HARD_TEXTS | {"special tokens in a text": special, "pieces": pieces}
    encoded = {kind: [(text, _encode(target, text)) for text in texts[kind]] for kind in texts}
    marked = _encode(target, "", marks=True)
    remarks = [
        _special_tokens(target, draft, ours, theirs),
        _encoding(target, draft, "empty text", [("", marked)], marks=True),
        *(_encoding(target, draft, kind, pairs) for kind, pairs in encoded.items()),
        _decoding(target, draft, [ids for pairs in encoded.values() for _, ids in pairs]),
    ]
    for i, one in enumerate(remarks):
        way_out = one.way_out and INSISTED
        remarks[i] = dataclasses.replace(one, required=False, way_out=way_out)
    return _vocabulary_size(ours, theirs, added), _token_ids(ours, theirs), *remarks


def _same_files(target: Any, draft: Any) -> bool:
    """Whether both were read from equal files, and no token was added to either since."""
    places = [tokenizer.name_or_path for tokenizer in (target, draft)]
    files = [[Path(place, name) for name in TOKENIZER_FILES] for place in places]
    return (
        all(places)
        and all(file.is_file() for file in chain(*files))
        and target.special_tokens_map == draft.special_tokens_map
        and len(target) == len(draft)
        and all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
    )


def _vocabulary_size(
    ours: Mapping[str, int], theirs: Mapping[str, int], added: Collection[str]
) -> Check:
    size, drafts = (max(vocabulary.values()) + 1 for vocabulary in (ours, theirs))
    fits = size == drafts or (
        size < drafts and all(id < size or token in added for token, id in theirs.items())
    )
    return Check("vocabulary size", fits, f"{size} ids", f"{drafts} ids")


def _token_ids(ours: Mapping[str, int], theirs: Mapping[str, int]) -> Check:
    """Compare ids up to the target's last; `_vocabulary_size` checks the draft's others."""
    size = max(ours.values()) + 1
    if ours != theirs:
        theirs = {token: id for token, id in theirs.items() if id < size}
    if ours == theirs:
        return Check("token ids", True, f"{len(ours)} tokens", f"{len(theirs)} tokens")
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    token = min(differing, key=lambda token: (ours.get(token, size), theirs.get(token, size)))
    words = ["no id" if v.get(token) is None else f"id {v[token]}" for v in (ours, theirs)]
    return _check("token ids", False, words, subject=repr(token))


def _special_tokens(
    target: Any, draft: Any, ours: Mapping[str, int], theirs: Mapping[str, int]
) -> Check:
    """Compare the roles that both have. Others show where they change an encoding."""
    names = target.special_tokens_map, draft.special_tokens_map
    both = [role for role in ROLES if role in names[0] and role in names[1]]
    for role in both:
        token, other = names[0][role], names[1][role]
        if (token, ours.get(token)) != (other, theirs.get(other)):
            values = f"{token!r}, id {ours.get(token)},", f"{other!r}, id {theirs.get(other)},"
            return _check("special tokens", False, values, subject=role)
    return _check("special tokens", True, [", ".join(both) or "none"] * 2)


def _encoding(
    target: Any, draft: Any, kind: str, pairs: list[tuple[str, Any]], *, marks: bool = False
) -> Check:
    """Compare the ids of one kind of text; `pairs` are texts with the target's ids."""
    name = f"encoding: {kind}"
    for text, ids in pairs:
        others = _encode(draft, text, marks=marks)
        if ids != others:
            values = _cut(target, ids, others), _cut(draft, others, ids)
            # Only the target's tokenizer frames texts: the draft sees a frame that is new to it.
            way_out = "" if marks else ANOTHER
            return _check(name, False, values, subject=_short(text), way_out=way_out)
    count = sum(len(ids) for _, ids in pairs if not isinstance(ids, str))
    return _check(name, True, [f"{count} ids"] * 2)


def _decoding(target: Any, draft: Any, encoded: list[Any]) -> Check:
    rows = [ids for ids in encoded if not isinstance(ids, str)]
    for ids in rows:
        texts = _decode(target, ids), _decode(draft, ids)
        if texts[0] != texts[1]:
            subject = f"ids {str(ids[:6])[1:-1]}{' …' * (len(ids) > 6)}"
            values = map(_short, texts)
            return _check("decoding", False, values, subject=subject)
    return _check("decoding", True, [f"{len(rows)} texts"] * 2)


def _tried(call: Callable[[], Any]) -> Any:
    """What a tokenizer gives, or its error message: errors have no common class."""
    try:
        with panics():
            return call()
    except Exception as error:  # a word without an unknown token, ...
        return f"an error ({error})"


def _encode(tokenizer: Any, text: str, *, marks: bool = False) -> list[int] | str:
    """Encode a text: its ids, or the tokenizer's error message."""
    options = {"add_special_tokens": marks, "verbose": False}
    return _tried(lambda: list(tokenizer(text, **options)["input_ids"]))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return _tried(lambda: tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _some(vocabulary: Mapping[str, int], count: int = 200) -> list[str]:
    """At most `count` tokens, evenly spread over their ids."""
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return tokens[:: -(-len(tokens) // count) or 1]


def _cut(tokenizer: Any, ids: list[int] | str, others: list[int] | str) -> str:
    """Ids and their tokens, from just before the first difference on."""
    if isinstance(ids, str):
        return ids
    same = 0
    while same < min(len(ids), len(others)) and ids[same] == others[same]:
        same += 1
    begin = max(same - 1, 0)
    shown = ids[begin : begin + 4]
    tokens = zip(shown, tokenizer.convert_ids_to_tokens(shown), strict=True)
    words = ["…"] * (begin > 0) + [f"{id} {token!r}" for id, token in tokens]
    return f"[{', '.join(words + ['…'] * (begin + 4 < len(ids)))}]"


def _short(text: str) -> str:
    return repr(text) if len(text) <= 24 else f"{text[:24]!r} …"
