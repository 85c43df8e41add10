"""The state of a training run on a mesh: where it lies, and how files and optimizers see it.

Parameters lie as in decoding: `sharding.CUTS` cuts them over the model axis, and each device of
the data axis has a copy. The rows of a batch lie over the data axis. One device is a mesh of one.

Files and the optimizer see the matrices of a checkpoint, `Layout.apart`. A fused projection on a
mesh has its rows in an order that depends on the mesh, and its parts have scales of their own: T5
starts queries √D smaller than keys, and Adafactor's steps follow the scale of each matrix.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from specjax.models import meshes, sharding
from specjax.models.layers import Fused, arrange
from specjax.models.sharding import DATA, MODEL, Placement


def placement_for(shape: Any, mesh: str) -> Placement:
    """The placement of a model of this shape on "data=4,model=2"; "": on one device."""
    return sharding.fit(shape, Placement(meshes.mesh_of(mesh or f"{DATA}=1")))[1]


def sizes_of(mesh: str) -> tuple[int, int]:
    """The devices of the data axis and of the model axis; ValueError as `meshes.sizes_of`."""
    sizes = meshes.sizes_of(mesh) if mesh else {}
    return sizes.get(DATA, 1), sizes.get(MODEL, 1)


def check(shape: Any, mesh: str) -> None:
    """Raise ValueError unless the model axis divides heads, feed-forward width and vocabulary.

    Decoding pads or replicates what an axis does not divide. In training the copies would have to
    be kept alike.
    """
    _, ways = sizes_of(mesh)
    names = dict.fromkeys(sharding.sizes_to_split(shape))
    stacks = {"": shape, "encoder.": getattr(shape, "encoder", None)}  # a T5Gemma has two
    sizes = {
        f"{place}{name}": getattr(stack, name)
        for place, stack in stacks.items()
        for name in (*names, "vocab_size")
        if stack is not None
    }
    if odd := [f"{name}={size}" for name, size in sizes.items() if size % ways]:
        raise ValueError(
            f"mesh={mesh!r}: {' and '.join(odd)} cannot be split over {ways} devices. Choose a "
            "model axis that divides them, or the data axis alone."
        )


def check_rows(
    buckets: tuple[tuple[int, int], ...], target_tokens: int, accumulate: int, mesh: str
) -> None:
    """Raise ValueError unless microbatches and data axis divide the rows of every bucket."""
    data, _ = sizes_of(mesh)
    for _, length in buckets:
        rows = max(1, target_tokens // length)
        if rows % (accumulate * data):
            raise ValueError(
                f"target_tokens={target_tokens} gives {rows} rows of {length} tokens, which "
                f"accumulate={accumulate} microbatches of data={data} devices do not divide. "
                "Choose numbers whose product divides the rows of every bucket."
            )


def placed(
    module: Any, placement: Placement, *, ordered: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Put a module on a mesh for training, with weights that lie (out, in).

    Args:
      ordered: the module was loaded on this mesh. Otherwise each process has all of it, with rows
        in a checkpoint's order.
    """
    module = sharding.split(arrange(module, platform=None), placement)
    order = {} if ordered else sharding.order(module, placement)
    specs, found = sharding.specs(module, placement), []
    graphdef, params = nnx.split(module)
    for path, variable in nnx.to_flat_state(params):
        x = variable[...]
        if ordered:
            x = jax.jit(lambda x: x, out_shardings=specs[path])(x)
        else:
            x = sharding.put_on(x[order[path]] if path in order else x, specs[path])
        found.append((path, variable.replace(x)))
    return graphdef, nnx.from_flat_state(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where parameters and optimizer state of a model in training lie."""

    graphdef: nnx.GraphDef
    params: nnx.State  # or shapes
    placement: Placement

    @classmethod
    def of(cls, graphdef: nnx.GraphDef, params: nnx.State, placement: Placement) -> "Layout":
        """The layout of parameters from `placed`, or of their shapes; it holds shapes alone."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return cls(graphdef, shapes, placement)

    @functools.cached_property
    def specs(self) -> dict[tuple, NamedSharding]:
        """The sharding of each parameter, by its path."""
        return sharding.specs(nnx.merge(self.graphdef, self.params), self.placement)

    @functools.cached_property
    def shardings(self) -> nnx.State:
        """The shardings of the parameters, as a tree like theirs."""
        flat = nnx.to_flat_state(self.params)
        return nnx.from_flat_state([(path, slot.replace(self.specs[path])) for path, slot in flat])

    @functools.cached_property
    def fused(self) -> dict[tuple, Fused]:
        """The fused projections, by path."""
        nodes = nnx.iter_graph(nnx.merge(self.graphdef, self.params))
        return {path: node for path, node in nodes if isinstance(node, Fused)}

    def apart(self, params: nnx.State) -> dict[str, Array]:
        """The parameters as a checkpoint's matrices, (out, in), each part of a fused one by itself.

        No device sends anything: the rows of a part lie together on each.
        """
        found = {}
        for path, variable in nnx.to_flat_state(params):
            x, name, layer = variable[...], _name(path), self.fused.get(path[:-1])
            if layer is None:
                found[name] = x
                continue
            blocks = x.reshape(layer.shards, -1, *x.shape[1:])
            ends = np.cumsum(layer.parts)[:-1] // layer.shards
            for i, part in enumerate(jnp.split(blocks, ends, axis=1)):
                found[f"{name}/{i}"] = part.reshape(-1, *x.shape[1:])
        return found

    def together(self, matrices: dict[str, Array]) -> nnx.State:
        """The inverse of `apart`."""
        found = []
        for path, slot in nnx.to_flat_state(self.params):
            name, layer = _name(path), self.fused.get(path[:-1])
            if layer is None:
                x = matrices[name]
            else:
                parts = (matrices[f"{name}/{i}"] for i in range(len(layer.parts)))
                blocks = [part.reshape(layer.shards, -1, *part.shape[1:]) for part in parts]
                x = jnp.concatenate(blocks, axis=1).reshape(slot.shape)
            found.append((path, slot.replace(x)))
        return nnx.from_flat_state(found)

    def on_matrices(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        """An optimizer of the parameters, by one that sees them `apart`."""

        def init(params: nnx.State) -> Any:
            return inner.init(self.apart(params))

        def update(gradient: nnx.State, state: Any, params: nnx.State) -> tuple[nnx.State, Any]:
            updates, state = inner.update(self.apart(gradient), state, self.apart(params))
            return self.together(updates), state

        return optax.GradientTransformation(init, update)

    def of_matrices(self, tree: Any) -> Any:
        """The shardings of a tree of arrays or shapes that has dicts like `apart`.

        An array in the shape of its matrix lies as the matrix does. All others, such as Adafactor's
        sums over rows and columns, are small, and every device has them whole.
        """
        shapes = jax.eval_shape(self.apart, self.params)
        specs = {_name(path): spec for path, spec in self.specs.items()}

        def of(path: tuple, leaf: Any) -> NamedSharding:
            keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
            if keys and keys[-1] in shapes and leaf.shape == shapes[keys[-1]].shape:
                return specs.get(keys[-1]) or specs[keys[-1].rpartition("/")[0]]
            return self.placement.sharding()

        return jax.tree_util.tree_map_with_path(of, tree)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))
