"""The text behind a prompt: its first space, its characters as they are complete, and one BOS."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

import specjax
from experiments.beam.decoding import beam_search
from experiments.figure1 import TracedRound
from experiments.race import recording
from specjax.decoding import building
from specjax.decoding.outputs import UNFINISHED, UNSETTLED, grown, text_of
from specjax.decoding.texts import tokenize
from specjax.sampling import Sampling
from table_models import chain

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", "▁hello", "▁there", "▁", *"abchelotr", *BYTES]
ID = {piece: id for id, piece in enumerate(PIECES)}


def sentencepiece():
    """As Llama 2's: ▁ for a space, of which the decoder strips the first; bytes for the rest."""
    bpe = models.BPE(vocab=ID, merges=[], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", ID["<s>"])])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def model(after=None, **options):
    """Each id is followed by `after` of it, or else by itself."""
    after = after or {}
    successor = [after.get(id, id) for id in range(len(PIECES))]
    options = {"tokenizer": sentencepiece(), "eos_ids": (ID["</s>"],)} | options
    return specjax.wrap(chain(successor, jnp.float32), **options)


def bytes_of(text):
    return [ID[BYTES[byte]] for byte in text.encode()]


PROMPT = [ID["<s>"], ID["▁hello"]]
SPOKEN = [ID["▁there"], ID["▁"], *bytes_of("é語🙂"), ID["▁"], ID["a"], *bytes_of("é"), ID["</s>"]]
SAID = " there é語🙂 aé"


def test_a_text_keeps_its_first_space():
    assert text_of(model(), PROMPT, SPOKEN) == SAID
    assert text_of(model(), [ID["<s>"]], SPOKEN) == SAID[1:]  # as the tokenizer decodes such a text
    assert text_of(model(encoder_decoder=True), PROMPT, SPOKEN) == SAID[1:]
    assert text_of(model(tokenizer=None), PROMPT, SPOKEN) == ""


def test_a_race_keeps_the_first_space(monkeypatch):
    rounds = [TracedRound([ID["▁there"]], [], [ID["▁"]]), TracedRound([], [], [ID["a"]])]
    monkeypatch.setattr(recording, "_timed", lambda *_: (1.0, 2.0, [1.0, 1.0], rounds))
    options = {"max_new_tokens": 3, "key": jax.random.key(0), "repeats": 1}
    target = model()
    method = building.plain(target, Sampling(0.0))
    moments = recording.record("made", method, target, [PROMPT], **options).moments
    assert moments[1].pieces == [(" there", "accepted"), (" ", "corrected")]
    assert moments[2].pieces == [("a", "corrected")]


def test_a_prompt_that_ends_within_a_character():
    """What completes it belongs to the output."""
    first, *rest = bytes_of("é")
    assert text_of(model(), [*PROMPT, first], [*rest, ID["a"]]) == "éa"


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_text_is_a_prefix_of_the_next(seed):
    """However the ids come; whole words are shown at once, halves of a character never."""
    target, rng, shown, texts = model(), random.Random(seed), None, []
    end = 0
    while end < len(SPOKEN):
        end = min(end + rng.randint(1, 3), len(SPOKEN))
        text, shown = grown(target, PROMPT, SPOKEN[:end], shown)
        texts.append(text)
    assert texts[-1] == SAID
    assert UNFINISHED not in "".join(texts)
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert len(set(texts)) > 3


PROMPT_IDS = [*PROMPT, *bytes_of("語")[:2]]  # which end within a character


def test_characters_behind_a_prompt_that_ends_within_one():
    """Each is shown as soon as it is complete, though the ids behind the prompt are no UTF-8."""
    ids, shown, texts = [bytes_of("語")[2], *bytes_of("é語"), ID["a"]], None, []
    for end in range(len(ids) + 1):
        text, shown = grown(model(), PROMPT_IDS, ids[:end], shown)
        texts.append(text)
    assert texts == ["", "語", "語", "語é", "語é", "語é", "語é語", "語é語a"]
    assert text_of(model(), PROMPT_IDS, ids) == texts[-1]


def test_special_tokens_are_no_text():
    ids = [ID["</s>"], ID["▁there"], ID["<s>"], ID["▁there"]]
    assert text_of(model(), PROMPT, ids) == " there there"
    assert text_of(model(), [*PROMPT, ID["</s>"]], ids) == " there there"
    shown = text_of(model(), PROMPT, ids[:2], skip_special_tokens=False)
    assert shown == "</s> there"
    shown = None
    for end, said in enumerate(["", "", " there", " there", " there there"]):
        text, shown = grown(model(), [ID["</s>"], *PROMPT], ids[:end], shown)
        assert text == said


def unigram():
    """A tokenizer that removes spaces before punctuation when it decodes."""
    pieces = [
        "<unk>",
        "</s>",
        "▁",
        "▁a",
        "▁'",
        "'",
        "ve",
        "▁ve",
        "n",
        "▁n",
        "t",
        "▁.",
        "!",
        "▁there",
    ]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=True,
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_text_keeps_no_space_that_is_removed(seed):
    target, rng = model(tokenizer=unigram(), eos_ids=(1,)), random.Random(seed)
    known = rng.choices(range(1, 14), k=30)
    prompt, ids, shown, texts = known[:4], known[4:], None, []
    for end in range(len(ids) + 1):
        text, shown = grown(target, prompt, ids[:end], shown)
        texts.append(text)
    texts.append(text_of(target, prompt, ids))
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert len(texts[-2]) >= len(texts[-1]) - UNSETTLED


def test_a_long_text_is_not_decoded_again(monkeypatch):
    """Each step decodes what came since the last two, however long the text is."""
    target, counts, shown = model(), [], None
    decode = target.tokenizer.decode
    monkeypatch.setattr(
        target.tokenizer, "decode", lambda ids, **how: counts.append(len(ids)) or decode(ids, **how)
    )
    for count in range(4, 400, 4):
        _, shown = grown(target, PROMPT, [ID["▁there"]] * count, shown)
    assert max(counts) <= 10


def test_rows_and_progress():
    """Through the loop: "hello" is followed by " there", and the bytes of a character follow."""
    chained = [ID["▁hello"], ID["▁there"], *bytes_of("é語"), ID["▁"], ID["</s>"]]
    target = model(dict(itertools.pairwise(chained)))
    events = list(specjax.stream(target, None, [PROMPT], every=1, max_new_tokens=9))
    assert [event.text for event in events] == [
        " there", " there", " thereé", " thereé", " thereé", " thereé語", " thereé語 ", " thereé語 "
    ]  # fmt: skip
    assert isinstance(events[-1], specjax.Row)
    rows = beam_search(target, None, [PROMPT], width=1, max_new_tokens=9)
    assert rows[0].hypotheses[0].text == " thereé語 "


def test_beams_without_a_tokenizer():
    rows = beam_search(model(tokenizer=None), None, [[5]], width=1, max_new_tokens=2)
    assert [(one.tokens, one.text) for one in rows[0].hypotheses] == [([5, 5], "")]


def test_a_text_that_begins_with_bos_gets_one():
    """As chat templates write it; what the user repeats stays repeated."""
    target, bos = model(), ID["<s>"]
    texts = ["hello", "<s>hello", "<s><s>hello", "", "<s>"]
    counts = [ids.count(bos) for ids in tokenize(target, texts)]
    assert counts == [1, 1, 2, 1, 1]
    ids = [bos, bos, ID["a"]]
    assert tokenize(target, [ids]) == [ids]
