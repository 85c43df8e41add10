"""A model over several devices: which axis of which parameter, and where rows and caches lie.

A mesh has an axis "data", which splits the rows of a batch, an axis "model", which splits the
model, or both. Parameters carry their shardings; jax's compiler partitions the loops and places the
collectives. Few collectives need this:

- A matrix is split over its outputs, or over its inputs, as `CUTS` has it. A
  sublayer then needs one all-reduce. Heads stay whole.
- A fused projection is split within each of its parts: `layers.Fused` has the rows of one device
  together, in as many `shards` as the axis has devices. Files are read in this `order`.
- Heads of keys and values that are fewer than the devices are repeated, so that each device has the
  head that its queries read. The vocabulary is padded. Layers that still cannot be split evenly are
  replicated: attention if the axis does not divide its heads, feed-forward if not its width. The
  heads of a T5Gemma's encoder are not repeated.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from specjax import devices
from specjax.models.attention import KV
from specjax.models.decoder import Decoder
from specjax.models.layers import Fused, Linear
from specjax.models.meshes import DATA, MODEL

T = TypeVar("T")
M = TypeVar("M", bound=nnx.Module)
ANY = PartitionSpec.UNCONSTRAINED
OUT, IN = 0, 1  # axes of a weight as checkpoints have it, (out, in)


class Cut(NamedTuple):
    """The way in which the model axis cuts a projection."""

    unit: str
    """The unit that stays whole: "heads", "inner" (feed-forward columns) or "vocabulary"."""
    axis: int
    """OUT: each device has some outputs. IN: each has a part of the sum, which is all-reduced."""


# By the last two names of a layer's path. All others are replicated: norms, positions, and a
# drafter's layers beside its target.
CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("attention.qkv", "cross.query", "cross.kv"), Cut("heads", OUT)),
    **dict.fromkeys(("attention.output", "cross.output"), Cut("heads", IN)),
    "feed_forward.input": Cut("inner", OUT),
    "feed_forward.output": Cut("inner", IN),
    **dict.fromkeys(("embedding", "encoder_embedding", "head"), Cut("vocabulary", OUT)),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh that a model lies on: part of a `LanguageModel`'s type."""

    mesh: Mesh | AbstractMesh
    replicate: bool = False
    """Whether every device has the whole model, as suits a draft: it needs no collectives."""
    vocab_size: int = 0
    """Rows of the embedding in its checkpoint, before padding."""
    kv_heads: int = 0
    """Heads of keys and values before they were repeated."""

    @property
    def ways(self) -> int:
        """The number of devices that split the model."""
        return 1 if self.replicate else self.mesh.shape.get(MODEL, 1)

    @property
    def first(self) -> jax.Device:
        """A device of the mesh in this process; jax's own choice for an abstract mesh."""
        if isinstance(self.mesh, AbstractMesh):
            return devices.find()
        return self.mesh.local_devices[0]

    @property
    def local(self) -> int:
        """The number of the mesh's devices in this process."""
        return 1 if isinstance(self.mesh, AbstractMesh) else len(self.mesh.local_devices)

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array, from a mesh axis, None or ANY for each of its axes."""
        there = [axis if axis is ANY or axis in self.mesh.axis_names else None for axis in axes]
        return NamedSharding(self.mesh, PartitionSpec(*there))

    def _even(self, axis: str, size: int) -> str | None:
        """The axis, if it divides the size; else None."""
        ways = self.ways if axis == MODEL else self.mesh.shape.get(axis, 1)
        return axis if ways > 1 and size % ways == 0 else None

    def rows(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an array with rows first: split if the data axis divides them."""
        return self.sharding(self._even(DATA, shape[0]), *[None] * (len(shape) - 1))

    def heads(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of (B, H, …): rows over one axis, heads over the other, if they divide."""
        rest = [None] * (len(shape) - 2)
        return self.sharding(self._even(DATA, shape[0]), self._even(MODEL, shape[1]), *rest)

    def gathered(self, logits: jax.Array) -> jax.Array:
        """Gather logits, so that each device has the whole last axis: a call's only gather."""
        if self.ways == 1:
            return logits
        whole = self.sharding(*[ANY] * (logits.ndim - 1), None)
        return jax.lax.with_sharding_constraint(logits, whole)

    def begun(self, context: Any, cache: Any) -> tuple[Any, Any]:
        """Place the results of a model's `start`: keys and values by heads, all else by rows."""

        def place(x: Any) -> Any:
            if isinstance(x, KV):
                return jax.tree.map(lambda part: _constrain(part, self.heads(part.shape)), x)
            if x.ndim == 2:  # T5's bias, (H, 2T)
                return _constrain(x, self.sharding(self._even(MODEL, x.shape[0]), None))
            return _constrain(x, self.rows(x.shape))

        return jax.tree.map(place, (context, cache), is_leaf=lambda x: isinstance(x, KV))


_constrain = jax.lax.with_sharding_constraint


# --- models --------------------------------------------------------------------------------------


def sizes_to_split(config: Any) -> tuple[str, ...]:
    """The fields of a config that count heads, heads of keys and values, of which there may be
    fewer, and the columns of a feed-forward layer; (): the model is replicated."""
    return getattr(config, "split_sizes", ())


def fit(config: T, placement: Placement) -> tuple[T, Placement]:
    """Fit a config to a mesh. Returns it with the placement that notes the changes.

    The vocabulary is padded to a multiple of the model axis. Heads of keys and values that are
    fewer than the devices are repeated. Each device then holds one, and the cache of all devices
    together grows as much.
    """
    ways = placement.ways
    vocab: int = config.vocab_size  # type: ignore[attr-defined]
    placement = dataclasses.replace(placement, vocab_size=vocab)
    changes: dict[str, Any] = {"vocab_size": vocab + -vocab % ways}
    if encoder := getattr(config, "encoder", None):
        changes["encoder"] = dataclasses.replace(encoder, **changes)
    if sizes := sizes_to_split(config):
        query, key, _ = sizes
        heads, kv_heads = getattr(config, query), getattr(config, key)
        placement = dataclasses.replace(placement, kv_heads=kv_heads)
        if kv_heads < ways and ways % kv_heads == 0 and heads % ways == 0:
            changes[key] = ways
    return dataclasses.replace(config, **changes), placement  # type: ignore[type-var]


def split(module: M, placement: Placement) -> M:
    """Mark a module's projections as split, and set the shards of fused ones, in place."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, Linear | Decoder):
            node.split = placement.ways > 1
        if isinstance(node, Fused):
            node.shards = placement.ways if _cut(module, path, placement) else 1
    return module


def _cut(module: Any, path: tuple, placement: Placement) -> Cut | None:
    """The cut of the layer, or of the embedding, at a path; None: it is whole."""
    config = getattr(module, "config", None)
    if path[0] == "encoder":
        config = getattr(config, "encoder", config)  # a T5Gemma's stacks have sizes of their own
    cut, names = CUTS.get(".".join(map(str, path[-2:]))), sizes_to_split(config)
    if cut is None or not names or placement.ways == 1:
        return None
    _, heads, inner = names
    sizes = {
        "heads": getattr(config, heads),
        "inner": getattr(config, inner),
        "vocabulary": config.vocab_size,  # type: ignore[union-attr]
    }
    return None if sizes[cut.unit] % placement.ways else cut


def specs(module: nnx.Module, placement: Placement) -> dict[tuple, NamedSharding]:
    """The sharding of each parameter by its path in the module, turned as the parameter is."""
    turned = turned_paths(module)

    def of(path: tuple, ndim: int) -> NamedSharding:
        layer = path[:-1] or (path[-1].removesuffix("_scale"),)
        cut = _cut(module, layer, placement)
        axes: list[str | None] = [None] * ndim
        if cut is not None and cut.axis < ndim:  # a bias, or scales of int8, have outputs alone
            axes[cut.axis] = MODEL
        return placement.sharding(*(axes[::-1] if path in turned else axes))

    slots = nnx.to_flat_state(nnx.state(module))
    return {path: of(path, len(slot.shape)) for path, slot in slots}


def turned_paths(module: nnx.Module) -> set[tuple]:
    """Paths of the parameters that `layers.arrange` has transposed."""
    nodes = list(nnx.iter_graph(module))
    turned = {id(n.turned_weight()) for _, n in nodes if getattr(n, "input_first", False)}
    return {path for path, node in nodes if id(node) in turned}


def shardings(model: T) -> T:
    """The NamedShardings of a model's parameters, in a `LanguageModel` of the same structure."""
    placement: Placement = model.placement  # type: ignore[attr-defined]
    by_path = specs(model.module(), placement)  # type: ignore[attr-defined]
    return jax.tree.map_with_path(
        lambda path, _: by_path[tuple(getattr(entry, "key", None) for entry in path[1:])], model
    )


def abstract(model: T) -> T:
    """Outline a model on its mesh: shapes with their shardings. Nothing is allocated."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model,
        shardings(model),
    )


def order(module: nnx.Module, placement: Placement) -> dict[tuple, np.ndarray]:
    """The order of rows, of parameters whose rows are not in a checkpoint's order.

    Each entry is a row of the checkpoint; −1: padding. Rows are outputs of weights that are
    (out, in); a fused projection's are those of all its parts, stacked.
    """
    found = {}
    paths = dict(nnx.iter_graph(module))
    for path, node in paths.items():
        if isinstance(node, Fused) and node.shards > 1:
            repeats = _repeats(module, path, placement)
            for name in ("weight", "weight_scale", "bias"):
                found[*path, name] = _fused_order(node.parts, repeats, node.shards)
    if isinstance(module, Decoder) and module.vocab_size > placement.vocab_size:
        rows = np.arange(module.vocab_size)
        tables = "embedding", "head", "encoder_embedding"
        for name in (part for table in tables for part in (table, f"{table}_scale")):
            found[name,] = np.where(rows < placement.vocab_size, rows, -1)
    return {path: rows for path, rows in found.items() if path in paths}


def moved(model: Any) -> dict[tuple, np.ndarray]:
    """The `order` of parameters by path in `params`; empty if all are as in a checkpoint."""
    placement = getattr(model, "placement", None)
    return {} if placement is None else order(model.module(), placement)


def restored(array: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """Put a parameter's rows, (out, in), into a checkpoint's order."""
    if rows is None:
        return array
    plain = np.empty((rows.max() + 1, *array.shape[1:]), array.dtype)
    plain[rows[rows >= 0]] = array[rows >= 0]
    return plain


def _repeats(module: Any, path: tuple, placement: Placement) -> list[int]:
    """The number of repeats of the heads of each part."""
    parts = len(module_at(module, path).parts)
    names = sizes_to_split(getattr(module, "config", None))
    if path[-1] not in ("qkv", "kv") or path[0] == "encoder" or not names:
        return [1] * parts
    often = getattr(module.config, names[1]) // placement.kv_heads
    return [1, often, often][-parts:]


def module_at(module: Any, path: tuple) -> Any:
    """The module or parameter at a path of `nnx.iter_graph`."""
    for name in path:
        module = module[name] if isinstance(name, int) else getattr(module, name)
    return module


def _fused_order(parts: tuple[int, ...], repeats: list[int], shards: int) -> np.ndarray:
    """The `order` of a fused projection. Repeated heads: each shard has one."""
    blocks = []
    for shard in range(shards):
        offset = 0
        for width, often in zip(parts, repeats, strict=True):
            size = width // shards
            begin = shard // often * size
            blocks.append(offset + begin + np.arange(size))
            offset += width // often
    return np.concatenate(blocks)


# --- what runs on a mesh -------------------------------------------------------------------------


def placement_of(tree: Any) -> Placement | None:
    """The placement of the first model in a pytree that has one."""
    for node in jax.tree.leaves(tree, is_leaf=_is_placed):
        if _is_placed(node):
            return node.placement
    return None


def _is_placed(x: Any) -> bool:
    return getattr(x, "placement", None) is not None


def join(tree: T, placement: Placement | None) -> T:
    """Put a drafter on its target's mesh, replicating parts without one. None: unchanged.

    Raises:
      ValueError: a part of it lies on another mesh.
    """
    theirs = placement_of(tree)
    if theirs is not None and (placement is None or theirs.mesh != placement.mesh):
        there = "none" if placement is None else _shown(placement.mesh)
        raise ValueError(
            f"The draft lies on the mesh {_shown(theirs.mesh)}, and its target on {there}: load "
            "both with the same mesh."
        )
    if placement is None:
        return tree
    copies = dataclasses.replace(placement, replicate=True)
    whole, mesh = copies.sharding(), placement.mesh

    def put(x: Any) -> Any:
        if _is_placed(x) or getattr(getattr(x, "sharding", None), "mesh", None) == mesh:
            return x
        if hasattr(x, "placement"):
            return dataclasses.replace(jax.tree.map(put, x), placement=copies)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        return put_on(x, whole)

    return jax.tree.map(put, tree, is_leaf=lambda x: hasattr(x, "placement"))


def _shown(mesh: Any) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def put_on(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Put an array on a mesh. Each of several processes has the same array, and puts its part."""
    if place.is_fully_addressable:
        return jax.device_put(x, place)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        wide = NamedSharding(place.mesh, PartitionSpec(*place.spec, None))
        return jax.random.wrap_key_data(put_on(data, wide))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, place, lambda at: host[at])


