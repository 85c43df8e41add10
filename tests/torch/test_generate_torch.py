"""specjax decode and `generate` at temperature 0 against transformers' own greedy `generate`.

Skipped where torch is not installed.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import transformers
from tokenizers import processors

import command_line
import gemma_variants
import gpt_variants
import llama_variants
import pairs
from experiments.train import tokenizer as tokenizers
from specjax.checkpoints import load
from specjax.generation import generate
from t5_variants import V1_1, Variant
from tiny_models import slow

torch = pytest.importorskip("torch")

from test_parity_torch import (  # noqa: E402  needs torch
    causal_saved_by_transformers,
    saved_by_transformers,
)

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


@pytest.mark.parametrize(
    "variant",
    [*TARGETS[:2], *((slow((variant,))) for variant in TARGETS[2:])],
    ids=lambda variant: variant.name,
)
def test_greedy_tokens_are_those_of_transformers(variant, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    target = write(tmp_path / "target", variant)
    draft = write(tmp_path / "draft", DRAFT)
    (tmp_path / "in.txt").write_text("\n".join(pairs.TEXTS))
    run = functools.partial(
        command_line.run,
        monkeypatch,
        capsys,
        "specjax decode",
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


LENGTH = "max_position_embeddings"
PROMPTS = [*pairs.TEXTS, "", "x"]


def write_causal(directory, variant):
    """A model with many ids that end a row, and a tokenizer that adds none, as GPT-2's own."""
    size = pairs.IDS + (variant.name == "qwen2")  # transformers adds an id to its tokenizer
    eos_ids = [1, *range(3, pairs.IDS, 20)]
    ids = {"vocab_size": size, "eos_token_id": eos_ids, "pad_token_id": 0}
    length = "n_positions" if variant in gpt_variants.VARIANTS.values() else LENGTH
    config = {**variant.config, **ids, "bos_token_id": 1, length: 48}
    causal_saved_by_transformers(directory, dataclasses.replace(variant, config=config))
    tokenizer = tokenizers.train(pairs.TEXTS, pairs.IDS, decoder_only=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def greedy_causal(directory):
    """transformers' own continuation of each prompt alone; it too starts from bos without one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    outputs = []
    for text in PROMPTS:
        ids = tokenizer(text)["input_ids"]
        given = {"input_ids": torch.tensor([ids])} if ids else {}
        found = model.generate(**given, do_sample=False, max_new_tokens=24)[0]
        outputs.append(found[max(len(ids), 1) :].tolist())
    return outputs


@pytest.mark.parametrize(
    "variant",
    [
        gpt_variants.VARIANTS["untied"],
        slow((gpt_variants.VARIANTS["odd_heads"],)),
        *(llama_variants.VARIANTS[name] for name in ("llama3", "qwen3")),
        *(gemma_variants.VARIANTS[name] for name in ("gemma2", "gemma3")),
        *(slow((llama_variants.VARIANTS[name],)) for name in ("mistral", "qwen2")),
    ],
    ids=lambda variant: variant.name,
)
def test_greedy_continuations_are_those_of_transformers(variant, tmp_path):
    """Prompts of many lengths in one batch, the empty one among them."""
    target = load(write_causal(tmp_path, variant))
    rng = np.random.default_rng(0)
    near = jax.tree.map(lambda x: x * (1 + 0.05 * rng.normal(size=x.shape)), target.model)
    draft = dataclasses.replace(target, name="near", model=near)
    expected = greedy_causal(tmp_path)
    assert len(set(map(tuple, expected))) > 4
    lengths = [len(row) for row in expected]
    assert min(lengths) < 24 == max(lengths)
    for drafter in (None, draft):
        found = generate(target, drafter, PROMPTS, gamma=3, temperature=0, max_new_tokens=24)
        assert found.tokens == expected
    assert 0 < sum(row.accepted for row in found.rows) < sum(row.verified for row in found.rows)


@pytest.mark.parametrize(
    "variant",
    [slow((gpt_variants.VARIANTS["untied"],)), llama_variants.VARIANTS["llama3"]],
    ids=lambda variant: variant.name,
)
def test_decode_continues_as_transformers_do(variant, tmp_path, monkeypatch, capsys):
    """A target and a draft saved by transformers, of one layer; either method."""
    layers = "n_layer" if variant in gpt_variants.VARIANTS.values() else "num_hidden_layers"
    small = dataclasses.replace(variant, config={**variant.config, layers: 1})
    target = write_causal(tmp_path / "target", variant)
    draft = write_causal(tmp_path / "draft", small)
    file = tmp_path / "in.txt"
    file.write_text("".join(f"{text}\n" for text in PROMPTS))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    expected = greedy_causal(target)
    for method in ("autoregressive", "speculative"):
        outcome = command_line.run(
            monkeypatch, capsys, "specjax decode", "--config=configs/decode.py",
            f"--config.target={target}", f"--config.draft={draft}", f"--input={file}",
            "--config.max_new_tokens=24", f"--config.method={method}",
        )  # fmt: skip
        assert outcome.status == 0, outcome.stderr
        rows = [json.loads(line) for line in outcome.stdout.split("\n")[:-1]]
        assert [row["tokens"] for row in rows] == expected
