"""Medusa (Cai et al. 2024): heads on the target's last hidden state, each for one token ahead; and
Hydra (Ankner et al. 2024), whose heads also read the tokens before the one that they propose.

With n known tokens the target has read n − 1 of them. Its hidden state after the last of those, the
feature, gave token n − 1 through the target's own head. Head k, from 1, reads the same feature for
token n + k − 1:

    one or more blocks x + SiLU(W x + b), then a linear head, its own or the target's

Hydra's first block reads W [x; e(n−1); …; e(n+k−2)]: the embeddings of the newest known token and
of those drafted since, each divided by its root mean square. Heads hold no cache, so a rejected
token leaves nothing behind: a round begins with the feature that the target itself computed.

A row without a feature proposes nothing. That is the first round after any prompt of one token,
such as a T5's start token, and it decodes plainly. The draft also ends after the last head.
"""

import os
import pathlib
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.checkpoints import Checkpoint
from specjax.checkpoints.tensors import read_into
from specjax.checkpoints.weights import SAFETENSORS, TORCH
from specjax.drafters.base import Drafter
from specjax.models.language_model import LanguageModel
from specjax.models.layers import project
from specjax.pytrees import pytree
from specjax.support.files import read_json


@pytree
class Block:
    """x + SiLU(W [x; read] + b). Weights are (in, out), whatever the platform."""

    weight: Float[Array, "I E"]  # I = E, and E more for each token that is read
    bias: Float[Array, " E"]

    def __call__(
        self, x: Float[Array, "*batch E"], read: Float[Array, "*batch R"] | None = None
    ) -> Float[Array, "*batch E"]:
        given = x if read is None else jnp.concatenate([x, read], axis=-1)
        bias = jnp.expand_dims(self.bias, tuple(range(x.ndim - 1)))
        return x + jax.nn.silu(project(given, self.weight, True) + bias)


@pytree
class Head:
    """A head, which proposes the token at one place of a draft."""

    blocks: tuple[Block, ...]
    linear: Float[Array, "E V"] | None = None  # None: the target's head

    def __call__(
        self, feature: Float[Array, "*batch E"], read: Float[Array, "*batch R"] | None
    ) -> Float[Array, "*batch E"]:
        """The hidden state from which `logits` are computed."""
        first, *others = self.blocks
        x = first(feature, read)
        for block in others:
            x = block(x)
        return x

    def logits(self, x: Float[Array, "*batch E"], target: LanguageModel) -> Array:
        """Logits (…, V), float32 at least."""
        if self.linear is None:
            return target.logits(x)
        return project(x, self.linear, True, np.promote_types(x.dtype, jnp.float32))


class Shown(NamedTuple):
    """The state of the heads: what they read."""

    feature: Float[Array, "B E"]  # the target's hidden state after the last token but one
    there: Bool[Array, " B"]  # whether there is one
    slot: Int[Array, " B"]  # tokens drafted in this round; the same in all rows
    path: Int[Array, "B N"]  # the newest known token, then the drafted ones; N = 0: Medusa