def fetch(tree: Any) -> Any:
    """Fetch whole arrays of a mesh to the host, in each process that has a part of them."""

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return jax.device_get(x)

    return jax.tree.map(whole, tree)


def place_rows(tree: T, placement: Placement | None) -> T:
    """Split arrays or shapes with rows first over the data axis. None: unchanged."""
    if placement is None:
        return tree

    def put(x: Any) -> Any:
        sharding = placement.rows(x.shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return put_on(x, sharding)

    return jax.tree.map(put, tree)


def keep_rows(method: Any, state: T, rows: int) -> T:
    """Split each array of `rows` rows of a loop's state over the data axis, within jit.

    The carry then begins as the loop's body leaves it. `begun` has placed the heads.
    """
    placement = placement_of(method)
    if placement is None:
        return state

    def by_rows(part: jax.Array) -> jax.Array:
        split = placement.sharding(*placement.rows(part.shape).spec[:1], ANY)
        return _constrain(part, split)

    def place(x: Any) -> Any:
        if isinstance(x, KV):
            return jax.tree.map(by_rows, x)
        if x.ndim == 0:
            return x
        sharding = placement.rows(x.shape) if x.shape[0] == rows else placement.sharding()
        return _constrain(x, sharding)

    return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, KV))


def results_of(compiled: jax.stages.Compiled, shapes: T, placement: Placement | None) -> T:
    """A program's results as shapes; on a mesh, with the shardings that the compiler chose."""
    if placement is None:
        return shapes
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        compiled.output_shardings,
    )


def held_by(model: Any) -> tuple[jax.Device, int]:
    """A device of this process that holds a part of a model, and the number of such devices."""
    placement = placement_of(model)
    if placement is None:
        return devices.device_of(model), 1
    return placement.first, placement.local


def padded_rows(rows: int, placement: Placement | None) -> int:
    """Round the number of rows up to a multiple of the data axis."""
    return rows if placement is None else rows + -rows % placement.mesh.shape.get(DATA, 1)
