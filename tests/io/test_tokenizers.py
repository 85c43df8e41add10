"""Files of tokenizers: all are fetched and read, a lack of pieces is an error, and no code runs."""

import base64
import builtins
import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

import gpt_variants
import make_checkpoint_data
import pairs
import t5_variants
from command_line import ROOT
from specjax.checkpoints import FAMILIES, load, save, tokenizers
from specjax.checkpoints.formats import spiece
from specjax.checkpoints.weights import wanted
from specjax.decoding import outputs
from specjax.decoding.texts import tokenize
from specjax.doctor import verdicts

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def directory(tmp_path):
    """A GPT-2 of 40 ids without a tokenizer."""
    return gpt_variants.write(tmp_path / "gpt", gpt_variants.VARIANTS["tied"])


def write_pieces(directory):
    """vocab.json and merges.txt of 28 pieces."""
    vocab = {token: i for i, token in enumerate((*LETTERS, "ab", "<|endoftext|>"))}
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("#version: 0.2\na b\n")


def test_all_files_of_a_tokenizer_are_wanted():
    """Files of the classes that transformers has for our families, and its templates."""
    names = {"tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    for family in FAMILIES:
        name = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(family)
        made = name and tokenization_auto.tokenizer_class_from_name(name)
        names |= set(getattr(made, "vocab_files_names", {}).values())
    names |= {"vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt"}
    assert names - set(wanted(names - {"tokenizer.json"})) == {"tokenizer.json"} & names
    assert "chat_template.jinja" in wanted([*names, "tokenizer.json"])
    assert wanted(["onnx/vocab.json", "README.md", "model.safetensors"]) == ["model.safetensors"]


def test_a_vocabulary_and_merges_are_a_tokenizer(directory):
    write_pieces(directory)
    found = load(directory)
    assert found.model.vocab_size == 28
    assert found.tokenizer("abc")["input_ids"] == [26, 2]


def test_a_tokenizer_without_pieces_is_refused(directory):
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    message = rf"{directory}: .* 1 pieces, and the embedding 40 rows.*vocab\.json.* not there"
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_the_doctor_stands_a_vocabulary_of_one_id():
    assert verdicts.outputs([[0], [0]], 0.0, 1).verdict == "warn"


def test_added_tokens_beyond_the_embedding_are_cut(tmp_path):
    directory = pairs.write(tmp_path / "target", padding=0)
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<never>"]})
    tokenizer.save_pretrained(str(directory))
    with pytest.warns(UserWarning, match=r"neither read nor say '<never>'") as caught:
        found = load(directory)
    assert caught[0].filename == __file__
    assert found.model.vocab_size == pairs.IDS
    assert tokenize(found, ["value"])[0]
    with pytest.raises(ValueError, match=rf"{pairs.IDS} in 'value<never>' is no token id of"):
        tokenize(found, ["value<never>"])


@pytest.mark.parametrize("name", ["parse/target", "prose/draft"])
def test_a_generic_tokenizer_needs_no_auto_class(name, monkeypatch):
    """The import of `AutoTokenizer` takes a second; what is loaded is the same."""
    directory = ROOT / "families" / name
    expected = AutoTokenizer.from_pretrained(str(directory))
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    found = tokenizers.load(directory)
    assert type(found) is type(expected)
    text = "return self.line  # <unk> é"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.special_tokens_map == expected.special_tokens_map


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", None])
def test_no_code_of_a_checkpoint_runs(tokenizer_class, directory, monkeypatch):
    """Nobody is asked whether it may, and a "yes" on stdin does not help it."""
    mark = directory / "ran"
    (directory / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Mine: pass\n")
    write_pieces(directory)
    code = {"auto_map": {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "mine.Mine"}}
    raw = json.loads((directory / "config.json").read_text())
    unknown = {} if tokenizer_class else {"model_type": "mine"}
    (directory / "config.json").write_text(json.dumps(raw | code | unknown))
    kind = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(code | kind))
    asked = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "yes")
    if tokenizer_class:
        assert tokenizers.load(directory)("ab")["input_ids"] == [26]
    else:
        with pytest.raises(ValueError, match="specjax runs no code of a checkpoint"):
            tokenizers.load(directory)
    assert not asked
    assert not mark.exists()
    assert not any(name.startswith("transformers_modules.") for name in sys.modules)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "after 1 s",
        ),
        ("{{ 'a' * 1000000000 }}", "needs more than 512 MB"),
        ("{{ '%1000000000d' % 1 }}", "needs more than 512 MB"),
        ("{{ 'a' | center(20000000) }}", "a prompt of 20,000,000 letters, more than 16,777,216"),
        ("a" * 2**21, "it has 2,097,152 letters, more than 1,048,576"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_has_limits(template, said):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    chat = [{"role": "user", "content": "é"}]
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"The chat template of x refuses .*{re.escape(said)}"):
        tokenizers.chat_prompt(tokenizer, chat, "x")
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenizers.chat_prompt(tokenizer, chat, "x") == "é"


