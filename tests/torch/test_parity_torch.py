"""Live comparison with transformers' own models in torch: what they save we load, and the reverse.

Skipped where torch is not installed; `pip install torch==2.13.0` gives a CPU build.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import gemma_variants
import gpt_variants
import llama_variants
import model_calls
import t5_variants
import t5gemma_variants
from specjax.checkpoints import load, save
from specjax.models.t5 import relative_buckets
from specjax.types import Inputs

torch = pytest.importorskip("torch")

from make_reference import (  # noqa: E402  needs torch
    torch_buckets,
    torch_causal_logits,
    torch_logits,
)

pytestmark = [
    pytest.mark.torch,
    # transformers' and torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
T5S = {**t5_variants.VARIANTS, **t5_variants.OTHERS}


@jax.jit
def _logits(model, source, source_len, tokens):
    module, start = model.module(), jnp.zeros((len(tokens),), jnp.int32)
    hidden, _ = module(tokens, start, module.encode(source, source_len), None)
    return model.logits(hidden)


def our_logits(directory, inputs):
    return np.asarray(_logits(load(directory, dtype=jnp.float32).model, *map(jnp.asarray, inputs)))


def saved_by_transformers(directory, variant, **options):
    """A model with random weights of torch's making, layers scaled up, as transformers saves it."""
    raw = {key: value for key, value in variant.raw.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    if variant.own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) / 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "shared" not in name and "lm_head" not in name:
                parameter.mul_(2)  # more, and attention is so sharp that torch itself errs by 1e-4
    model.save_pretrained(directory, **options)
    return directory


ENCODER_DECODERS = [
    *((t5_variants, name) for name in T5S),
    *((t5gemma_variants, name) for name in t5gemma_variants.VARIANTS),
]


def variant_of(variants, name):
    return T5S[name] if variants is t5_variants else variants.VARIANTS[name]


def encoding_saved_by_transformers(directory, variant):
    """An encoder-decoder with random weights of torch's making."""
    if isinstance(variant, t5gemma_variants.Variant):
        return causal_saved_by_transformers(directory, variant, AutoModelForSeq2SeqLM)
    return saved_by_transformers(directory, variant)


