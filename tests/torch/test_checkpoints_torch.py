"""Parity of every format and family with transformers' own models, and torch's own files.

Skipped where torch is not installed; `pip install torch==2.13.0 sentencepiece protobuf`.
"""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import checkpoint_formats as formats
import gpt_variants
import llama_variants
import make_checkpoint_data
import t5_variants
from specjax.checkpoints import convert, load, tensors
from specjax.checkpoints.formats import spiece, torch_files
from specjax.checkpoints.tensors import read_into

torch = pytest.importorskip("torch")

import test_parity_torch as parity  # noqa: E402  needs torch

from make_reference import torch_causal_logits, torch_logits  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
FAMILIES = {
    "t5 v1.0": (t5_variants, "v1_0"),
    "t5 v1.1": (t5_variants, "v1_1"),
    "gpt2": (gpt_variants, "tied"),
    "llama": (llama_variants, "llama3"),
}
FORMS = ("bin", "bin-sharded", "legacy", "legacy-sharded", "flax", "flax-sharded")


def both_logits(theirs, ours, module, variant):
    """Logits of transformers and of specjax, float32."""
    if module is t5_variants:
        inputs = t5_variants.inputs(variant)
        return torch_logits(theirs, *inputs), parity.our_logits(ours, inputs)
    tokens = module.texts()
    return torch_causal_logits(theirs, tokens), parity.our_causal_logits(ours, tokens)


def saved_by_transformers(directory, module, variant):
    """Random weights of torch's making, and the names and arrays that it saved."""
    if module is t5_variants:
        parity.saved_by_transformers(directory, variant)
        model = transformers.T5ForConditionalGeneration.from_pretrained(directory)
    else:
        parity.causal_saved_by_transformers(directory, variant)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return model


def in_form(model, directory, source, form):
    """The model's weights in another format, with torch's own writer for torch's."""
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    state = model.state_dict()  # with tied weights, once under each name
    kind, *sharded = form.split("-")
    if kind == "t5x":
        arrays = {name: value.numpy() for name, value in state.items()}
        tied = ("embed_tokens.weight", *(() if "lm_head.weight" in _own(model) else ("lm_head",)))
        kept = {n: a for n, a in arrays.items() if not any(part in n for part in tied)}
        (directory / "config.json").unlink()
        return formats.write_t5x(directory, kept)
    if kind == "flax":
        names = _own(model)
        (directory / "model.safetensors").touch()
        arrays = {name: state[name].numpy() for name in names}
        return formats.rewrite(directory, arrays, form)
    options = {"_use_new_zipfile_serialization": kind == "bin"}
    if not sharded:
        torch.save(state, directory / "pytorch_model.bin", **options)
        return directory
    names, weight_map = sorted(state), {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({name: state[name] for name in names[i::2]}, directory / file, **options)
        weight_map |= dict.fromkeys(names[i::2], file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "pytorch_model.bin.index.json").write_text(index)
    return directory


def _own(model):
    """Names of parameters, each tensor once."""
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_logits_of_every_format_and_family(form, family, tmp_path):
    module, name = FAMILIES[family]
    variant = module.VARIANTS[name]
    model = saved_by_transformers(tmp_path / "theirs", module, variant)
    ours = in_form(model, tmp_path / "ours", tmp_path / "theirs", form)
    theirs, found = both_logits(tmp_path / "theirs", ours, module, variant)
    assert len(np.unique(found.argmax(-1))) > 5
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["t5 v1.0", "t5 v1.1"])
def test_logits_of_t5x(family, tmp_path):
    module, name = FAMILIES[family]
    variant = module.VARIANTS[name]
    distance = {"relative_attention_max_distance": 128}
    variant = dataclasses.replace(variant, config={**variant.config, **distance})
    model = saved_by_transformers(tmp_path / "theirs", module, variant)
    ours = in_form(model, tmp_path / "ours", tmp_path / "theirs", "t5x")
    theirs, found = both_logits(tmp_path / "theirs", ours, module, variant)
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4)
    convert(ours, tmp_path / "converted")
    again, _ = both_logits(tmp_path / "converted", ours, module, variant)
    np.testing.assert_allclose(again, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["bin", "legacy", "flax"])
