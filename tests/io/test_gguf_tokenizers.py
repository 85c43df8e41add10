"""A GGUF's tokenizer follows the file as llama.cpp does. Expectations are rules of the published
tokenizers, written down by hand, or ids that were made without GGUF."""

import json
import re

import gguf
import numpy as np
import pytest

import gguf_variants as variants
import make_checkpoint_data
from specjax.checkpoints import convert, load, outline, tokenizers
from specjax.checkpoints.formats import spiece


def written(path, vocabulary, architecture="llama"):
    """A file that is read as far as its tokenizer."""
    writer = gguf.GGUFWriter(path / "x.gguf", architecture)
    variants.add_vocabulary(writer, vocabulary)
    writer.add_tensor("token_embd.weight", np.ones((len(vocabulary["tokens"]), 1), np.float32))
    variants.finish(writer)
    return path / "x.gguf"


def pieces(path, vocabulary, text):
    tokenizer = tokenizers.from_gguf(written(path, vocabulary))
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def without(vocabulary, *keys):
    return {key: value for key, value in vocabulary.items() if key not in keys}


# --- how texts are split -------------------------------------------------------------------------

TEXT = "we'LL pay 12345\n\n  NowOr!\n"
WORDS = {
    "gpt-2": "we ' LL Ġpay Ġ12345 ĊĊĠ ĠNowOr ! Ċ",
    "smollm": "we ' LL Ġpay Ġ 1 2 3 4 5 ĊĊĠ ĠNowOr ! Ċ",
    "starcoder": "we ' LL Ġpay Ġ 1 2 3 4 5 ĊĊĠ ĠNowOr ! Ċ",
    "qwen2": "we 'LL Ġpay Ġ 1 2 3 4 5 ĊĊ Ġ ĠNowOr !Ċ",
    "seed-coder": "we 'LL Ġpay Ġ 1 2 3 4 5 ĊĊ Ġ ĠNowOr ! Ċ",
    "llama-bpe": "we 'LL Ġpay Ġ 123 45 ĊĊ Ġ ĠNowOr !Ċ",
    "tekken": "we 'LL Ġpay Ġ 1 2 3 4 5 ĊĊ Ġ ĠNow Or !Ċ",
    "gpt-4o": "we'LL Ġpay Ġ 123 45 ĊĊ Ġ ĠNow Or !Ċ",
    "deepseek-coder": "we ' LL Ġpay Ġ 1 2 3 4 5 Ċ Ċ Ġ ĠNowOr ! Ċ",
    "superbpe": "we'LLĠpayĠ 12 345 ĊĊĠĠNowOr!Ċ",
    "default": "we ' LL Ġpay Ġ 123 45 ĊĊĠ ĠNowOr ! Ċ",
}


@pytest.mark.parametrize("pre", WORDS)
def test_pre_names_the_split(pre, tmp_path):
    tokenizer = tokenizers.from_gguf(written(tmp_path, variants.bpe() | {"pre": pre}))
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [word for word, _ in words] == WORDS[pre].split()


def test_a_file_without_pre_gives_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"x\.gguf has no tokenizer\.ggml\.pre"):
        assert pieces(tmp_path, without(variants.bpe(), "pre"), "a 12") == ["a", "Ġ", "12"]


@pytest.mark.parametrize("pre", ["llama-bpe", "falcon3", "tekken", "qwen2"])
def test_a_whole_word_comes_before_merges(pre, tmp_path):
    """Llama 3 and Tekken take a word that no merge makes."""
    vocabulary = variants.bpe() | {"pre": pre}
    at = vocabulary["tokens"].index("[PAD271]")
    vocabulary["tokens"][at], vocabulary["token_type"][at] = "Ġword", 1
    words = ["Ġ", "w", "o", "r", "d"] if pre == "qwen2" else ["Ġword"]
    assert pieces(tmp_path, vocabulary, "a word") == ["a", *words]


# --- marks and spaces ----------------------------------------------------------------------------

SENTENCEPIECE, T5 = variants.sentencepiece(), variants.unigram()
BOS = "<|endoftext|>"
IDS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
MARKS = {
    "Llama 3": ({**without(variants.bpe(), "add_bos_token"), "pre": "llama-bpe"}, BOS, None),
    "Tekken": ({**without(variants.bpe(), "add_bos_token"), "pre": "tekken"}, BOS, None),
    "Qwen": (without(variants.bpe(), "add_bos_token"), None, None),
    "SentencePiece": (without(SENTENCEPIECE, "add_bos_token", *IDS), "<s>", None),
    "said": (SENTENCEPIECE | {"add_bos_token": False, "add_eos_token": True}, None, "</s>"),
    "T5": (without(T5, "add_bos_token", "add_eos_token", *IDS), None, "</s>"),
}


