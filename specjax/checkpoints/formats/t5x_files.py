"""Finds the parameters of T5X checkpoints, and derives the model's config from them.

A T5X checkpoint is a directory with a msgpack file `checkpoint`: a tree whose leaves are arrays or,
for most parameters, descriptions of zarr arrays in folders beside it, such as
`target.encoder.layers_0.attention.query.kernel`. tensorstore, which orbax brings along, reads
those. The run that wrote it leaves `config.gin` in the directory above. The layout is that of T5X's
examples of T5 1.0 and 1.1 (https://github.com/google-research/t5x), or of its scalable T5, which
umT5 is: each parameter has all layers in one array, with an axis for them, and heads have an axis
of their own.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.config_json import MOST_LAYERS
from specjax.checkpoints.formats import msgpack_files
from specjax.checkpoints.tensors import AGAIN, DTYPES, At, Tensor, Turned
from specjax.support import files
from specjax.support.ranges import cause

FILE, GIN = "checkpoint", "config.gin"
# Bytes that a chunk may take in any case; beyond them, at most twice the bytes of its array.
SMALL_CHUNK = 1 << 20
MAX_CHUNKS = 1 << 16  # of an array; T5X writes one for each device
DESCRIBED = {"driver", "kvstore"}  # keys of a map that describes an array elsewhere
TENSORFLOW = b"model_checkpoint_path"  # how TensorFlow's file of that name begins
NUMBERED = re.compile(r"^(encoder|decoder)/layers_(\d{1,4})/")
SCANNED = re.compile(r"^(encoder|decoder)/\1/")  # what holds all layers has the stack's own name
ACTIVATIONS = (("relu",), ("gelu", "linear"))
_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
# For each stack: the sublayers of a layer, as (norm, module, Hugging Face's module).
_SUBLAYERS = {
    "encoder": (
        ("pre_attention_layer_norm", "attention", "SelfAttention"),
        ("pre_mlp_layer_norm", "mlp", "DenseReluDense"),
    ),
    "decoder": (
        ("pre_self_attention_layer_norm", "self_attention", "SelfAttention"),
        ("pre_cross_attention_layer_norm", "encoder_decoder_attention", "EncDecAttention"),
        ("pre_mlp_layer_norm", "mlp", "DenseReluDense"),
    ),
}
_BIAS = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
_RELATIVE = "relpos_bias/rel_embedding"
_OUTSIDE = {
    "token_embedder/embedding": "shared.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
    **{f"{s}/{s}_norm/scale": f"{s}.final_layer_norm.weight" for s in _SUBLAYERS},
    **{f"{s}/{_RELATIVE}": _BIAS.format(s, 0) for s in _SUBLAYERS},
}


@dataclasses.dataclass(frozen=True)
class ZarrTensor(Tensor):
    """A zarr array on disk; `file` is its folder."""

    as_bfloat16: bool = False
    """Whether the numbers are bfloat16, stored as uint16 by old versions of T5X."""

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield one chunk at a time, since each is compressed as a whole."""
        yield from self.within(tuple(slice(0, size) for size in self.shape))

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the numbers of a part; chunks that hold none of it are not read."""
        store = self.store
        chunk = store.chunk_layout.read_chunk.shape
        lengths = list(zip(part, chunk, strict=True))
        starts = [range(axis.start - axis.start % n, axis.stop, n) for axis, n in lengths]
        for begin in product(*starts):
            at = tuple(
                slice(max(b, axis.start), min(b + n, axis.stop))
                for b, (axis, n) in zip(begin, lengths, strict=True)
            )
            try:
                numbers = store[at].read().result()
            except Exception as error:  # tensorstore raises whatever its drivers do
                raise ValueError(f"{self.file} is damaged ({cause(error, 200)}). {AGAIN}") from None
            place = tuple(
                slice(here.start - axis.start, here.stop - axis.start)
                for here, axis in zip(at, part, strict=True)
            )
            yield place, numbers.view(self.dtype) if self.as_bfloat16 else numbers
            del numbers  # or it would be in memory beside the next

    @functools.cached_property
    def store(self) -> Any:
        """The array in tensorstore."""
        return _open(self.file)


@dataclasses.dataclass(frozen=True)
class Layer(Tensor):
    """A layer of an array that holds all layers."""

    stored: Tensor
    axis: int
    index: int

    @classmethod
    def of(cls, stored: Tensor, axis: int, index: int) -> "Layer":
        """The layer of this index along the axis."""
        shape = stored.shape[:axis] + stored.shape[axis + 1 :]
        return cls(stored.file, stored.dtype, shape, stored, axis, index)

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the pieces of the stored array that hold the layer."""
        whole = [slice(0, size) for size in self.stored.shape]
        whole[self.axis] = slice(self.index, self.index + 1)
        for at, piece in self.stored.within(tuple(whole)):
            yield at[: self.axis] + at[self.axis + 1 :], piece.squeeze(self.axis)
            del piece


