"""Finds the parameters of T5X checkpoints, and derives the model's config from them.

A T5X checkpoint is a directory with a msgpack file `checkpoint`: a tree whose leaves are arrays or,
for most parameters, descriptions of zarr arrays in folders beside it, such as
`target.encoder.layers_0.attention.query.kernel`. tensorstore, which orbax brings along, reads
those. The run that wrote it leaves `config.gin` in the directory above. The layout is that of T5X's
examples of T5 1.0 and 1.1 (https://github.com/google-research/t5x), one layer after the other.
"""

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.formats import msgpack_files
from specjax.checkpoints.tensors import AGAIN, DTYPES, At, Tensor, Turned

FILE, GIN = "checkpoint", "config.gin"
LONGEST_GIN = 1 << 20  # bytes; T5X writes some 20,000
# Bytes that a chunk may take in any case; beyond them, at most twice the bytes of its array.
SMALL_CHUNK = 1 << 20
MAX_CHUNKS = 1 << 16  # of an array; T5X writes one for each device
TENSORFLOW = b"model_checkpoint_path"  # how TensorFlow's file of that name begins
# Their sizes: d_model, d_kv, d_ff, num_layers, num_heads.
SIZES = {
    "1_0": {
        "small": (512, 64, 2048, 6, 8),
        "base": (768, 64, 3072, 12, 12),
        "large": (1024, 64, 4096, 24, 16),
        "3b": (1024, 128, 16384, 24, 32),
        "11b": (1024, 128, 65536, 24, 128),
    },
    "1_1": {
        "small": (512, 64, 1024, 8, 6),
        "base": (768, 64, 2048, 12, 12),
        "large": (1024, 64, 2816, 24, 16),
        "xl": (2048, 64, 5120, 24, 32),
        "xxl": (4096, 64, 10240, 24, 64),
    },
}
NAMED = re.compile(r"t5(?:[._-]v?(?:1[._])?([01]))?[._-](small|base|large|xxl|xl|3b|11b)")
# Names of fields in gin and in config.json; tensors show these fields too.
GIN_FIELDS = {
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "num_heads": "num_heads",
}
ACTIVATIONS = {("relu",): "relu", ("gelu", "linear"): "gated-gelu"}
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
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_OUTSIDE = {
    "token_embedder/embedding": "shared.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
    **{f"{s}/{s}_norm/scale": f"{s}.final_layer_norm.weight" for s in _SUBLAYERS},
    **{f"{s}/relpos_bias/rel_embedding": f"{s}.{_BIAS}" for s in _SUBLAYERS},
}