@pytest.mark.parametrize("case", MARKS)
def test_marks_that_a_file_leaves_out(case, tmp_path):
    vocabulary, begin, end = MARKS[case]
    expected = [mark for mark in (begin, "a", end) if mark is not None]
    found = pieces(tmp_path, vocabulary, "a")
    assert [piece.strip("▁") for piece in found] == expected


SPACES = {
    "SentencePiece": (SENTENCEPIECE, {}, "the a", "<s> ▁the ▁a"),
    "spaces before": (SENTENCEPIECE, {}, " the", "<s> ▁ ▁the"),
    "behind a mark": (SENTENCEPIECE, {}, "the</s>the", "<s> ▁the </s> ▁the"),
    "no prefix": (SENTENCEPIECE, {"add_space_prefix": False}, "the a", "<s> th e ▁a"),
    "no prefix behind a mark": (SENTENCEPIECE, {"add_space_prefix": False}, "</s>a", "<s> </s> a"),
    "T5": (T5, {}, " the  a ", "▁the ▁a </s>"),
    "all spaces": (T5, {"remove_extra_whitespaces": False}, "the  a ", "▁the ▁ ▁a ▁ </s>"),
    "T5, no prefix": (T5, {"add_space_prefix": False}, "the a", "th e ▁a </s>"),
    "T5, a sentinel": (T5, {}, "the <extra_id_0> the", "▁the <extra_id_0> ▁the </s>"),
}


@pytest.mark.parametrize("case", SPACES)
def test_spaces(case, tmp_path):
    vocabulary, changes, text, expected = SPACES[case]
    assert pieces(tmp_path, vocabulary | changes, text) == expected.split()


def test_ids_of_a_t5_are_those_of_its_spiece_model(tmp_path):
    """The stored ids are transformers' from the spiece.model, whose table composes ligatures."""
    stored = json.loads((make_checkpoint_data.DATA / "spiece_ids.json").read_text())
    source = spiece.read(make_checkpoint_data.DATA / "spiece.model")
    texts, scores, types = zip(*((p.piece, p.score, p.type) for p in source.pieces), strict=True)
    vocabulary = T5 | {
        "tokens": list(texts),
        "scores": list(scores),
        "token_type": list(types),
        "precompiled_charsmap": source.normalizer_spec.precompiled_charsmap,
    }
    tokenizer = tokenizers.from_gguf(written(tmp_path, vocabulary, "t5"))
    plain = [text for text in stored["ids"] if "extra_id" not in text]
    assert len(plain) > 5
    for text in plain:
        assert tokenizer(text)["input_ids"] == stored["ids"][text], text


# --- ends of a row -------------------------------------------------------------------------------

LAST = len(SENTENCEPIECE["tokens"])  # the id of the token that `chat_model` adds
TURN = "{% for m in messages %}{{ m['content'] }}END{% endfor %}"
ENDS = {
    "Gemma": ("<end_of_turn>", 3, True),
    "Llama 3": ("<|eot_id|>", 3, True),
    "ChatML": ("<|im_end|>", 3, True),
    "not special": ("<|im_end|>", 4, True),
    "not in the template": ("<|eom_id|>", 3, True),
    "a tag": ("<eos>", 4, False),
    "another control token": ("<start_of_turn>", 3, False),
}


def chat_model(path, end, kind, **changes):
    """A Llama whose metadata names `</s>` alone."""
    vocabulary = variants.sentencepiece()
    vocabulary["tokens"].append(end)
    vocabulary["token_type"].append(kind)
    vocabulary["scores"].append(0.0)
    in_template = end if end not in ("<|eom_id|>", "<eos>") else "</s>"
    vocabulary |= {"chat_template": TURN.replace("END", in_template)} | changes
    module, variant = variants.MODELS["llama"]
    variant = variants.changed(variant, vocab_size=len(vocabulary["tokens"]))
    arrays = module.tensors(variant)
    return variants.write(path / "x.gguf", variant, arrays, vocabulary=vocabulary)


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_turn_ends_a_row(case, tmp_path):
    end, kind, ends = ENDS[case]
    assert outline(chat_model(tmp_path, end, kind)).eos_ids == ((2, LAST) if ends else (2,))


def test_without_a_template_a_row_ends_by_its_metadata(tmp_path):
    assert outline(chat_model(tmp_path, "<|im_end|>", 3, chat_template="")).eos_ids == (2,)
    ids = {"eos_token_ids": [2, 5], "eot_token_id": 6, "eom_token_id": 7}
    assert outline(chat_model(tmp_path, "<x>", 3, **ids)).eos_ids == (2, 5, 6, 7)


