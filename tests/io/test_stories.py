"""A model of llama2.c converts to a directory that loads, with its logits and its ids."""

import itertools
import os
import runpy
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from command_line import ROOT
from model_calls import uncached

STORIES = runpy.run_path(str(ROOT / "examples" / "stories.py"))
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, IDS, POSITIONS = SIZES = 16, 24, 2, 4, 2, 270, 32
PIECES = [" t", "he", " the", "e", "h", "t", " ", "é", "er", "re", "r"]  # by falling score
PUBLISHED = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


def random_model(file, rng) -> list[np.ndarray]:
    """Write a random model as llama2.c does; return its arrays in the file's order."""
    keys, deep = WIDTH // HEADS * KV_HEADS, LAYERS
    shapes = [
        (IDS, WIDTH), (deep, WIDTH), (deep, WIDTH, WIDTH), (deep, keys, WIDTH),
        (deep, keys, WIDTH), (deep, WIDTH, WIDTH), (deep, WIDTH), (deep, INNER, WIDTH),
        (deep, WIDTH, INNER), (deep, INNER, WIDTH), (WIDTH,),
        (POSITIONS, WIDTH // HEADS // 2), (POSITIONS, WIDTH // HEADS // 2),  # tables of angles
    ]  # fmt: skip
    arrays = [rng.normal(size=shape).astype(np.float32) * 0.5 for shape in shapes]
    file.write_bytes(struct.pack("<7i", *SIZES) + b"".join(array.tobytes() for array in arrays))
    return arrays


def logits_of(arrays, ids) -> np.ndarray:
    """A forward pass of llama2.c, in which each pair of neighbours is rotated as a complex one."""
    embedding, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, last, *_ = map(np.float64, arrays)
    size, count = WIDTH // HEADS, len(ids)
    angles = np.arange(count)[:, None] * 10_000.0 ** (-np.arange(0, size, 2) / size)[None]

    def normed(x, weight):
        return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def heads(x, weight, rotates=True):
        found = (x @ weight.T).reshape(count, -1, size)
        if rotates:
            turned = (found[..., ::2] + 1j * found[..., 1::2]) * np.exp(1j * angles)[:, None]
            found = np.stack([turned.real, turned.imag], axis=-1).reshape(found.shape)
        return found

    x = embedding[ids]
    for layer in range(LAYERS):
        h = normed(x, norm1[layer])
        keys, values = heads(h, wk[layer]), heads(h, wv[layer], rotates=False)
        keys, values = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (keys, values))
        scores = np.einsum("qhd,khd->hqk", heads(h, wq[layer]), keys) / np.sqrt(size)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, values).reshape(count, WIDTH) @ wo[layer].T
        h = normed(x, norm2[layer])
        gate = h @ w1[layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w3[layer].T)) @ w2[layer].T
    return normed(x, last) @ embedding.T


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A random model and a tokenizer of a few merges, converted."""
    work = tmp_path_factory.mktemp("stories")
    arrays = random_model(work / "model.bin", np.random.default_rng(0))
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *STORIES["BYTES"], *PIECES]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    entries = [
        struct.pack("<fi", score, len(text.encode())) + text.encode()
        for text, score in zip(texts, scores, strict=True)
    ]
    (work / "tok.bin").write_bytes(struct.pack("<i", 7) + b"".join(entries))
    STORIES["convert"](work / "model.bin", work / "tok.bin", work / "made")
    return specjax.load(work / "made"), arrays


def test_logits_are_llama2cs(converted):
    checkpoint, arrays = converted
    ids = np.random.default_rng(1).integers(IDS, size=9)
    found = uncached(checkpoint.model, jnp.asarray(ids[None], jnp.int32))[0]
    np.testing.assert_allclose(found, logits_of(arrays, ids), atol=1e-4)
    unturned = [np.roll(x, 1, axis=1) if i in (2, 3) else x for i, x in enumerate(arrays)]
    assert np.abs(logits_of(unturned, ids) - found).max() > 0.1  # rotations matter here


def merged(text) -> list[int]:
    """llama2.c's ids: characters, or their bytes; then the pair of the best score merges."""
    ids = {piece: 259 + i for i, piece in enumerate(PIECES)}
    parts: list[str | int] = []
    for character in " " + text:
        known = character in ids
        parts += [character] if known else [byte + 3 for byte in character.encode()]
    while True:
        pairs = [
            (ids[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if isinstance(a, str) and isinstance(b, str) and a + b in ids
        ]
        if not pairs:
            return [1, *(ids[part] if isinstance(part, str) else part for part in parts)]
        _, at = min(pairs)  # scores fall with ids
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("text", ["the there he", "t her  the é", "ñ thé\n", "re erere hererher"])
def test_ids_are_llama2cs(converted, text):
    tokenizer = converted[0].tokenizer
    assert tokenizer.encode(text) == merged(text)
    assert tokenizer.decode(merged(text)[1:]) == text


def test_a_head_of_its_own_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(struct.pack("<7i", *SIZES[:5], -IDS, POSITIONS))
    with pytest.raises(ValueError, match="has a head of its own"):
        STORIES["read_model"](file)


@pytest.mark.slow
def test_the_published_story(tmp_path):
    """It comes out of the real files. 200 tokens are the same plain, with lookup and with a draft
    of two layers."""
    if not (found := os.environ.get("SPECJAX_STORIES")):
        pytest.skip("SPECJAX_STORIES names no directory with stories260K.bin and tok512.bin")
    files = Path(found)
    STORIES["convert"](files / "stories260K.bin", files / "tok512.bin", tmp_path / "made")
    target = specjax.load(tmp_path / "made")
    drafts = None, "lookup", specjax.early_exit(target, layers=2)
    results = [specjax.generate(target, draft, [[1]], max_new_tokens=200) for draft in drafts]
    assert results[0].texts[0].startswith(PUBLISHED)
    assert results[0].emitted == 200
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert results[1].accepted > 20