@pytest.mark.parametrize(
    ("template", "expected"),
    [("$A </s>", ([], [1])), ("<s> $A", ([0], [])), ("<s> $A </s>", ([0], [1])), ("$A", ([], []))],
)
def test_marks_of_a_tokenizer(template, expected):
    made = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    ids = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    assert tokenizers.marks(PreTrainedTokenizerFast(tokenizer_object=made)) == expected


def test_a_panic_names_the_text(capfd):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert tokenizers.encode(made, "b") == [0]
    for text, shown in (("a" * 40 + "b", "aaaab'.*panicked"), ("\ud800", r"'\\ud800'")):
        with pytest.raises(ValueError, match=rf"cannot read the text .*{shown}"):
            tokenizers.encode(made, text)
    capfd.readouterr()  # the library's own report


CHARSMAPS = (b"\xff\xff\xff\xff\xff\x00", b"\x00", b"\x03\x00\x00\x00abcd")


@pytest.mark.parametrize("table", CHARSMAPS)
def test_a_charsmap_that_is_not_as_long_as_it_says(table, tmp_path):
    """The tokenizers library would allocate 8 GB, and abort the process where it cannot."""
    directory = t5_variants.write(tmp_path / "t5", t5_variants.VARIANTS["v1_0"])
    length = bytes([len(table)])
    message = b"\x12" + length + table
    stored = (make_checkpoint_data.DATA / "spiece.model").read_bytes()
    assert spiece.is_charsmap(spiece.read(make_checkpoint_data.DATA / "spiece.model").charsmap)
    spoiled = stored + b"\x1a" + bytes([len(message)]) + message  # the last of a field counts
    (directory / "spiece.model").write_bytes(spoiled)
    with pytest.raises(ValueError, match=r"spiece\.model is cut short or damaged"):
        load(directory)
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    raw = {"normalizer": {"type": "Sequence", "normalizers": [normalizer]}}
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged \(precompiled_charsmap\)"):
        load(directory)


# --- ByT5: bytes, without a file of pieces -------------------------------------------------------

BYTES = "é 日本 👩\u200d👧 </s>a <extra_id_1>"


@pytest.fixture
def byt5(tmp_path):
    """A ByT5 as published: of its tokenizer there is only tokenizer_config.json."""
    directory = t5_variants.write(tmp_path / "byt5", t5_variants.OTHERS["byt5"])
    kind = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, "model_max_length": 99}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))
    return directory


def test_ids_of_a_byt5_are_bytes(byt5, tmp_path, monkeypatch):
    expected = AutoTokenizer.from_pretrained(str(byt5))
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    found = load(byt5)
    text = "ab é日"
    assert found.tokenizer(text)["input_ids"] == [byte + 3 for byte in text.encode()] + [1]
    assert (found.model.vocab_size, found.max_source_len, found.pad_id) == (384, 99, 0)
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_124>"]
    assert [found.tokenizer.convert_tokens_to_ids(token) for token in special] == [
        expected.convert_tokens_to_ids(token) for token in special
    ]
    save(tmp_path / "again", found)
    for tokenizer in (found.tokenizer, load(tmp_path / "again").tokenizer):
        for one in (BYTES, text, "", " "):
            ids = expected(one)["input_ids"]
            assert tokenizer(one)["input_ids"] == ids
            assert tokenizer.decode(ids) == expected.decode(ids)


def test_a_stream_of_bytes_breaks_no_character(byt5):
    """Any number of bytes at a time, and bytes that are no UTF-8 among them."""
    target = load(byt5)
    broken = [byte + 3 for byte in b"\xf0\x9fa\x80b"]
    whole = [*target.tokenizer(BYTES)["input_ids"][:-1], *broken, 1]
    rng = np.random.default_rng(0)
    for _ in range(50):
        shown, end, text = None, 0, ""
        while end < len(whole):
            end += rng.integers(1, 4)
            before = text
            text, shown = outputs.grown(target, [], whole[:end], shown)
            assert text.startswith(before)
            assert "\ufffd" not in text
        assert text == outputs.text_of(target, [], whole)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (200, "the tokenizer has 384 ids and the model only 200"),
        (1000, "the tokenizer has 384 pieces, and the embedding 1000 rows.*another model's"),
    ],
)
def test_a_vocabulary_that_is_no_byt5s(rows, message, byt5):
    variant = t5_variants.OTHERS["byt5"]
    config = {**variant.config, "vocab_size": rows}
    t5_variants.write(byt5, dataclasses.replace(variant, config=config))
    with pytest.raises(ValueError, match=message):
        load(byt5)