def test_a_directory_keeps_its_ends(tmp_path):
    """`convert` writes them, and a directory that names one end ends by its template too."""
    convert(chat_model(tmp_path, "<|im_end|>", 3), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((tmp_path / "out" / name).read_text())
        assert raw["eos_token_id"] == [2, LAST]
        (tmp_path / "out" / name).write_text(json.dumps(raw | {"eos_token_id": 2}))
    assert outline(tmp_path / "out").eos_ids == (2, LAST)


def test_ids_of_a_chat_model(tmp_path):
    """Both the end of a turn and the end of a text end a row; padding has no more ids."""
    found = load(variants.with_vocabulary(tmp_path / "x.gguf", "bpe"))
    names = found.tokenizer.convert_ids_to_tokens(list(found.eos_ids))
    assert set(names) == {"<|im_end|>", "<|endoftext|>"}
    assert found.tokenizer.eos_token == "<|im_end|>"
    assert found.tokenizer("<think>a")["input_ids"][0] == len(variants.bpe()["merges"]) + 256 + 3


def test_rows_without_a_token(tmp_path):
    """llama.cpp names them [PAD…]; they are no ids, but for T5's <extra_id_…>."""
    bpe = variants.bpe()
    count = sum(not token.startswith("[PAD") for token in bpe["tokens"])
    found = load(variants.with_vocabulary(tmp_path / "x.gguf", "bpe"))
    assert found.model.vocab_size == len(found.tokenizer) == count < found.config.vocab_size == 300
    module, variant = variants.MODELS["t5 v1.1"]
    unigram = variants.unigram()
    count = len(unigram["tokens"])
    for key, value in (("tokens", "[PAD{}]"), ("scores", -1e4), ("token_type", 5)):
        unigram[key] += [
            value.format(i) if key == "tokens" else value for i in range(count, count + 28)
        ]
    variant = variants.changed(variant, vocab_size=count + 28)
    file = variants.write(tmp_path / "y.gguf", variant, module.tensors(variant), vocabulary=unigram)
    found = load(file)
    assert found.model.vocab_size == len(found.tokenizer) == count
    assert found.tokenizer("<extra_id_0>")["input_ids"] == [count - 1, 1]


# --- what is refused -----------------------------------------------------------------------------

SOME = "should be an id of its 300 tokens"
REFUSED = {
    "an id beyond": ({"eos_token_id": 9_999}, f"eos_token_id=9999 {SOME}"),
    "a list beyond": ({"eos_token_ids": [3, 300]}, f"eos_token_ids=300 {SOME}"),
    "a truth value": ({"unknown_token_id": True}, f"unknown_token_id=True {SOME}"),
    "a float": ({"bos_token_id": 1.5}, f"bos_token_id=1.5 {SOME}"),
    "a text": ({"padding_token_id": "x"}, f"padding_token_id='x' {SOME}"),
    "a flag": ({"add_bos_token": 7}, "add_bos_token=7 should be a truth value"),
    "no mark to add": ({"add_eos_token": True, "eos_token_id": None}, "eos_token_id is missing"),
    "fewer types": ({"token_type": [1]}, "token_type should be 300 finite numbers"),
    "no merges": ({"merges": None}, "merges are missing"),
    "a merge of one": ({"merges": ["abc"]}, "'abc' should be two tokens"),
    "a merge of others": ({"merges": ["abc abd"]}, "cannot be read"),
    "no texts": ({"merges": [3]}, "merges should be a list of texts"),
    "another split": ({"pre": "viking"}, "pre='viking' is not supported"),
    "an unknown kind": ({"model": "rwkv"}, "model='rwkv' is not supported"),
    "no scores": ({"model": "llama"}, "scores should be 300 finite numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizers_are_checked(case, tmp_path):
    changes, message = REFUSED[case]
    vocabulary = {k: v for k, v in (variants.bpe() | changes).items() if v is not None}
    with pytest.raises(ValueError, match=rf"x\.gguf.*{re.escape(message)}") as error:
        tokenizers.from_gguf(written(tmp_path, vocabulary))
    assert "\n" not in str(error.value)
    assert "again" not in str(error.value) or case == "a merge of others"


def test_ids_of_a_config_are_checked(tmp_path):
    """A file that decodes ids without a tokenizer has them too."""
    module, variant = variants.MODELS["llama"]
    vocabulary = {"eos_token_id": 40}
    file = variants.write(
        tmp_path / "x.gguf", variant, module.tensors(variant), vocabulary=vocabulary
    )
    with pytest.raises(ValueError, match=r"x\.gguf: tokenizer\.ggml\.eos_token_id=40 should be"):
        outline(file)