def test_transformers_reads_what_is_converted(form, family, tmp_path):
    module, name = FAMILIES[family]
    variant = module.VARIANTS[name]
    model = saved_by_transformers(tmp_path / "theirs", module, variant)
    ours = in_form(model, tmp_path / "ours", tmp_path / "theirs", form)
    convert(ours, tmp_path / "converted")
    theirs, _ = both_logits(tmp_path / "theirs", ours, module, variant)
    again, _ = both_logits(tmp_path / "converted", ours, module, variant)
    np.testing.assert_allclose(again, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_of_torch(dtype, legacy, tmp_path):
    variant = t5_variants.VARIANTS["v1_1"]
    t5_variants.write(tmp_path, variant)
    state = {n: torch.tensor(a) for n, a in t5_variants.tensors(variant).items()}
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    inputs = t5_variants.inputs(variant)
    found = parity.our_logits(tmp_path, inputs)
    load_again = convert(tmp_path, tmp_path / "converted")
    assert load_again.config == load(tmp_path, dtype=jnp.float32).config
    theirs = torch_logits(tmp_path / "converted", *inputs)
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("chunk", [16, 1 << 22])
def test_strides_of_every_kind(legacy, chunk, tmp_path, monkeypatch):
    """Random views of random tensors, in pieces small and large."""
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    views = {}
    for i in range(60):
        base = torch.tensor(rng.normal(size=rng.integers(1, 6, size=3)), dtype=torch.float32)
        view = base.permute(*rng.permutation(3))
        begin, step = int(rng.integers(0, view.shape[0])), int(rng.integers(1, 3))
        view = view[begin::step]
        if i % 3 == 0:
            view = view[:, :1].expand(-1, 4, -1)
        if i % 4 == 0:
            view = view[0]
        views[f"v{i}"] = view
    torch.save(views, tmp_path / "x.bin", _use_new_zipfile_serialization=not legacy)
    found = torch_files.find(tmp_path / "x.bin")
    assert found.keys() == views.keys()
    for name, view in views.items():
        out = np.empty(found[name].shape, np.float32)
        read_into(found[name], out)
        np.testing.assert_array_equal(out, view.numpy(), err_msg=name)


def test_every_pickle_protocol(tmp_path):
    state = torch.nn.Linear(2, 3).state_dict()
    for protocol in (2, 3, 4, 5):
        for legacy in (False, True):
            options = {"_use_new_zipfile_serialization": not legacy, "pickle_protocol": protocol}
            torch.save(state, tmp_path / "x.bin", **options)
            found = torch_files.find(tmp_path / "x.bin")
            out = np.empty((3, 2), np.float32)
            read_into(found["weight"], out)
            np.testing.assert_array_equal(out, state["weight"].numpy())


def test_whole_modules_are_refused(tmp_path):
    """`torch.save(model)`, which needs the model's code, and training states."""
    torch.save(torch.nn.Linear(2, 3), tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin cannot be read: it asks for 'torch\.nn\."):
        torch_files.find(tmp_path / "x.bin")
    torch.save({"model": torch.nn.Linear(2, 3).state_dict(), "step": 3}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match="entry 'model' is a dict and no tensor"):
        torch_files.find(tmp_path / "x.bin")
    torch.save({"x": torch.ones(2).to_sparse()}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match="_rebuild_sparse_tensor"):
        torch_files.find(tmp_path / "x.bin")


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_spiece_models_as_transformers_converts_them(rule, tmp_path):
    """With the normalization of T5's own file, and with none."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    readme = parity.__doc__ + make_checkpoint_data.__doc__ + str(formats.__doc__)
    corpus = [*make_checkpoint_data.TEXTS, *readme.split("\n")]
    (tmp_path / "corpus.txt").write_text("\n".join(corpus), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=90,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    theirs = transformers.T5Tokenizer.from_pretrained(str(tmp_path))
    ours = spiece.load(tmp_path / "spiece.model")
    assert ours.get_vocab() == theirs.get_vocab()
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    for text in (*corpus, "e\u0301 \u3000wide\u00a0 ① ½ <extra_id_99> \u3000x", "a\tb\u200bc"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        ids = ours(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