@pytest.mark.parametrize(("variants", "name"), ENCODER_DECODERS)
def test_logits_of_what_transformers_saves(variants, name, tmp_path):
    variant = variant_of(variants, name)
    encoding_saved_by_transformers(tmp_path, variant)
    inputs = variants.inputs(variant)
    ours = our_logits(tmp_path, inputs)
    assert len(np.unique(ours.argmax(-1))) > 5
    np.testing.assert_allclose(ours, torch_logits(tmp_path, *inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("variants", "name"), ENCODER_DECODERS)
def test_transformers_loads_what_we_save(variants, name, tmp_path):
    variant = variant_of(variants, name)
    inputs = variants.inputs(variant)
    theirs = torch_logits(variants.write(tmp_path / "theirs", variant), *inputs)
    save(tmp_path / "ours", load(tmp_path / "theirs"))
    np.testing.assert_allclose(torch_logits(tmp_path / "ours", *inputs), theirs, atol=1e-6)


def test_a_published_umt5_is_not_scaled(tmp_path):
    """It was trained so; transformers 5 multiplies its logits by d_model^−½."""
    variant = T5S["umt5"]
    inputs = t5_variants.inputs(variant)
    theirs = torch_logits(t5_variants.write(tmp_path, variant), *inputs)
    scale = variant.raw["d_model"] ** -0.5
    np.testing.assert_allclose(our_logits(tmp_path, inputs) * scale, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["v1_0", "v1_1"])
def test_half_precision_files_in_both_directions(dtype, name, tmp_path):
    variant = t5_variants.VARIANTS[name]
    inputs = t5_variants.inputs(variant)
    place = tmp_path / "half"
    save(place, load(t5_variants.write(tmp_path / "x", variant)), dtype=jnp.dtype(dtype))
    theirs = torch_logits(place, *inputs)
    np.testing.assert_allclose(our_logits(place, inputs), theirs, rtol=0, atol=1e-4)


def test_shards_of_transformers_making(tmp_path):
    variant = t5_variants.VARIANTS["v1_1"]
    saved_by_transformers(tmp_path, variant, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    inputs = t5_variants.inputs(variant)
    theirs = torch_logits(tmp_path, *inputs)
    np.testing.assert_allclose(our_logits(tmp_path, inputs), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets", [4, 8, 12, 32, 64])
@pytest.mark.parametrize("max_distance", [20, 50, 128, 200, 1000])
def test_buckets_up_to_distance_2048(bidirectional, num_buckets, max_distance):
    if num_buckets // 2 >= max_distance:
        pytest.skip("no room for logarithmic buckets")
    ours = relative_buckets(
        np.arange(-2048, 2049),
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    theirs = torch_buckets(bidirectional, num_buckets, max_distance)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["v1_0", "v1_1", "odd_heads"])
def test_greedy_tokens_through_the_cache(name, tmp_path):
    """Token by token through our cache, against transformers' `generate` for whole batches."""
    variant, count = t5_variants.VARIANTS[name], 24
    saved_by_transformers(tmp_path, variant)
    source, source_len, _ = t5_variants.inputs(variant)
    theirs = (
        transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
        .generate(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(np.arange(source.shape[1]) < source_len[:, None]).long(),
            do_sample=False,
            min_new_tokens=count,  # no end, so that all rows are compared over the whole length
            max_new_tokens=count,
        )[:, 1:]
        .numpy()
    )
    model, batch = load(tmp_path).model, len(source)
    token = jnp.zeros((batch, 1), jnp.int32)
    inputs = Inputs(jnp.asarray(source), jnp.asarray(source_len), token, jnp.ones_like(token[:, 0]))
    context, cache = jax.jit(model.start, static_argnums=1)(inputs, count)

    @jax.jit
    def step(token, at, cache):
        hidden, cache = model(token, jnp.full((batch,), at, jnp.int32), context, cache)
        logits = model.logits(hidden).at[:, :, 1].set(-jnp.inf)  # EOS
        return jnp.argmax(logits, -1).astype(jnp.int32), cache

    ours = []
    for at in range(count):
        token, cache = step(token, at, cache)
        ours.append(np.asarray(token))
    assert len(np.unique(theirs)) > 3
    np.testing.assert_array_equal(np.concatenate(ours, axis=1), theirs)


# --- GPT-2 and the Llama layout ----------------------------------------------------------------

CAUSAL = [
    (variants, name)
    for variants in (gpt_variants, llama_variants, gemma_variants)
    for name in variants.VARIANTS
]


def our_causal_logits(directory, tokens):
    model = load(directory, dtype=jnp.float32).model
    return np.asarray(model_calls.uncached(model, jnp.asarray(tokens)))


def causal_saved_by_transformers(directory, variant, auto=AutoModelForCausalLM, **options):
    """Random weights of torch's making; its own are so small that hardly anything but the
    embedding would show, as in a T5Gemma whose norms after sublayers are near 1."""
    raw = {key: value for key, value in variant.raw.items() if key != "architectures"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" not in name and "norm" not in name:
                parameter.normal_(std=0.4)
            else:
                parameter.add_(0.25 * torch.randn_like(parameter))
                if "t5gemma" in variant.raw["model_type"] and ".post_" in name:
                    parameter.add_(1.5)
    model.save_pretrained(directory, **options)
    return directory


@pytest.mark.parametrize(("variants", "name"), CAUSAL)
def test_causal_logits_of_what_transformers_saves(variants, name, tmp_path):
    causal_saved_by_transformers(tmp_path, variants.VARIANTS[name])
    tokens = variants.texts()
    ours = our_causal_logits(tmp_path, tokens)
    assert len(np.unique(ours.argmax(-1))) > 5
    np.testing.assert_allclose(ours, torch_causal_logits(tmp_path, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("variants", "name"), CAUSAL)
def test_transformers_loads_the_causal_model_that_we_save(variants, name, tmp_path):
    variant, tokens = variants.VARIANTS[name], variants.texts()
    theirs = torch_causal_logits(variants.write(tmp_path / "theirs", variant), tokens)
    save(tmp_path / "ours", load(tmp_path / "theirs"))
    found = torch_causal_logits(tmp_path / "ours", tokens)
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-6)


def test_a_gpt_in_half_precision_in_both_directions(tmp_path):
    tokens = gpt_variants.texts()
    original = load(gpt_variants.write(tmp_path / "x", gpt_variants.VARIANTS["untied"]))
    place = tmp_path / "half"
    save(place, original, dtype=jnp.bfloat16)
    theirs = torch_causal_logits(place, tokens)
    np.testing.assert_allclose(our_causal_logits(place, tokens), theirs, rtol=0, atol=1e-4)
