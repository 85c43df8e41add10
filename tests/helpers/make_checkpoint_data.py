"""Makes the small files in tests/data that other libraries wrote, for tests that run without those.

    python tests/helpers/make_checkpoint_data.py

Needs torch, sentencepiece and protobuf; the files are a few kilobytes, and rarely change.
"""

import json
import pathlib
import shutil
import tempfile

import numpy as np

DATA = pathlib.Path(__file__).parents[1] / "data"
EXTRA_IDS = 5
TEXTS = (
    "parse: return self.line",
    "The  house is   wonderful, said the old man.\n",
    "",
    " ",
    "\uff21\uff22 \ufb01re \u2163",  # what the table of normalizations is for
    "<extra_id_0> is a <extra_id_4>.",
    "unknown: 漢字 €",
    "</s> and <pad> and <unk> in the midst <user>x",
)
RULES = {"\uff21": "A", "\uff22": "B", "\ufb01": "fi", "\u2163": "IV", "\n": " "}


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What the stored tensors hold: 0, 1, 2, ... as they count in every dtype."""
    count = int(np.prod(shape))
    if dtype == "bool":
        return (np.arange(count) % 2 == 1).reshape(shape)
    return np.arange(count).reshape(shape).astype(dtype)


def write_torch() -> None:
    """One file of each format with every dtype, shared storages, and strides of all kinds."""
    import torch

    kinds = ("float64", "float32", "float16", "bfloat16", "bool", "uint8", "int64")
    tensors = {
        name: torch.from_numpy(numbers((2, 3), "float32" if name == "bfloat16" else name))
        for name in kinds
    }
    tensors["bfloat16"] = tensors["bfloat16"].bfloat16()
    whole = torch.from_numpy(numbers((4, 6), "float32"))
    tensors |= {"whole": whole, "tied": whole, "turned": whole.T, "rows": whole[1:3]}
    tensors |= {"columns": whole[:, 1:4:2], "one": whole[2, 3], "empty": whole[:0]}
    tensors |= {"expanded": whole[1:2].expand(3, 6), "parameter": torch.nn.Parameter(whole)}
    module = torch.nn.Module()
    state = module.state_dict()  # an OrderedDict with attributes, as models have them
    state.update(tensors)
    torch.save(state, DATA / "torch_zip.bin")
    torch.save(state, DATA / "torch_legacy.bin", _use_new_zipfile_serialization=False)


def write_spiece() -> None:
    """A tiny sentencepiece model of T5's kind, and the ids that transformers gives with it."""
    import sentencepiece
    from transformers import T5Tokenizer

    with tempfile.TemporaryDirectory() as place:
        here = pathlib.Path(place)
        readme = pathlib.Path(__file__).parents[2] / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines()
        corpus = "\n".join(line for line in lines if line and line[0].isalpha())
        (here / "corpus.txt").write_text(corpus, encoding="utf-8")
        rules = "\n".join(
            f"{ord(a):X}\t{' '.join(f'{ord(c):X}' for c in b)}" for a, b in RULES.items()
        )
        (here / "rules.tsv").write_text(rules + "\n")
        sentencepiece.SentencePieceTrainer.train(
            input=str(here / "corpus.txt"),
            model_prefix=str(here / "spiece"),
            vocab_size=150,
            hard_vocab_limit=False,
            normalization_rule_tsv=str(here / "rules.tsv"),
            user_defined_symbols=["<user>"],
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
        )
        (here / "corpus.txt").unlink()
        tokenizer = T5Tokenizer.from_pretrained(str(here), extra_ids=EXTRA_IDS)
        ids = {text: tokenizer(text)["input_ids"] for text in TEXTS}
        special = {t: tokenizer.convert_tokens_to_ids(t) for t in tokenizer.all_special_tokens}
        shutil.copy(here / "spiece.model", DATA / "spiece.model")
    found = {"ids": ids, "special": special, "size": len(tokenizer)}
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (DATA / "spiece_ids.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_torch()
    write_spiece()
