"""Which pairs are accepted, which are refused and why; padded ids never come out."""

import dataclasses
import itertools
import re
import string
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

import specjax
from specjax.checkpoints import Checkpoint, compatibility
from specjax.checkpoints.compatibility import HARD_TEXTS, check_ids, check_pair, compare, shared_ids
from specjax.models.gpt import GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5Config

SPECIALS = ("<pad>", "</s>", "<unk>", "<s>")
KNOWN = itertools.chain(*(v for kind, v in HARD_TEXTS.items() if kind != "unknown characters"))
LETTERS = sorted(set("".join(KNOWN)) | set(string.printable))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("1", "2"), ("f", "("), ("a", "n"), ("n", "o")]
VOCABULARY = [*SPECIALS, *BYTES, *LETTERS, *("".join(pair) for pair in MERGES)]


def wrap(tokenizer, **options):
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles | options)


def bpe(
    vocabulary=VOCABULARY,
    *,
    merges=MERGES,
    normalizer=None,
    pre_tokenizer=None,
    decoder=None,
    ends=False,
    added=(),
    model=None,
    **options,
):
    """Characters and a few merges of them; with `ends`, </s> follows every text."""
    ids = {token: id for id, token in enumerate(vocabulary)}
    model = {"unk_token": "<unk>"} | (model or {})
    tokenizer = Tokenizer(models.BPE(ids, merges, **model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    tokenizer.decoder = decoder or decoders.Fuse()
    tokenizer.add_tokens(list(added))
    return wrap(tokenizer, **options)


def unigram(scores=(), *, prepend="always"):
    """The same tokens as `bpe`, without merges: the likeliest cut."""
    pieces = [(token, dict(scores).get(token, -5.0)) for token in VOCABULARY]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(" ", prepend)
    return wrap(tokenizer)


def word_piece(longest):
    pieces = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    ids = {token: id for id, token in enumerate(pieces)}
    model = models.WordPiece(ids, unk_token="<unk>", max_input_chars_per_word=longest)
    return wrap(Tokenizer(model))


def member(
    tokenizer: Any = None, name="m", *, rows=1024, start=0, ends=(1,), decoder_only=False, pad=0
):
    """A checkpoint of nothing but ids; without a tokenizer, `rows` of them."""
    config: Any = T5Config(rows, 4, 2, 4, 1, 1, 1, decoder_start_token_id=start, pad_token_id=pad)
    if decoder_only:
        config = GPTConfig(rows, 8, 4, 1, 1, bos_token_id=start, pad_token_id=pad)
    size = max(tokenizer.get_vocab().values()) + 1 if tokenizer else rows
    model = LanguageModel({}, None, size)  # type: ignore[arg-type]
    return Checkpoint(name, model, config, tokenizer, eos_ids=tuple(ends))


def swapped(a, b):
    return [{a: b, b: a}.get(token, token) for token in VOCABULARY]


SIZE = len(VOCABULARY)
BASE = member(bpe())

# name: the target, the draft, and what the error says: the check, of what, both values.
REFUSED = {
    "another kind of model": (BASE, member(bpe(), decoder_only=True),
        "input: a source in the target and a prompt in the draft"),
    "sizes without a tokenizer": (member(rows=32), member(rows=40),
        "vocabulary size: 32 ids in the target and 40 ids in the draft"),
    "too few rows for the ids": (BASE, member(rows=SIZE - 1),
        f"vocabulary size: {SIZE} ids in the target and {SIZE - 1} ids"),
    "too many rows to be padding": (BASE, member(rows=SIZE + 257),
        f"vocabulary size: {SIZE} ids in the target and {SIZE + 257} ids"),
    "a piece more in the target": (member(bpe([*VOCABULARY, "qq"])), BASE,
        f"vocabulary size: {SIZE + 1} ids in the target and {SIZE} ids"),
    "a piece more in the draft": (BASE, member(bpe([*VOCABULARY, "qq"])),
        f"vocabulary size: {SIZE} ids in the target and {SIZE + 1} ids"),
    "tokens added to the target, which may say them": (member(bpe(added=["<tool>"])), BASE,
        f"vocabulary size: {SIZE + 1} ids in the target and {SIZE} ids"),
    "swapped ids": (
        BASE,
        member(bpe(swapped("x", "y"))),
        f"token ids of 'x': id {VOCABULARY.index('x')} in the target and "
        f"id {VOCABULARY.index('y')} in the draft",
    ),
    "another token in the place of one": (BASE,
        member(bpe([token.replace("<s>", "<bos>") for token in VOCABULARY], bos_token="<bos>")),
        "token ids of '<s>': id 3 in the target and no id in the draft"),
    "added tokens in another order": (member(bpe(added=["<x>", "<y>"])),
        member(bpe(added=["<y>", "<x>"])),
        f"token ids of '<x>': id {SIZE} in the target and id {SIZE + 1} in the draft"),
    "another algorithm and vocabulary": (member(word_piece(100)), BASE,
        f"vocabulary size: {2 * len(LETTERS) + 4} ids in the target and {SIZE} ids"),
}  # fmt: skip
# The same tokens, and texts that become other ids: the draft sees ids alone.
DIFFERS = {
    "another unknown token": (
        BASE,
        member(bpe(unk_token="<pad>")),
        "special tokens of unk_token: '<unk>', id 2, in the target and '<pad>', id 0, in the draft",
    ),
    "a first token that is read as letters": (BASE, member(bpe(bos_token="</s>")),
        "encoding: special tokens in a text of 'a<s> b': "),
    "a space before each text": (BASE, member(bpe(normalizer=normalizers.Prepend(" "))),
        r"encoding: spaces of 'a': \[\d+ 'a'\] in the target and \[\d+ ' ', \d+ 'a'\]"),
    "spaces stripped": (BASE, member(bpe(normalizer=normalizers.Strip())),
        r"encoding: spaces of ' a': \[\d+ ' ', \d+ 'a'\] in the target and \[\d+ 'a'\]"),
    "where the space goes": (member(unigram()), member(unigram(prepend="never")),
        r"encoding: spaces of 'a': \[\d+ ' ', \d+ 'a'\] in the target and \[\d+ 'a'\]"),
    "tabs as spaces": (BASE, member(bpe(normalizer=normalizers.Replace("\t", " "))),
        r"encoding: tabs and line breaks of '\\t': \[\d+ '\\t'\] in the target and \[\d+ ' '\]"),
    "digits one by one": (BASE,
        member(bpe(pre_tokenizer=pre_tokenizers.Digits(individual_digits=True))),
        r"encoding: numbers of '12': \[\d+ '12'\] in the target and \[\d+ '1', \d+ '2'\]"),
    "punctuation cut off": (BASE, member(bpe(pre_tokenizer=pre_tokenizers.Punctuation())),
        r"encoding: punctuation of 'f\(x\)\[0\]->y': \[\d+ 'f\(', .* \[\d+ 'f', \d+ '\(',"),
    "lower case": (BASE, member(bpe(normalizer=normalizers.Lowercase())),
        r"encoding: letter case of 'A': \[\d+ 'A'\] in the target and \[\d+ 'a'\]"),
    "accents composed": (member(bpe(normalizer=normalizers.NFC())), BASE,
        "encoding: normalisation of 'e\u0301': .* in the target and .* in the draft"),
    "accents stripped": (BASE,
        member(bpe(normalizer=normalizers.BertNormalizer(False, False, True, False))),
        "encoding: normalisation of 'é': .* in the target and"),
    "compatibility forms": (member(bpe(normalizer=normalizers.NFKC())),
        member(bpe(normalizer=normalizers.NFC())),
        r"encoding: normalisation of 'ﬁ': \[\d+ 'f', \d+ 'i'\] in the target and \[\d+ 'ﬁ'\]"),
    "Chinese characters apart": (BASE,
        member(bpe(normalizer=normalizers.BertNormalizer(False, True, False, False))),
        "encoding: scripts of '语言': .* ' ', "),
    "emoji taken apart": (BASE, member(bpe(normalizer=normalizers.Replace("\u200d", ""))),
        "encoding: emoji of "),
    "unknown characters dropped": (BASE, member(bpe(model={"unk_token": None})),
        r"encoding: unknown characters of '\\ue000': \[2 '<unk>'\] in the target and \[\]"),
    "unknown characters fused": (BASE, member(bpe(model={"fuse_unk": True})),
        r"encoding: unknown characters of '\\ue000\\ue001': .* and \[2 '<unk>'\] in the draft"),
    "unknown characters as bytes": (BASE, member(bpe(model={"byte_fallback": True})),
        r"encoding: unknown characters of .* and \[\d+ '<0xEE>', "),
    "other merges first": (BASE, member(bpe(merges=[*MERGES[:2], *MERGES[:1:-1]])),
        r"encoding: words of 'one word and another': .* 'an', .* 'no',"),
    "long words given up": (member(word_piece(100)), member(word_piece(5000)),
        "encoding: long text of 'a{24}' …: .*'<unk>'.* in the target and"),
    "spaces after a special token": (member(bpe(added=[AddedToken("<x>", special=True)])),
        member(bpe(added=[AddedToken("<x>", special=True, rstrip=True)])),
        "encoding: special tokens in a text of 'a<x> b': "),
    "other scores": (member(unigram()), member(unigram({"f(": -50.0})),
        "encoding: punctuation of 'f"),
    "pieces given up": (member(unigram()), member(unigram({"no": -50.0})), "encoding: "),
    "another text back": (BASE, member(bpe(decoder=decoders.Replace(" ", "_"))),
        r"decoding of ids \d+, \d+: ' a' in the target and '_a' in the draft"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_pair_that_does_not_fit_is_refused_for_its_reason(name):
    target, draft, reason = REFUSED[name]
    failed = [check for check in compare(target, draft) if check.required and not check.passed]
    assert re.match(reason, str(failed[0]))
    target, draft = (
        dataclasses.replace(target, name="big"),
        dataclasses.replace(draft, name="small"),
    )
    with pytest.raises(ValueError, match=r"[Cc]hoose or train a") as error:
        check_pair(target, draft)
    start = f"The target big and the draft small do not fit: {failed[0]}"
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(failed[0].way_out)


@pytest.mark.parametrize("name", DIFFERS)
def test_other_ids_of_a_text_are_remarks(name):
    target, draft, reason = DIFFERS[name]
    check_pair(target, draft)
    failed = [check for check in compare(target, draft) if not check.passed]
    assert any(re.match(reason, str(check)) for check in failed)
    assert not any(check.required for check in failed)


def test_an_error_names_each_check():
    other = member(bpe([*SPECIALS, *LETTERS], merges=[]))
    failed = [check for check in compare(BASE, other) if check.required and not check.passed]
    assert [check.name for check in failed] == ["vocabulary size", "token ids"]
    with pytest.raises(ValueError, match=re.escape(f"{failed[0]}; {failed[1]}. Speculation needs")):
        check_pair(BASE, other)


@pytest.mark.parametrize("size", ["x", None, 0, 2.5, float("nan")])
@pytest.mark.parametrize("check_tokens", [True, False])
def test_a_drafters_number_of_ids(size, check_tokens):
    with pytest.raises(ValueError, match=f"vocab_size of 'mine'={size!r} must be a whole number"):
        check_ids("'mine'", size, BASE, check_tokens=check_tokens)


# --- what fits ---------------------------------------------------------------------------------


class Slow(PreTrainedTokenizer):
    """The characters of `bpe` without its merges, in Python."""

    def __init__(self):
        self.ids = {token: id for id, token in enumerate([*SPECIALS, *LETTERS])}
        super().__init__(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>")

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 2)

    def _convert_id_to_token(self, index):
        return list(self.ids)[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


CHARACTERS = member(bpe([*SPECIALS, *LETTERS], merges=[]))
FITS = {
    "the same tokenizer twice": (BASE, dataclasses.replace(BASE)),
    "the same tokenizer made twice": (BASE, member(bpe())),
    "more padding in the draft": (member(bpe(), rows=700), member(bpe(), rows=900)),
    "more padding in the target": (member(bpe(), rows=900), member(bpe(), rows=700)),
    "no tokenizers": (member(rows=32), member(rows=32)),
    "padding in a draft without a tokenizer": (BASE, member(rows=SIZE + 256)),
    "padding in a target without a tokenizer": (member(rows=SIZE + 28), BASE),
    "tokens added to the draft": (BASE, member(bpe(added=["<unused1>", "<unused2>"]))),
    "Python and Rust": (member(Slow()), CHARACTERS),
    "Rust and Python": (CHARACTERS, member(Slow())),
    "one program in other words": (
        member(bpe(normalizer=normalizers.NFC())),
        member(bpe(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.NFC()]))),
    ),
    "one end in common": (member(bpe(), ends=(1, 3)), member(bpe(), ends=(1,))),
    "a draft that knows no end": (BASE, member(bpe(), ends=())),
}


@pytest.mark.parametrize("name", FITS)
def test_a_pair_that_fits_passes_every_check(name):
    pair = FITS[name]
    check_pair(*pair)
    assert all(check.passed for check in compare(*pair))


@pytest.mark.parametrize(
    ("target", "draft", "remark"),
    [
        (
            BASE,
            member(bpe(added=[AddedToken("<pad>", special=True)], pad_token="<s>"), pad=3),
            "padding token: 0 in the target and 3 in the draft",
        ),
        (BASE, member(bpe(chat_template="{{ x }}")), "chat template: none in the target and one"),
        (
            BASE,
            member(bpe(added=[AddedToken("<s>", special=True)], bos_token="</s>")),
            "special tokens of bos_token: '<s>', id 3, in the target and '</s>', id 1,",
        ),
        (
            BASE,
            member(bpe(), start=3),
            "start token of decoder_start_token_id: 0 in the target and 3 in the draft",
        ),
        (
            member(bpe(), decoder_only=True),
            member(bpe(), decoder_only=True, start=3),
            "start token of bos_token_id: 0 in the target and 3 in the draft",
        ),
        (
            member(bpe(), ends=(1, 4)),
            member(bpe(), ends=(3,)),
            r"end tokens: \[1, 4\] in the target and \[3\] in the draft",
        ),
        (
            member(bpe(ends=True)),
            BASE,
            r"encoding: empty text of '': \[1 '</s>'\] in the target and \[\] in the draft",
        ),
        (
            member(bpe(chat_template="{{ x }}")),
            member(bpe(chat_template="{{ y }}")),
            "chat template: one in the target and another in the draft",
        ),
    ],
)
def test_a_difference_that_hardly_costs_speed_is_a_remark(target, draft, remark):
    check_pair(target, draft)
    failed = [check for check in compare(target, draft) if not check.passed]
    assert [check.required for check in failed] == [False]
    assert re.match(remark, str(failed[0]))


@pytest.mark.parametrize("name", REFUSED)
def test_who_insists_gets_any_draft_that_reads_the_same_inputs(name):
    """And the way out that a refusal names leads out."""
    target, draft, _ = REFUSED[name]
    if name == "another kind of model":
        with pytest.raises(ValueError, match="input: a source") as error:
            check_pair(target, draft, check_tokens=False)
        assert "check_tokens" not in str(error.value)
        return
    with pytest.raises(ValueError, match="Or give check_tokens=False"):
        check_pair(target, draft)
    check_pair(target, draft, check_tokens=False)
    failed = [check for check in compare(target, draft, tokens=False) if not check.passed]
    assert failed
    assert not any(check.required for check in failed)


def test_ids_that_mean_the_same():
    reserved = member(bpe([token.replace("<s>", "<new>") for token in VOCABULARY]))
    assert shared_ids(BASE, BASE) == (SIZE, SIZE)
    assert shared_ids(BASE, reserved) == (SIZE - 1, SIZE)
    assert shared_ids(member(bpe(added=["<tool>"])), BASE) == (SIZE, SIZE + 1)
    assert shared_ids(member(rows=32), member(rows=30)) == (30, 32)


def test_a_draft_with_fewer_positions_is_told():
    long, short = (
        dataclasses.replace(
            BASE, config=GPTConfig(1024, count, 4, 1, 1, bos_token_id=3, pad_token_id=0)
        )
        for count in (16, 8)
    )
    failed = [check for check in compare(long, short) if not check.passed]
    assert [str(c) for c in failed] == ["positions: 16 in the target and 8 in the draft"]
    assert all(check.passed for check in compare(short, long))


def test_equal_files_are_not_compared_any_further(tmp_path, monkeypatch):
    def read(name):
        return member(PreTrainedTokenizerFast.from_pretrained(tmp_path / name))

    for name in "ab":
        bpe().save_pretrained(tmp_path / name)
    one, same = read("a"), read("b")
    assert compatibility.IDENTICAL in compare(one, same)
    same.tokenizer.add_tokens(["qq"])  # in memory alone, so that the files do not show it
    assert compatibility.IDENTICAL not in compare(one, same)
    with pytest.raises(ValueError, match="vocabulary size: "):
        check_pair(same, one)
    bpe(swapped("x", "y")).save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="token ids of 'x'"):
        check_pair(one, read("b"))


# --- padding -----------------------------------------------------------------------------------


class Padded(nnx.Module):
    """Distributions by the last token, from a table in which padding is by far the likeliest."""

    def __init__(self, padding, seed):
        rows = SIZE + padding
        table = np.random.default_rng(seed).normal(size=(rows, rows)).astype(np.float32)
        table[:, SIZE:] = 1e4
        self.vocab_size, self.table = rows, nnx.Param(jnp.asarray(table))

    def start(self, inputs, buffer_len):
        return (), ()

    def __call__(self, tokens, start, context, cache):
        return self.table[...][tokens], cache

    def logits(self, hidden):
        return hidden


def padded(padding, *, seed, cut=True):
    model = LanguageModel.of(Padded(padding, seed), SIZE if cut else None)
    return dataclasses.replace(member(bpe(), rows=SIZE + padding), model=model)


@pytest.mark.parametrize("padding", [None, 3, 30])
def test_padded_ids_never_come_out_at_a_high_temperature(padding):
    """Neither without a draft, nor with one that is padded less than the target or more."""
    draft = None if padding is None else padded(padding, seed=1)
    ids = draw(padded(20, seed=0), draft)
    assert len(ids) > 5000
    assert set(ids) == set(range(SIZE))


def test_padded_ids_come_out_where_they_are_not_cut_off():
    """So the test above can fail."""
    assert set(draw(padded(20, seed=0, cut=False), None)) == set(range(SIZE, SIZE + 20))


def draw(target, draft):
    texts, options = ["a"] * 8, {"num_samples": 32, "batch_size": 256, "max_new_tokens": 32}
    result = specjax.generate(target, draft, texts, temperature=100.0, key=0, **options)
    return list(itertools.chain(*result.tokens))
