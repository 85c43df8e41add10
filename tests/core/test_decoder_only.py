"""Decoder-only models through everything that takes texts, against whole-sequence forwards."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import processors

import specjax
from experiments.beam.decoding import beam_search
from experiments.tasks.examples import Example
from experiments.train import batches, steps
from experiments.train import tokenizer as tokenizers
from pairs import IDS, TEXTS
from specjax.checkpoints import Checkpoint
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.drafters import ngram
from specjax.measure import metrics
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Llama, LlamaConfig
from specjax.sampling import Sampling
from tiny_models import slow

BUDGET = 20
RAGGED = ["", *TEXTS[:4], "  "]  # a blank prompt is a prompt
POSITIONS, START = 64, 1
COMMON = {"vocab_size": IDS, "bos_token_id": START, "pad_token_id": 0}
KINDS = {
    "gpt": (GPT, GPTConfig(n_positions=POSITIONS, n_embd=24, n_layer=2, n_head=3, **COMMON)),
    "llama": (
        Llama,
        LlamaConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=POSITIONS, **COMMON,
        ),
    ),
}  # fmt: skip
SCALES, NOISE = {"gpt": 7, "llama": 5}, {"gpt": 0.02, "llama": 0.003}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.to_transformers(tokenizers.train(TEXTS, IDS, decoder_only=True), 64)


@pytest.fixture(scope="module", params=[slow("gpt"), "llama"])
def kind(request):
    return request.param


def checkpoint(kind, tokenizer, noise: float) -> Checkpoint:
    """Weights large enough for distributions that differ from place to place; `noise` apart from
    others."""
    make, config = KINDS[kind]
    module = make(config, rngs=nnx.Rngs(0))
    state = nnx.state(module)
    leaves, treedef = jax.tree.flatten(state)
    rng = np.random.default_rng(1)
    leaves = [
        x * SCALES[kind] + noise * rng.normal(size=x.shape).astype(np.float32) for x in leaves
    ]
    nnx.update(module, jax.tree.unflatten(treedef, leaves))
    model = LanguageModel.of(module)
    eos_ids = tuple(range(3, IDS, 20))
    return Checkpoint(f"noise {noise}", model, config, tokenizer, eos_ids, max_source_len=64)


@pytest.fixture(scope="module")
def target(kind, tokenizer):
    return checkpoint(kind, tokenizer, 0.0)


@pytest.fixture(scope="module")
def draft(kind, tokenizer):
    return checkpoint(kind, tokenizer, NOISE[kind])


@jax.jit
def forward(model, tokens):
    """Softmax of the next token after every prefix, in one call without a cache."""
    module = model.module()
    hidden, _ = module(tokens[None], jnp.zeros((1,), jnp.int32), (), None)
    return jax.nn.softmax(module.logits(hidden)[0])


def distributions(checkpoint, ids):
    """After every prefix of ids; what follows them, up to a length for all, is not seen."""
    padded = np.pad(np.asarray(ids, np.int32), (0, POSITIONS - len(ids)))
    return np.asarray(forward(checkpoint.model, padded))[: len(ids)]


def prompt_of(tokenizer, text):
    return tokenizer(text)["input_ids"] or [START]


def greedy(target, prompt):
    """The most likely tokens, by a forward of everything for each of them."""
    known = list(prompt)
    while len(known) < len(prompt) + BUDGET:
        known.append(int(distributions(target, known)[-1].argmax()))
        if known[-1] in target.eos_ids:
            break
    return known[len(prompt) :]


@pytest.mark.sweep
def test_greedy_outputs(target, draft, tokenizer):
    """Both loops, with every kind of drafter, for prompts of 1 to 9 tokens in one batch."""
    expected = [greedy(target, prompt_of(tokenizer, text)) for text in RAGGED]
    lengths = {len(output) for output in expected}
    assert len(lengths) > 1  # EOS ends rows, and so does the budget
    assert BUDGET in lengths
    counts = ngram.count(expected, IDS, START)
    drafters = None, draft, ngram.bigram(counts), ngram.PromptLookup(IDS)
    for drafter in drafters:
        result = specjax.generate(target, drafter, RAGGED, gamma=3, max_new_tokens=BUDGET)
        assert result.tokens == expected
    alone = specjax.generate(target, draft, RAGGED, gamma=3, max_new_tokens=BUDGET, batch_size=1)
    assert alone.tokens == expected
    assert alone.block_efficiency > 1.2


def test_a_long_prompt_keeps_its_bos(target):
    """What the tokenizer puts before every text stays, whatever the limit leaves of the rest."""
    (whole,) = tokenize(target, [TEXTS[0]])
    assert whole[0] == START
    for limit in range(2, len(whole)):
        with pytest.warns(UserWarning, match="truncated"):
            (cut,) = tokenize(target, [TEXTS[0]], limit)
        assert cut == [START, *whole[len(whole) - limit + 1 :]]
    with pytest.warns(UserWarning, match="truncated"):
        assert tokenize(target, [TEXTS[0]], 1) == [whole[-1:]]


def test_a_long_prompt_without_a_bos(target, tokenizer):
    """A tokenizer that adds nothing, and a text that happens to begin with that id."""
    bare = tokenizers.train(TEXTS, IDS, decoder_only=True)
    bare.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    plain = dataclasses.replace(target, tokenizer=tokenizers.to_transformers(bare, 64))
    text = tokenizers.EOS + TEXTS[0]
    (whole,) = tokenize(plain, [text])
    assert whole[0] == START
    with pytest.warns(UserWarning, match="truncated"):
        assert tokenize(plain, [text], 3) == [whole[-3:]]


def test_an_empty_prompt_is_the_start_token(target):
    bare = dataclasses.replace(target, tokenizer=lambda text, verbose: {"input_ids": []})
    assert tokenize(bare, ["", " "]) == [[1], [1]]
    assert tokenize(target, [""]) == [[1]]


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha(target, draft, tokenizer, temperature):
    """Against the definition, prefix by prefix: the prompt's own tokens do not count."""
    alpha = specjax.measure_alpha(
        target, draft, RAGGED, sampling=Sampling(temperature), key=0, max_new_tokens=BUDGET
    )
    outputs = specjax.generate(
        target, None, RAGGED, temperature=temperature, key=0, max_new_tokens=BUDGET
    ).tokens
    expected = []
    for text, output in zip(RAGGED, outputs, strict=True):
        prompt = prompt_of(tokenizer, text)
        both = [distributions(c, prompt + output)[len(prompt) - 1 : -1] for c in (target, draft)]
        if temperature == 0:
            expected.append(both[0].argmax(-1) == both[1].argmax(-1))
        else:
            expected.append(np.minimum(*both).sum(-1))
    for found, wanted in zip(alpha.overlaps, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert alpha.tokens == sum(map(len, outputs))
    assert 0.2 < alpha.value < 0.98


@pytest.mark.sweep
def test_beams(target, draft):
    plain, speculative = (
        beam_search(target, d, RAGGED, width=2, draft_width=4, gamma=3, max_new_tokens=8)
        for d in (None, draft)
    )
    for one, other in zip(plain, speculative, strict=True):
        assert [h.tokens for h in one.hypotheses] == [h.tokens for h in other.hypotheses]
    first = tokenize(target, RAGGED)[2]
    best = plain[2].hypotheses[0].tokens
    score = sum(
        np.log(distributions(target, first + best)[len(first) - 1 + i, token])
        for i, token in enumerate(best)
    )
    assert plain[2].hypotheses[0].score == pytest.approx(score, abs=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["gpt"], indirect=True, scope="module")
def test_room(target):
    """A prompt is never cut in silence, and nothing is decoded past the learned positions."""
    long = TEXTS[0] * 20
    with pytest.warns(UserWarning, match="truncated"):
        (ids,) = tokenize(target, [long], 10)
    whole = target.tokenizer(long)["input_ids"]
    assert ids == whole[:1] + whole[-9:]  # the start token, and the end
    with pytest.raises(ValueError, match="A prompt of 1 tokens and max_new_tokens=64 exceed the"):
        specjax.generate(target, None, [""], max_new_tokens=64)
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        beam_search(target, None, [""], max_new_tokens=64)
    full = specjax.generate(dataclasses.replace(target, eos_ids=()), None, [""], max_new_tokens=63)
    assert full.emitted.tolist() == [63]


def test_tokenizer(tokenizer):
    """Texts begin with EOS, words carry the space before them, and halves join to the whole."""
    for text in (*TEXTS, "", "a  b\n\tc é 日本 "):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in ids[1:]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    start, rest = "return", " self.line"
    assert (
        tokenizer(start)["input_ids"] + tokenizer(rest, add_special_tokens=False)["input_ids"]
        == tokenizer(start + rest)["input_ids"]
    )


def test_what_training_sees(tokenizer):
    """Input and target as one text, EOS at its end, and no source."""
    (pair,) = batches.encode([Example("return", " self.line")], tokenizer, decoder_only=True)
    assert pair.source.shape == (0,)
    ids = tokenizer("return self.line", add_special_tokens=False)["input_ids"]
    assert pair.target.tolist() == [*ids, tokenizer.eos_token_id]
    (batch,) = batches.in_order([pair], ((0, 16),), target_tokens=32)
    assert batch.source.shape == (2, 0)
    assert batch.target[1].tolist() == [0] * 16


def test_training_puts_one_start_token_before_a_text(tokenizer):
    """A text that begins with it, as chat templates write it, gets no second one."""
    tokenizer = copy.deepcopy(tokenizer)
    bos = tokenizer.bos_token = tokenizer.eos_token
    with_bos, without = batches.encode(
        [Example(bos, "return self.line"), Example("", "return self.line")],
        tokenizer,
        decoder_only=True,
    )
    np.testing.assert_array_equal(with_bos.target, without.target)


def test_loss(target, tokenizer):
    """Nats of each token after those before it, the first after the start token."""
    examples = [Example("return", " self.line"), Example("", "x")]
    pairs = batches.encode(examples, tokenizer, decoder_only=True)
    (batch,) = batches.in_order(pairs, ((0, 16),), target_tokens=64)
    model = target.model
    trainer = steps.Trainer(model.graphdef)
    found = steps.held_out_loss(trainer, model.params, [batch])
    nats = []
    for pair in pairs:
        whole = distributions(target, [START, *pair.target])
        nats += [-np.log(whole[i, token]) for i, token in enumerate(pair.target)]
    assert found == pytest.approx(np.mean(nats), abs=1e-4)


def test_metrics_refuse_nothing_for_a_start_token(target, draft):
    """An encoder-decoder skips blank inputs; here they count."""
    outputs = [[5, 6]]
    loop = building.build(target, draft, sampling=Sampling(1.0))
    alpha = metrics.alpha_of(loop, target, [""], outputs)
    assert alpha.tokens == 2
