"""Parity with transformers' own reading of the same GGUF file: logits and ids.

Skipped where torch is not installed. transformers' `from_pretrained` asks for accelerate, which
takes no part in the numbers: the tests call what it calls.
"""

import numpy as np
import pytest
import transformers

import gguf_variants as variants
import t5_variants
from specjax.checkpoints import convert, load

torch = pytest.importorskip("torch")

import test_parity_torch as parity  # noqa: E402  needs torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
# transformers reads neither Llama 3's factors of frequencies, yarn, windows nor biases, no T5
# without gates, and no GPT-2 whose head is its own.
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # its defaults
READ = {
    "llama": {"rope_scaling": None},
    "qwen2": {},
    "qwen3": {"rope_scaling": None},
    "gemma2": CAPS,
    "gemma3": {"rope_scaling": None, "final_logit_softcapping": None},
    "gpt2": {},
    "t5 v1.1": {},
}


# Fields that transformers leaves at their defaults.
ELSEWHERE = (
    *("vocab_size", "n_positions", "head_dim", "feed_forward_proj"),
    *("query_pre_attn_scalar", "rope_local_base_freq"),
)


def read_by_transformers(path, encoder_decoder, **sizes):
    """A model of torch in float32, with some fields of config.json given."""
    fields = load_gguf_checkpoint(path)["config"] | sizes
    config = transformers.AutoConfig.for_model(**fields)
    kind = (
        transformers.AutoModelForSeq2SeqLM if encoder_decoder else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    if "lm_head.weight" in read:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # its own
    found = model.load_state_dict(read, strict=False)
    assert not found.unexpected_keys
    assert all("embed_tokens" in name or "lm_head" in name for name in found.missing_keys)
    return model


def logits_of_both(path, model, ours):
    """Logits of transformers from the file, and of specjax from another place."""
    module, variant = variants.MODELS[model]
    sizes = {k: variant.raw[k] for k in ELSEWHERE if k in variant.raw}
    theirs = read_by_transformers(path, module is t5_variants, **sizes)
    with torch.no_grad():
        if module is t5_variants:
            source, lengths, tokens = inputs = module.inputs(variant)
            mask = np.arange(source.shape[1])[None, :] < lengths[:, None]
            given = {"attention_mask": torch.tensor(mask)}
            given["decoder_input_ids"] = torch.tensor(tokens, dtype=torch.long)
            expected = theirs(torch.tensor(source, dtype=torch.long), **given).logits.numpy()
            return expected, parity.our_logits(ours, inputs)
        tokens = module.texts()
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        return expected, parity.our_causal_logits(ours, tokens)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("model", READ)
def test_logits(model, kind, tmp_path):
    module, variant = variants.MODELS[model]
    variant = variants.changed(variant, **READ[model])
    path = variants.write(tmp_path / "x.gguf", variant, module.tensors(variant), kind=kind)
    expected, found = logits_of_both(path, model, path)
    assert len(np.unique(found.argmax(-1))) > 5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    if kind == "Q4_1":
        convert(path, tmp_path / "converted")
        _, again = logits_of_both(path, model, tmp_path / "converted")
        np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("name", ["bpe", "bpe of gpt2", "sentencepiece of gemma2"])
def test_ids(name, tmp_path):
    """The kinds whose metadata transformers follows; `io/test_gguf_tokenizers.py` has the rest."""
    path = variants.with_vocabulary(tmp_path / "x.gguf", name)
    ours = load(path).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    for text in variants.TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_tokens_map.items() <= theirs.special_tokens_map.items()
    if theirs.chat_template:
        chat = [{"role": "user", "content": "the"}]
        assert (
            ours.apply_chat_template(chat)["input_ids"]
            == (theirs.apply_chat_template(chat)["input_ids"])
        )