@dataclasses.dataclass(frozen=True)
class Joined(Tensor):
    """A matrix that the file holds with an axis of heads before that of their size."""

    stored: Tensor
    axis: int
    """That of the heads."""

    @classmethod
    def of(cls, stored: Tensor, axis: int) -> "Joined":
        """The array of three axes as a matrix."""
        *_, heads, size = shape = stored.shape[: axis + 2]
        shape = (*shape[:axis], heads * size, *stored.shape[axis + 2 :])
        return cls(stored.file, stored.dtype, shape, stored, axis)

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the pieces of the stored array, a head at a time."""
        axis, size = self.axis, self.stored.shape[self.axis + 1]
        for at, piece in self.stored.pieces():
            for i, head in enumerate(range(at[axis].start, at[axis].stop)):
                rows = slice(head * size + at[axis + 1].start, head * size + at[axis + 1].stop)
                yield (*at[:axis], rows, *at[axis + 2 :]), piece.take(i, axis=axis)
            del piece


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory itself holds a T5X checkpoint."""
    file = directory / FILE
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(TENSORFLOW)) != TENSORFLOW


def latest(directory: Path) -> Path:
    """The directory, or that of the last step if it holds only steps."""
    steps = {
        int(path.parent.name.removeprefix("checkpoint_")): path.parent
        for path in directory.glob(f"checkpoint_*/{FILE}")
        if path.parent.name.removeprefix("checkpoint_").isdecimal()
    }
    return steps[max(steps)] if steps else directory


def find(directory: Path) -> dict[str, Tensor]:
    """Find all parameters, named and laid out as in T5's torch models.

    Raises:
      FileNotFoundError: an array's folder is missing.
      ValueError: a file is damaged, or a parameter is not one of such a T5.
    """
    tree = msgpack_files.read_tree(directory / FILE)
    optimizer = tree.get("optimizer")
    target = optimizer.get("target") if isinstance(optimizer, Mapping) else None
    if not isinstance(target, Mapping):
        raise ValueError(f"{directory / FILE} has no 'optimizer/target': it is none of T5X's.")
    old = isinstance(version := tree.get("version"), int) and version < 3
    names, arrays = _names(), dict[str, Tensor]()
    for path, leaf in msgpack_files.leaves(target, described=DESCRIBED):
        if _known(path) not in names:
            raise ValueError(
                f"{directory / FILE}: {path[:100]!r} is no parameter of a T5 of T5X's examples."
            )
        arrays[path] = leaf if isinstance(leaf, Tensor) else _array(directory, path, old)
    found: dict[str, Tensor] = {}
    for path, layer, array in _by_layer(directory / FILE, arrays):
        name = names[_known(path)].replace("N", layer)
        if name in found:
            raise ValueError(f"{directory / FILE} holds {path!r} a second time. {AGAIN}")
        found[name] = _as_in_torch(path, array)
    return found


def _known(path: str) -> str:
    """A parameter's path with N for the number of the layer, scanned or not."""
    return SCANNED.sub(r"\1/layers_N/", NUMBERED.sub(r"\1/layers_N/", path))


