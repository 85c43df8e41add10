"""Trees through every family of models and every drafter: caches, tokens, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagles
import specjax
from experiments.train import medusa
from specjax import decoding, drafters
from specjax import sampling as smp
from specjax.drafters import ngram
from specjax.measure import metrics
from specjax.models import attention, llama
from specjax.trees import fixed
from specjax.trees.nodes import layout, lineage, path_to
from specjax.tuning.ranks import acceptance_by_rank
from tiny_models import QWENS, VARIANTS, random_model, slow

pytestmark = pytest.mark.sweep


@pytest.fixture(autouse=True)
def _programs_of_one_test():
    """There are many of them, see conftest.py."""
    yield
    jax.clear_caches()


TREE = fixed(paths=((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 0, 0)))


def inputs_for(target, rows=3):
    rng = np.random.default_rng(5)
    texts = [rng.integers(3, target.model.vocab_size, size=n).tolist() for n in (7, 2, 5)][:rows]
    return decoding.pack_for(target, texts, rows=rows)


@pytest.mark.parametrize("family", ["t5", "llama", *map(slow, ("gpt2", *VARIANTS, *QWENS))])
def test_a_tree_in_one_call_is_each_path_by_itself(family):
    """Hidden states of all nodes, and the cache after a path has been moved together, in rows whose
    texts are of different lengths."""
    target = random_model(family, 12)
    model, inputs = target.model, inputs_for(target)
    rng = np.random.default_rng(1)
    known = jnp.asarray(rng.integers(3, 12, size=(3, 5)), jnp.int32)  # behind the prompt
    length = inputs.prompt_len - 1 + jnp.array([5, 3, 4])

    @jax.jit
    def before(model):
        context, cache = drafters.base.started(model, inputs, 40)
        _, cache = model(known, inputs.prompt_len - 1, context, cache)
        return context, cache

    @jax.jit
    def call(model, tokens, layout=None):
        return model(tokens, length, *before(model), layout)

    @jax.jit
    def moved(model, written, lines, node):
        return model.compact(written, length, path_to(lines, jnp.full((3,), node)))

    tokens = jnp.asarray(rng.integers(3, 12, size=(3, TREE.nodes + 1)), jnp.int32)
    depth = jnp.asarray(TREE.depths)[None, :]
    lines = jax.jit(lineage, static_argnums=2)(jnp.asarray(TREE.parent)[None, :], depth, TREE.depth)
    found, written = call(model, tokens, jax.jit(layout)(lines, depth))
    for node in range(TREE.nodes + 1):
        path = [int(n) for n in lines[0, node] if n <= TREE.nodes]
        wanted, fed = call(model, tokens[:, jnp.array(path)])
        np.testing.assert_allclose(found[:, node], wanted[:, -1], rtol=2e-5, atol=2e-5)
        pairs = map(jax.tree.leaves, (moved(model, written, lines, node), fed))
        kept = np.arange(attention.TILE)[None, :] < np.asarray(length + len(path))[:, None]
        for one, other in zip(*pairs, strict=True):
            by_row = one.shape[2] == attention.TILE
            there = kept[:, None, :, None] if by_row else kept[:, None, None, :]
            one, other = (np.where(there, x, 0) for x in (one, other))
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "part"), [("llama", "Rotation"), slow(("qwen2", "causal_bias"))]
)
def test_a_tree_that_forgets_depths_is_another(family, part, monkeypatch):
    """The test above would see positions by slot, and windows by slot."""
    target = random_model(family, 12)
    context, cache = drafters.base.started(target.model, inputs_for(target), 40)
    tokens = jnp.full((3, TREE.nodes + 1), 5, jnp.int32)
    depth = jnp.asarray(TREE.depths)[None, :]
    lines = lineage(jnp.asarray(TREE.parent)[None, :], depth, TREE.depth)
    start, tree = jnp.array([6, 1, 4]), layout(lines, depth)
    slots = jnp.arange(TREE.nodes + 1)[None, :]

    class BySlot(llama.Rotation):
        @classmethod
        def at(cls, positions, *config):
            return super().at(start[:, None] + slots, *config)

    def by_slot(*args):
        return attention.causal_bias(*args[:-1], args[-1]._replace(depth=slots))

    one, _ = target.model(tokens, start, context, cache, tree)
    monkeypatch.setattr(llama, part, {"Rotation": BySlot, "causal_bias": by_slot}[part])
    other, _ = target.model(tokens, start, context, cache, tree)
    assert float(jnp.abs(one - other)[:, -1].max()) > 1e-2


FIXED, BEST = "fixed(3, 2, 1)", "best_first(width=3, depth=3, nodes=8)"
WIDE = "best_first(width=9, depth=2, nodes=15)"


@pytest.mark.parametrize(
    ("family", "tree", "rows"),
    [
        slow(("t5", FIXED, 4)), ("gpt2", BEST, 4),
        *map(slow, (
            ("llama", FIXED, 1),
            ("t5 tied", BEST, 4), ("gpt2", FIXED, 4), ("llama", BEST, 16), ("mistral", FIXED, 4),
            ("qwen2", FIXED, 4), ("qwen2", BEST, 1), ("qwen3", FIXED, 16),
        )),
    ],
)  # fmt: skip
def test_greedy_tokens_are_plain_decodings(family, tree, rows):
    """Rows of different lengths, alone and side by side; the draft is right now and then."""
    target = random_model(family, 12)
    draft = dataclasses.replace(target, model=shaken(target.model))
    texts = [[3, 4, 5, 6, 7], [8, 9], [10, 3, 4, 4], [5], [6, 6, 6]]
    texts += [[5 + row % 7] * (1 + row % 5) for row in range(5, rows)]
    options = {"max_new_tokens": 17, "batch_size": rows}
    plain = specjax.generate(target, None, texts, **options)
    found = specjax.generate(target, draft, texts, tree=tree, **options)
    assert found.tokens == plain.tokens
    assert found.accepted.sum() > 0
    assert found.drafted.sum() > found.accepted.sum()


def shaken(model, noise=0.03):
    """The same model with some noise on every weight."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape).astype(x.dtype), model)


