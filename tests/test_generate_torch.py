"""experiments.decode at temperature 0 against transformers' own greedy `generate`.

Skipped where torch is not installed.
"""

import functools
import json

import pytest
import transformers

import command_line
import pairs
from t5_variants import V1_1, Variant

torch = pytest.importorskip("torch")

from test_parity_torch import saved_by_transformers  # noqa: E402  needs torch

pytestmark = [
    pytest.mark.torch,
    # transformers' and torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
ROWS = {"vocab_size": pairs.IDS}
DRAFT = Variant("draft", {**ROWS, "num_layers": 1, "num_decoder_layers": 1})
TARGETS = [
    Variant("v1_0", ROWS),
    Variant("v1_1", {**V1_1, **ROWS}, own_head=True),
    Variant("odd_heads", {**V1_1, **ROWS, "num_heads": 3, "d_kv": 5}, own_head=True),
    Variant("deep_encoder", {**ROWS, "num_layers": 3, "num_decoder_layers": 1}),
]


def write(directory, variant):
    """A model and the tokenizer, as transformers saves them."""
    saved_by_transformers(directory, variant)
    pairs.make_tokenizer().save_pretrained(directory)
    return directory


def greedy(directory):
    """transformers' own tokens for each text, up to EOS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory)
    batch = tokenizer(pairs.TEXTS, return_tensors="pt", padding=True)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found = model.generate(**ids, do_sample=False, max_new_tokens=24)[:, 1:].tolist()
    return [row[: row.index(1) + 1] if 1 in row else row for row in found]


@pytest.mark.parametrize("variant", TARGETS, ids=lambda variant: variant.name)
def test_greedy_tokens_are_those_of_transformers(variant, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    target = write(tmp_path / "target", variant)
    draft = write(tmp_path / "draft", DRAFT)
    (tmp_path / "in.txt").write_text("\n".join(pairs.TEXTS))
    run = functools.partial(
        command_line.run,
        monkeypatch,
        capsys,
        "experiments.decode",
        "--config=configs/decode.py",
        f"--config.target={target}",
        f"--config.draft={draft}",
        "--config.max_new_tokens=24",
        f"--input={tmp_path / 'in.txt'}",
    )
    expected = greedy(target)
    assert len({tuple(row) for row in expected}) > 4
    for method in ("autoregressive", "speculative"):
        outcome = run(f"--config.method={method}")
        assert outcome.status == 0, outcome.stderr
        rows = [json.loads(line) for line in outcome.stdout.split("\n")[:-1]]
        assert [row["tokens"] for row in rows] == expected