def _scan_axis(arrays: Mapping[str, Tensor]) -> int:
    """The axis of scanned layers: 1, T5X's default, unless a norm's scale has them first."""
    embedding = arrays.get("token_embedder/embedding")
    width = embedding.shape[-1:] if embedding else ()
    norms = [a.shape for p, a in arrays.items() if SCANNED.match(p) and p.endswith("/scale")]
    return 0 if any(shape[1:] == width != shape[:1] for shape in norms) else 1


def _by_layer(file: Path, arrays: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each path with the number of a layer, "" outside of them, and its array."""
    axis, counts = _scan_axis(arrays), dict[str, tuple]()
    for path, array in arrays.items():
        if not SCANNED.match(path):
            number = NUMBERED.match(path)
            yield path, number[2] if number else "", array
            continue
        count = array.shape[axis : axis + 1]
        known = counts.setdefault(path.partition("/")[0], count)
        if count != known or not (MOST_LAYERS,) >= count > (0,):
            raise ValueError(
                f"{file}: {path!r} has shape {array.shape}: axis {axis} should have the layers, at "
                f"most {MOST_LAYERS} and as many as others of the stack. {AGAIN}"
            )
        for i in range(*count):
            yield path, str(i), Layer.of(array, axis, i)


def _as_in_torch(path: str, array: Tensor) -> Tensor:
    """A parameter as torch's models have it: a matrix as (out, in), with its heads joined."""
    if not path.endswith(("/kernel", "/rel_embedding")):
        return array
    if len(array.shape) == 3:
        array = Joined.of(array, 0 if path.endswith("/out/kernel") else 1)
    return Turned.of(array) if len(array.shape) == 2 else array


def config(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Derive the config.json that a T5X checkpoint lacks.

    Shapes give all of it. `config.gin`, there or in the directory above, may name activations.

    Raises:
      ValueError: the tensors lack what the sizes are read from, or gin names other activations.
    """
    shared, bias = "shared.weight", _BIAS.format("encoder", 0)
    query = "encoder.block.0.layer.0.SelfAttention.q.weight"
    wide = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    if missing := [name for name in (shared, bias, query, wide) if name not in tensors]:
        raise ValueError(f"{directory}: {missing[0]!r} is missing from the checkpoint. {AGAIN}")
    shapes = {name: tensors[name].shape for name in (shared, bias, query, wide)}
    if not all(len(shape) == 2 and min(shape) > 0 for shape in shapes.values()):
        raise ValueError(f"{directory}: a parameter has an impossible shape. {AGAIN}")
    names = {"num_layers": "encoder", "num_decoder_layers": "decoder"}
    last = ".layer.0.SelfAttention.q.weight"
    layers = {
        field: sum(name.startswith(stack) and name.endswith(last) for name in tensors)
        for field, stack in names.items()
    }
    heads = shapes[bias][1]
    gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in tensors
    fields = {
        "vocab_size": shapes[shared][0],
        "d_model": shapes[shared][1],
        "d_kv": shapes[query][0] // heads,
        "d_ff": shapes[wide][1],
        **layers,
        "num_heads": heads,
        "relative_attention_num_buckets": shapes[bias][0],
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }
    _check_activations(directory)
    each = any(_BIAS.format(stack, 1) in tensors for stack in _SUBLAYERS)
    tied = "lm_head.weight" not in tensors
    return {"model_type": "umt5" if each else "t5", "tie_word_embeddings": tied, **fields}


def _check_activations(directory: Path) -> None:
    """Raise ValueError if `config.gin` names activations that T5 has not; macros are followed."""
    for file in (directory / GIN, directory.absolute().parent / GIN):
        if file.is_file():
            text = files.read_limited(file).decode(errors="replace")
            named = re.findall(r"\bmlp_activations\s*=([^#\n]+)", text)
            macros = dict(re.findall(r"^(\w+) *=([^#\n]+)", text, re.MULTILINE))
            for value in named[-1:]:
                value = macros.get(value.strip().lstrip("%"), value)
                if (found := tuple(re.findall(r"\w+", value))) not in ACTIVATIONS:
                    supported = " and ".join(map(repr, ACTIVATIONS))
                    raise ValueError(f"{file}: mlp_activations = {found} is not among {supported}.")
            return


def _names() -> dict[str, str]:
    """Map T5X's names, with N for the number of the layer, to Hugging Face's."""
    found = dict(_OUTSIDE)
    for stack, sublayers in _SUBLAYERS.items():
        found[f"{stack}/layers_N/{_RELATIVE}"] = _BIAS.format(stack, "N")
        for i, (norm, module, theirs) in enumerate(sublayers):
            place, layer = f"{stack}/layers_N", f"{stack}.block.N.layer.{i}"
            found[f"{place}/{norm}/scale"] = f"{layer}.layer_norm.weight"
            parts = {p: p for p in ("wi", "wi_0", "wi_1", "wo")} if module == "mlp" else _ATTENTION
            for part, ours in parts.items():
                found[f"{place}/{module}/{part}/kernel"] = f"{layer}.{theirs}.{ours}.weight"
    return found


def _array(directory: Path, path: str, old: bool) -> ZarrTensor:
    """Open an array by its path: its description may name a place that is out of date."""
    folder = directory / f"target.{path.replace('/', '.')}"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is missing, but {directory / FILE} lists it. Copy or download it too."
        )
    store = _open(folder)
    _check_chunks(folder, store)
    stored = store.dtype.name
    as_bfloat16 = old and stored == "uint16"
    if stored not in DTYPES and not as_bfloat16:
        raise ValueError(f"{folder} holds {stored}, not floats. {AGAIN}")
    dtype = DTYPES["bfloat16" if as_bfloat16 else stored]
    return ZarrTensor(folder, dtype, tuple(store.shape), as_bfloat16)


def _check_chunks(folder: Path, store: Any) -> None:
    """Raise ValueError if a chunk takes far more memory than its array, or there are too many."""
    chunk, width = store.chunk_layout.read_chunk.shape, store.dtype.numpy_dtype.itemsize
    whole = math.prod(chunk) * width
    # Blosc allocates the size that a chunk states; other formats decode up to the chunk's size.
    if (store.spec().to_json()["metadata"].get("compressor") or {}).get("id") == "blosc":
        files = (file for file in folder.rglob("[0-9]*") if file.is_file())
        whole = max(map(_blosc_bytes, files), default=whole)
    if whole > max(SMALL_CHUNK, 2 * math.prod(store.shape) * width):
        raise ValueError(
            f"{folder}: a chunk has {whole:,} bytes, and the array is one of shape {store.shape}. "
            f"{AGAIN}"
        )
    chunks = math.prod(-(-size // step) for size, step in zip(store.shape, chunk, strict=True))
    if chunks > MAX_CHUNKS:
        raise ValueError(
            f"{folder} is cut into {chunks:,} chunks; {MAX_CHUNKS:,} are read. {AGAIN}"
        )


def _blosc_bytes(file: Path) -> int:
    """The number of bytes that a chunk states it holds."""
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(8)[4:], "little")


@functools.cache
def _one_thread() -> Any:
    """A context of one thread: chunks are read one at a time, and each thread keeps memory."""
    import tensorstore

    limit = {"limit": 1}
    return tensorstore.Context({"data_copy_concurrency": limit, "file_io_concurrency": limit})


def _open(folder: Path) -> Any:
    import tensorstore  # imported here: only these files need it

    place = {"driver": "file", "path": str(folder)}
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": place}
    try:
        store = tensorstore.open(spec, open=True, read=True, context=_one_thread()).result()
        if store.spec().to_json()["metadata"].get("fill_value") is None:
            # Without a fill value, a missing chunk is lost; with one, it may hold that value alone.
            spec["fill_missing_data_reads"] = False
            store = tensorstore.open(spec, open=True, read=True, context=_one_thread()).result()
        return store
    except Exception as error:  # tensorstore raises whatever its drivers do
        raise ValueError(f"{folder} cannot be read ({cause(error, 200)}). {AGAIN}") from None