@dataclasses.dataclass(frozen=True)
class ZarrTensor(Tensor):
    """A zarr array on disk; `file` is its folder."""

    as_bfloat16: bool = False
    """Whether the numbers are bfloat16, stored as uint16 by old versions of T5X."""

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield one chunk at a time, since each is compressed as a whole."""
        store = self.store
        chunk = store.chunk_layout.read_chunk.shape
        starts = [range(0, n, step) for n, step in zip(self.shape, chunk, strict=True)]
        for begin in product(*starts):
            at = tuple(
                slice(b, min(b + step, n))
                for b, step, n in zip(begin, chunk, self.shape, strict=True)
            )
            try:
                numbers = store[at].read().result()
            except Exception as error:  # tensorstore raises whatever its drivers do
                raise ValueError(f"{self.file} is damaged ({_first(error)}). {AGAIN}") from None
            yield at, numbers.view(self.dtype) if self.as_bfloat16 else numbers
            del numbers  # or it would be in memory beside the next

    @functools.cached_property
    def store(self) -> Any:
        """The array in tensorstore."""
        return _open(self.file)


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
    names = _names()
    found: dict[str, Tensor] = {}
    for path, leaf in _parameters(target):
        known = re.sub(r"layers_\d{1,4}", "layers_N", path)
        if known not in names:
            raise ValueError(
                f"{directory / FILE}: {path[:100]!r} is no parameter of a T5 of T5X's examples, "
                "one layer after the other; models whose layers are scanned are not supported."
            )
        layer = re.search(r"layers_(\d+)", path)
        name = names[known].replace("N", layer[1] if layer else "")
        array = leaf if isinstance(leaf, Tensor) else _array(directory, path, old)
        turned = path.endswith(("/kernel", "/rel_embedding"))
        found[name] = Turned.of(array) if turned and len(array.shape) == 2 else array
    return found


def config(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Derive the config.json that a T5X checkpoint lacks.

    Shapes give most of it. The rest comes from `config.gin` in the directory or the one above, or
    else from a size in the name of either, such as t5_1_1_small. Fields in both must agree.

    Raises:
      ValueError: the tensors lack what the sizes are read from, or gin asks for another model.
    """
    shared, bias = "shared.weight", f"encoder.{_BIAS}"
    query = "encoder.block.0.layer.0.SelfAttention.q.weight"
    wide = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    if missing := [name for name in (shared, bias, query, wide) if name not in tensors]:
        raise ValueError(f"{directory}: {missing[0]!r} is missing from the checkpoint. {AGAIN}")
    shapes = {name: tensors[name].shape for name in (shared, bias, query, wide)}
    if not all(len(shape) == 2 and min(shape) > 0 for shape in shapes.values()):
        raise ValueError(f"{directory}: a parameter has an impossible shape. {AGAIN}")
    heads = shapes[bias][1]
    gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in tensors
    fields = {
        "vocab_size": shapes[shared][0],
        "d_model": shapes[shared][1],
        "d_kv": shapes[query][0] // heads,
        "d_ff": shapes[wide][1],
        "num_layers": _layers(tensors, "encoder"),
        "num_decoder_layers": _layers(tensors, "decoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": shapes[bias][0],
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }
    return {"model_type": "t5", **fields, **_said(directory)} | {
        "tie_word_embeddings": "lm_head.weight" not in tensors
    }


def _layers(tensors: Mapping[str, Tensor], stack: str) -> int:
    numbers = [re.match(rf"{stack}\.block\.(\d+)\.", name) for name in tensors]
    return 1 + max((int(found[1]) for found in numbers if found), default=-1)


def _said(directory: Path) -> dict[str, Any]:
    """Fields from `config.gin` or, without one, from the size in the path."""
    for place in (directory, directory.absolute().parent):
        if (place / GIN).is_file():
            return _gin(place / GIN)
    for part in (directory.absolute().name, directory.absolute().parent.name):
        if found := NAMED.fullmatch(part.lower()):
            version = "1_1" if found[1] == "1" else "1_0"
            if sizes := SIZES[version].get(found[2]):
                keys = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
                fields = dict(zip(keys, sizes, strict=True))
                kind = "relu" if version == "1_0" else "gated-gelu"
                layers = {"num_decoder_layers": fields["num_layers"]}
                return {**fields, **layers, "feed_forward_proj": kind}
    return {}


def _gin(file: Path) -> dict[str, Any]:
    """Read the settings of `network.T5Config`, as bindings or as a block; macros are followed."""
    if file.stat().st_size > LONGEST_GIN:
        raise ValueError(f"{file} has more than {LONGEST_GIN:,} bytes. {AGAIN}")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    # At most one space in a row: the patterns below take quadratic time over longer runs.
    lines = [re.sub(r"\s+", " ", line.partition("#")[0]).rstrip() for line in lines]
    text = "\n".join(line for line in lines if line)
    macros = dict(re.findall(r"^(\w+)\s*=\s*(.+?)\s*$", text, re.MULTILINE))
    found = dict(re.findall(r"^(?:\w+\.)*T5Config\.(\w+)\s*=\s*(.+?)\s*$", text, re.MULTILINE))
    for block in re.findall(r"^(?:\w+\.)*T5Config:\s*\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE):
        found |= dict(re.findall(r"^\s+(\w+)\s*=\s*(.+?)\s*$", block, re.MULTILINE))

    def value(key: str) -> Any:
        literal: str = found[key]
        if literal.startswith("%"):
            literal = macros.get(literal[1:], literal)
        try:
            return ast.literal_eval(literal)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{file}: {key} = {literal} is no value. {AGAIN}") from None

    fields = {ours: value(theirs) for theirs, ours in GIN_FIELDS.items() if theirs in found}
    if "mlp_activations" in found:
        activations = value("mlp_activations")
        key = tuple(activations) if isinstance(activations, list | tuple) else (activations,)
        if key not in ACTIVATIONS:
            supported = " and ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"{file}: mlp_activations = {key} is not among {supported}.")
        fields["feed_forward_proj"] = ACTIVATIONS[key]
    return fields


def _names() -> dict[str, str]:
    """Map T5X's names, with N for the number of the layer, to Hugging Face's."""
    found = dict(_OUTSIDE)
    for stack, sublayers in _SUBLAYERS.items():
        for i, (norm, module, theirs) in enumerate(sublayers):
            place, layer = f"{stack}/layers_N", f"{stack}.block.N.layer.{i}"
            found[f"{place}/{norm}/scale"] = f"{layer}.layer_norm.weight"
            parts = {p: p for p in ("wi", "wi_0", "wi_1", "wo")} if module == "mlp" else _ATTENTION
            for part, ours in parts.items():
                found[f"{place}/{module}/{part}/kernel"] = f"{layer}.{theirs}.{ours}.weight"
    return found


def _parameters(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves: arrays, and maps that describe arrays elsewhere."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and not {"driver", "kvstore"} <= set(value):
            yield from _parameters(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


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
        raise ValueError(f"{folder} cannot be read ({_first(error)}). {AGAIN}") from None


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
