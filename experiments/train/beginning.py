"""The tokenizer of a training run, and its model before the first step."""

import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from experiments.tasks.examples import Example
from experiments.train import batches, meshes
from experiments.train import tokenizer as tokenizers
from experiments.train.config import TrainConfig
from experiments.train.grow import grow
from specjax import checkpoints
from specjax.checkpoints.tokenizers import end_id
from specjax.models.layers import arrange
from specjax.models.sharding import DATA, Placement
from specjax.models.t5 import T5


def make_tokenizer(
    config: TrainConfig,
    examples: Sequence[Example],
    own: pathlib.Path | None,
    start: checkpoints.Checkpoint | None,
) -> Any:
    """The tokenizer of a run that goes on; if there is none, another model's, or a new one.

    Args:
      own: directory of the tokenizer that the run began with.
      start: the model that the run starts from, or its outline.
    """
    if own is not None:
        return tokenizers.load(own)
    with tempfile.TemporaryDirectory() as place:  # a run that goes on reads it from a file too
        if config.tokenizer:
            made = tokenizers.load(config.tokenizer)
        elif start is not None:
            if start.tokenizer is None:
                raise ValueError(f"start={config.start!r} has no tokenizer: set tokenizer=DIR.")
            made = start.tokenizer
        else:
            texts = (
                text
                for e in examples
                for text in ([e.input + e.target] if config.decoder_only else [e.input, e.target])
            )
            made = tokenizers.to_transformers(
                tokenizers.train(texts, config.vocab_size, decoder_only=config.decoder_only),
                config.max_source_len,
            )
        tokenizers.save(made, own := pathlib.Path(place) / "tokenizer")
        return tokenizers.load(own)


def shape_of(
    config: TrainConfig, tokenizer: Any, start: checkpoints.Checkpoint | None = None
) -> Any:
    """The `T5Config`, `GPTConfig` or `LlamaConfig` of a new model, or that of `start`."""
    if start is not None:
        check_vocabulary(config, "start", start, tokenizer)
        return start.config
    family = checkpoints.FAMILIES[config.family]
    ids = {"bos_token_id": end_id(tokenizer)} if config.decoder_only else {}
    pad = tokenizer.pad_token_id
    ids["pad_token_id"] = batches.FILLER if pad is None else pad
    shape = family.config_class(vocab_size=len(tokenizer), **ids, **config.model)
    meshes.check(shape, config.mesh)
    return shape


def begin(
    config: TrainConfig, shape: Any, tokenizer: Any, placement: Placement
) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and parameters before the first step, on the mesh."""
    if config.start:
        mesh = config.mesh or f"{DATA}=1"
        loaded = checkpoints.load(config.start, dtype=jnp.float32, mesh=mesh)
        return meshes.placed(loaded.model.module(), placement, ordered=True)
    made = make_model(shape, config.seed, load_named(config, "grow", tokenizer, dtype=jnp.float32))
    return meshes.placed(nnx.merge(*made), placement)


def load_named(
    config: TrainConfig, field: str, tokenizer: Any, **how: Any
) -> checkpoints.Checkpoint | None:
    """Load the model that a field of the config names; None if it is empty."""
    name = getattr(config, field)
    if not name:
        return None
    check_vocabulary(config, field, checkpoints.outline(name), tokenizer)
    return checkpoints.load(name, **how)


def check_vocabulary(
    config: TrainConfig, field: str, found: checkpoints.Checkpoint, tokenizer: Any
) -> None:
    """Raise ValueError unless a named model was made with this tokenizer.

    A model without a tokenizer needs a row for each id.
    """
    name, rows = getattr(config, field), found.config.vocab_size
    if found.tokenizer is None:
        if len(tokenizer) > rows:
            raise ValueError(
                f"{field}={name!r} has {rows} rows of ids, and tokenizer={config.tokenizer!r} "
                f"{len(tokenizer)} ids: name the tokenizer that the model was trained with."
            )
    elif found.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{field}={name!r} has another vocabulary: set tokenizer={name!r}")


def make_model(
    config: Any, seed: int, small: checkpoints.Checkpoint | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Initialise a model of a `T5Config`, `GPTConfig` or `LlamaConfig` for training.

    A T5 then gets the changes of `look_around`, or the parameters of a smaller T5.

    Raises:
      ValueError: the small model cannot grow to this shape.
    """
    model = checkpoints.FAMILIES[config.model_type].build(
        config, rngs=nnx.Rngs(seed), dtype=jnp.float32
    )
    if isinstance(model, T5):
        look_around(model)
    if small is not None:
        grow(arrange(small.model.module(), platform=None), model)
    return nnx.split(model)


def look_around(model: T5, strength: float = 4.0) -> None:
    """Change a new T5 in place so that it finds copying at once.

    A decoder copies by finding the source position whose left neighbour it has just written. From
    T5's own initialisation that circuit takes a thousand steps to appear in a shallow model, and
    did not appear at all in deep ones (experiments/train/README.md). Two changes put its parts in
    place:

    - Relative position: each head of the encoder starts with a preference for one near neighbour
      (−1, +1, −2, +2, in turn; the last two heads have none if there are more than six), each head
      of the decoder for the token at a distance of 0, 1, 2 or 3.
    - Cross-attention: queries start equal to keys (up to T5's scale), so that a decoder position
      attends to encoder positions with a similar content rather than to random ones.
    """
    heads = model.config.num_heads
    buckets = model.config.relative_attention_num_buckets
    ahead = buckets // 2  # where distances to the right begin
    for stack, near in (
        ("encoder", [1, ahead + 1, 2, ahead + 2, 1, ahead + 1]),
        ("decoder", [0, 1, 2, 3]),
    ):
        for bias in model.position_biases(stack):
            bias.weight.set_value(_preferring(near[:heads], buckets, heads, strength))
    inner = heads * model.config.d_kv
    for layer in model.decoder:
        keys = layer.cross.kv.weight[...][:inner]
        layer.cross.query.weight.set_value(keys * model.config.d_kv**-0.5)


def _preferring(near: Sequence[int], buckets: int, heads: int, strength: float) -> Array:
    """(buckets, heads): `strength` at bucket near[h] of head h, else 0."""
    weight = np.zeros((buckets, heads), np.float32)
    weight[list(near), range(len(near))] = strength
    return jnp.asarray(weight)
