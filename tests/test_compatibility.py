"""Which pairs are accepted, and why the others are not."""

import re
from typing import Any

import pytest

from specjax.compatibility import check_pair
from specjax.models.gpt import GPTConfig
from specjax.models.hub import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5Config
from test_hub import WORDS, make_tokenizer


def pair_member(name="m", *, rows=32, words=None, real=None, start=0, decoder_only=False):
    """A checkpoint with a tokenizer of `words`, or of `rows` ids without one."""
    config: Any = T5Config(rows, 4, 2, 4, 1, 1, 1, decoder_start_token_id=start)
    if decoder_only:
        config = GPTConfig(rows, 8, 4, 1, 1, bos_token_id=start, pad_token_id=0)
    tokenizer = make_tokenizer(words) if words else None
    real = real or (len(words) if words else rows)
    model = LanguageModel({}, None, real)  # type: ignore[arg-type]
    return Checkpoint(name, model, config, tokenizer)


def test_equal_vocabularies_may_pad_differently():
    check_pair(pair_member(rows=32, words=WORDS), pair_member(rows=40, words=WORDS))
    check_pair(pair_member(rows=32, words=WORDS), pair_member(rows=40))
    check_pair(pair_member(rows=40), pair_member(rows=32, words=WORDS))
    check_pair(pair_member(rows=32), pair_member(rows=32))


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (
            pair_member("big", words=WORDS),
            pair_member("small", words=[*WORDS[:4], "c", "b", *WORDS[6:]]),
            r"target big and the draft small .*: 'b' has id 4 in the target and id 5 in the draft",
        ),
        (
            pair_member(words=WORDS),
            pair_member(words=WORDS[:-1]),
            "'z' has id 28 in the target and no id in the draft",
        ),
        (
            pair_member(words=WORDS),
            pair_member(words=[*WORDS, "!"]),
            "'!' has no id in the target and id 29 in the draft",
        ),
        (pair_member(rows=32), pair_member(rows=40), "32 and 40 ids"),
        (pair_member(words=WORDS), pair_member(rows=900), "29 and 900 ids"),
        (pair_member(words=WORDS), pair_member(rows=28), "29 and 28 ids"),
        (pair_member(), pair_member(start=2), r"decoder_start_token_id is 0 and 2"),
        (
            pair_member(decoder_only=True),
            pair_member(start=2, decoder_only=True),
            "bos_token_id is 0 and 2",
        ),
        (
            pair_member(),
            pair_member(decoder_only=True),
            "read the text differently, as a source and as a prompt",
        ),
    ],
)
def test_different_vocabularies_are_refused(target, draft, message):
    with pytest.raises(ValueError, match=message) as error:
        check_pair(target, draft)
    assert re.search("choose or train a", str(error.value), re.IGNORECASE)
