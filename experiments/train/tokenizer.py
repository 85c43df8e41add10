"""Byte-level BPE tokenizers in Hugging Face's form: one for encoder-decoders, one for text alone.

For source code and syntax trees text is cut into words (runs of letters, digits and underscores)
and single marks, each mark with the white space after it; pieces are merged inside those cuts only.
So an identifier has the same pieces wherever it occurs, in a statement or in its tree, and copying
it is looking it up. For a decoder-only model the cuts are GPT-2's, words with the space before
them. Pieces are strings of bytes and can spell any text, so decoding gives back the exact input.
"""

import os
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from specjax.checkpoints.weights import TOKENIZERS
from specjax.support import files

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"  # ids 0, 1 and 2, as in T5
_CUTS = r"\w+|[^\w\s]?\s+|[^\w\s]"


def train(
    texts: Iterable[str], vocab_size: int, *, decoder_only: bool = False
) -> tokenizers.Tokenizer:
    """Learns `vocab_size` pieces, specials and the 256 bytes among them.

    EOS ends every encoding. For a decoder-only model it begins every one instead, as the mark
    between texts that GPT-2 has: what follows a prompt is the model's to say.

    Raises:
      ValueError: the vocabulary cannot hold the bytes, or the texts do not give that many pieces.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 3:
        needed = len(alphabet) + 3
        raise ValueError(f"vocab_size={vocab_size}: bytes and specials alone need {needed}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=decoder_only)
    code = pre_tokenizers.Split(tokenizers.Regex(_CUTS), "isolated")
    tokenizer.pre_tokenizer = (
        to_bytes if decoder_only else pre_tokenizers.Sequence([code, to_bytes])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} pieces, not vocab_size={vocab_size}: "
            "use more text or a smaller vocabulary"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A" if decoder_only else f"$A {EOS}",
        pair=f"{EOS} $A {EOS} $B" if decoder_only else f"$A {EOS} $B {EOS}",
        special_tokens=[(EOS, tokenizer.token_to_id(EOS))],
    )
    return tokenizer


def to_transformers(tokenizer: tokenizers.Tokenizer, max_length: int):
    """The same tokenizer as transformers has it; inputs over `max_length` tokens are truncated."""
    from transformers import PreTrainedTokenizerFast  # imported here: it takes a second

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def save(tokenizer, directory: str | os.PathLike) -> None:
    """Write the tokenizer of `to_transformers` so that `AutoTokenizer.from_pretrained` reads it.

    Raises:
      ValueError: the directory cannot be written or holds other files, see
        `files.replacing_within`.
    """
    with files.replacing_within(directory, TOKENIZERS) as part:
        tokenizer.save_pretrained(str(part))


def load(directory: str | os.PathLike):
    """The transformers tokenizer of a directory, such as `save` or a model's export writes."""
    from transformers import AutoTokenizer

    path = pathlib.Path(directory)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"no tokenizer.json in {path}: give the directory of a trained model")
    return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