@pytest.mark.parametrize(
    ("family", "kind", "tree"),
    [
        ("t5", "medusa", FIXED), ("llama", "eagle 3", BEST), ("llama", "lookup", FIXED),
        *map(slow, (
            ("t5", "eagle 1", WIDE), ("llama", "eagle 1", FIXED), ("t5", "hydra", BEST),
            ("llama", "bigram", BEST),
        )),
    ],
)  # fmt: skip
def test_every_drafter_that_branches(family, kind, tree):
    """Greedy identity with drafters that read the target, and with those that read text alone; each
    is right now and then."""
    target = eagles.target_of(family, 12)
    texts = [[3, 4, 5, 6, 7, 3, 4], [8, 9, 8], [10, 3, 4, 4]]
    plain = specjax.generate(target, None, texts, max_new_tokens=13)
    made = {
        "eagle 1": lambda: eagles.eagle_of(target, 1),
        "eagle 3": lambda: eagles.eagle_of(target, 3),
        "medusa": lambda: medusa.init(target.model, heads=3),
        "hydra": lambda: medusa.init(target.model, heads=3, hydra=True),
        "lookup": lambda: ngram.PromptLookup(12, matches=2),
        "bigram": lambda: ngram.bigram(ngram.count(plain.tokens, 12, 0)),
    }[kind]()
    found = specjax.generate(target, made, texts, max_new_tokens=13, tree=tree)
    assert found.tokens == plain.tokens
    assert found.accepted.sum() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": "lookup"}, "PromptLookup drafts chains alone"),
        ({"passes": (0, 2)}, "passes=0"),
        ({"policy": "svip"}, "Svip decides token by token"),
        ({"rule": "typical", "temperature": 1.0}, "Typical is a rule for chains"),
        ({"tree": "bush"}, "chain, fixed, best_first"),
        ({"tree": "best_first(width=13, depth=1, nodes=4)"}, "width=13, but .* 12 ids"),
        ({"tree": "best_first(width=12, depth=1, nodes=13)"}, "give no more than 12"),
    ],
)
def test_what_trees_cannot_do_is_refused(options, said):
    target = random_model("llama", 12)
    known = {"draft": target, "tree": "fixed(2)"} | options
    draft = known.pop("draft")
    with pytest.raises(ValueError, match=said):
        specjax.generate(target, draft, [[3, 4]], max_new_tokens=4, **known)


@pytest.mark.parametrize("temperature", [0.0, slow((1.0,))])
def test_acceptance_by_rank(temperature):
    """The first child's chance is α; at temperature 0 ranks say which choice is the target's."""
    target = random_model("llama", 12)
    draft = dataclasses.replace(target, model=shaken(target.model, 0.3))
    texts = [[3, 4, 5, 6, 7], [8, 9], [10, 3, 4, 4], [5], [6, 6, 6]] * 4
    chosen = smp.Sampling(temperature)
    plain = specjax.generate(
        target, None, texts, temperature=temperature, key=0, max_new_tokens=17, batch_size=20
    )
    options = {"sampling": chosen, "batch_size": 20}
    known = target, draft, texts, plain.tokens
    alpha = metrics.alpha_of_outputs(*known, **options).value
    if temperature == 0:
        top = acceptance_by_rank(*known, **options)
        assert top[0] == pytest.approx(alpha, abs=1e-6)
        assert top.sum() <= 1 + 1e-6
        return
    drawn = acceptance_by_rank(*known, drawn=True, **options)
    assert drawn[0] == pytest.approx(alpha, abs=0.05)
    assert 0.8 < drawn.sum() < 1 + 1e-5  # ten of twelve tokens: one is nearly always accepted
    assert drawn[0] > drawn[1:].max()


@pytest.mark.parametrize("temperature", [slow((0.0,)), 1.0])
def test_children_that_are_not_there_are_not_accepted(temperature):
    """A lookup with two matches has two of ten ranks."""
    target = random_model("gpt2", 12)
    texts = [[3, 4, 5, 3, 6, 3], [8, 9, 8, 10, 8], [7, 7, 3, 7]] * 4
    plain = specjax.generate(
        target, None, texts, temperature=temperature, key=0, max_new_tokens=17, batch_size=12
    )
    found = acceptance_by_rank(
        target, ngram.PromptLookup(12, matches=2), texts, plain.tokens,
        sampling=smp.Sampling(temperature), drawn=temperature > 0, batch_size=12,
    )  # fmt: skip
    assert (found[:2] > 0).all()
    assert (found[2:] == 0).all()