@pytree
class Medusa(Drafter):
    """Drafts with Medusa heads, or Hydra heads if their first blocks have room for tokens.

    `begin` and `extend` return the head's hidden state and one number more: its slot, or −1 where
    nothing is proposed.
    """

    guesses: ClassVar[bool] = True

    target: LanguageModel  # for its head and its embedding: the same arrays, no copies
    heads: tuple[Head, ...]

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def hydra(self) -> bool:
        """Whether the heads read tokens."""
        inputs, width = self.heads[0].blocks[0].weight.shape
        return inputs > width

    def start(self, inputs, buffer_len):
        rows, like = inputs.prompt.shape[0], self.heads[0].blocks[0].bias
        return (), Shown(
            feature=jnp.zeros((rows, like.shape[0]), like.dtype),
            there=jnp.zeros((rows,), bool),
            slot=jnp.zeros((rows,), jnp.int32),
            path=jnp.zeros((rows, len(self.heads) if self.hydra else 0), jnp.int32),
        )

    def observe(self, tokens, start, hidden, count, context, state):
        """Keep the last hidden state that belongs to the text; a count of 0 changes nothing."""
        last = jnp.maximum(count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(hidden, last, axis=1)[:, 0].astype(state.feature.dtype)
        some = count > 0
        return state._replace(
            feature=jnp.where(some[:, None], feature, state.feature), there=state.there | some
        )

    def begin(self, tokens, length, context, state, *, lags=True):
        newest = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        return self._propose(newest, state._replace(slot=jnp.zeros_like(length)))

    def extend(self, token, position, context, state):
        return self._propose(token, state._replace(slot=state.slot + 1))

    def _propose(self, token: Int[Array, " B"], state: Shown) -> tuple[Array, Shown]:
        """Propose the token after `token`, which is put at `slot` of the path."""
        here = jnp.arange(state.path.shape[1], dtype=jnp.int32)[None, :] == state.slot[:, None]
        state = state._replace(path=jnp.where(here, token[:, None], state.path))
        x = self._at(state.slot, self._state_of, state.feature, state.path)
        proposes = state.there & (state.slot < len(self.heads))
        slot = jnp.where(proposes, state.slot, -1).astype(x.dtype)
        return jnp.concatenate([x, slot[:, None]], axis=1), state

    def logits(self, hidden):
        x, slot = hidden[:, :-1], hidden[:, -1]
        if self.heads[0].linear is None:
            logits = self.target.logits(x)
        else:
            logits = self._at(slot.astype(jnp.int32), self._logits_of, x)
        return jnp.where(slot[:, None] >= 0, logits, -jnp.inf)

    def _at(self, slot: Int[Array, " B"], of_head: Any, *operands: Array) -> Array:
        """Call of_head(k, …) for one head: all rows that draft are at one slot.

        Each head has a branch, so the weights of one alone are read, and none are copied.
        """
        branches = [partial(of_head, k) for k in range(len(self.heads))]
        return jax.lax.switch(jnp.max(slot), branches, *operands)  # which clamps the index

    def _state_of(self, k: int, feature: Array, path: Array) -> Array:
        return self.heads[k](feature, self.read(path[:, : k + 1]) if self.hydra else None)

    def _logits_of(self, k: int, x: Array) -> Array:
        return self.heads[k].logits(x, self.target)

    def read(self, tokens: Int[Array, "*batch N"]) -> Float[Array, "*batch R"]:
        """Concatenate the embeddings of N tokens, each divided by its root mean square: the scale
        of a target's embeddings then does not affect training."""
        embedded = self.target.module().embed(tokens)
        wide = embedded.astype(np.promote_types(embedded.dtype, jnp.float32))
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-12)
        return unit.astype(embedded.dtype).reshape(*tokens.shape[:-1], -1)

    # Files: tensors have the names and the layout (out, in) of the original repository.

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`."""
        return {
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": len(self.heads[0].blocks),
            "hydra": self.hydra,
            "own_head": self.heads[0].linear is not None,
        }

    def tensors(self) -> dict[str, Array]:
        """The heads' parameters by name; nothing of the target."""
        found = {}
        for k, head in enumerate(self.heads):
            for i, block in enumerate(head.blocks):
                found[f"medusa_head.{k}.{i}.linear.weight"] = block.weight.T
                found[f"medusa_head.{k}.{i}.linear.bias"] = block.bias
            if head.linear is not None:
                found[f"medusa_head.{k}.{len(head.blocks)}.weight"] = head.linear.T
        return found

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Any], target: Checkpoint
    ) -> "Medusa":
        """Make the drafter that `settings` and `tensors` describe, in the target's dtypes.

        Args:
          settings: from `settings`, or the config.json of published heads, which are Medusa's and
            have their own linear heads.
          tensors: arrays by name; "medusa_head." may be missing. Rows of a linear head beyond the
            target's vocabulary are padding.

        Raises:
          ValueError: a setting or a tensor is missing, or does not fit the target.
        """
        for name in ("medusa_num_heads", "medusa_num_layers"):
            if type(settings.get(name)) is not int or settings[name] < 1:
                raise ValueError(
                    f"{name}={settings.get(name)!r} must be a whole number ≥ 1: how many heads "
                    "there are, and how many blocks each has."
                )
        layers = settings["medusa_num_layers"]
        hydra, own_head = settings.get("hydra", False), settings.get("own_head", True)
        model: Any = target.model
        width, dtype = width_of(model)
        size = model.vocab_size

        def take(name: str, *shape: int) -> np.ndarray:
            found = tensors.get(f"medusa_head.{name}", tensors.get(name))
            if found is None:
                raise ValueError(
                    f"There is no tensor medusa_head.{name}; the settings ask for "
                    f"{settings['medusa_num_heads']} heads of {layers} blocks."
                )
            fits = found.shape == shape
            if name.endswith(f".{layers}.weight"):
                fits = found.shape[1:] == shape[1:] and found.shape[0] >= shape[0]
            if not fits:
                raise ValueError(
                    f"medusa_head.{name} has shape {tuple(found.shape)}, and {shape} fits a target "
                    f"of width {width} with {size} ids: these heads belong to another target."
                )
            return np.asarray(found)[: shape[0]]

        def block(k: int, i: int) -> Block:
            inputs = width * (k + 2) if hydra and i == 0 else width
            weight = take(f"{k}.{i}.linear.weight", width, inputs)
            return Block(put(weight.T), jnp.asarray(take(f"{k}.{i}.linear.bias", width), dtype))

        def put(matrix: np.ndarray) -> Array:
            return jnp.asarray(matrix, model.module().matrix_dtype)

        heads = []
        for k in range(settings["medusa_num_heads"]):
            linear = put(take(f"{k}.{layers}.weight", size, width).T) if own_head else None
            heads.append(Head(tuple(block(k, i) for i in range(layers)), linear))
        return cls(model, tuple(heads))


def width_of(target: LanguageModel) -> tuple[int, Any]:
    """The width E of a target, and the dtype of its hidden states."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    found = jax.eval_shape(lambda model, ids: model.module().embed(ids), target, ids)
    return found.shape[-1], found.dtype


FILES = {  # of the original repository; the older heads are pickles
    "medusa_lm_head.safetensors": SAFETENSORS.find,
    "medusa_lm_head.pt": TORCH.find,
}


def _head_of(name: str) -> int:
    """The number of the head that a tensor belongs to; −1 if it belongs to none."""
    number = name.removeprefix("medusa_head.").partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 5 else -1


def load_published(directory: str | os.PathLike, target: Checkpoint) -> Medusa:
    """Load heads that FasterDecoding/Medusa trained: config.json, and one of `FILES`.

    Heads beyond the number in config.json are left out, with a warning.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, or the heads do not fit the target.
    """
    place = pathlib.Path(directory)
    settings = read_json(place / "config.json")
    file = next((place / name for name in FILES if (place / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{place} has none of {', '.join(FILES)}; copy or download one.")
    stored, count = FILES[file.name](file), settings.get("medusa_num_heads")
    surplus = {name for name in stored if type(count) is int and _head_of(name) >= count}
    if surplus:
        warnings.warn(
            f"{place}: config.json says medusa_num_heads={count}, and {file.name} holds "
            f"{1 + max(map(_head_of, stored))} heads. Those after the first {count} are left out; "
            "a larger medusa_num_heads in config.json takes them.",
            stacklevel=4,
        )
    kept = {name: tensor for name, tensor in stored.items() if name not in surplus}
    arrays = {name: np.empty(tensor.shape, tensor.dtype) for name, tensor in kept.items()}
    for name, tensor in kept.items():
        read_into(tensor, arrays[name])
    try:
        return Medusa.from_tensors(settings, arrays, target)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
