"""Writes the weights of a checkpoint in every format that is read, without torch.

`pickled` writes instructions one by one, so that hostile ones can be written too.
"""

import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from flax import serialization, traverse_util

STORAGES = {"float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "bool": "Bool"}
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True}, 2)


def text(value: str) -> bytes:
    """The instruction that pushes a string."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    """The instruction that pushes an integer."""
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def sequence(values: tuple[int, ...]) -> bytes:
    """The instructions that push a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(key: str, array: np.ndarray, *, legacy: bool = False) -> bytes:
    """The instructions that push a tensor, contiguous, which has a storage of its own."""
    strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
    kind = STORAGES[array.dtype.name].encode()
    storage = b"(" + text("storage") + b"ctorch\n" + kind + b"Storage\n" + text(key) + text("cpu")
    storage += number(array.size) + (b"N" if legacy else b"") + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    call = storage + number(0) + sequence(array.shape) + sequence(strides) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + call + b"tR"


def pickled(entries: Mapping[str, bytes]) -> bytes:
    """A pickle of a dict whose values are made by these instructions."""
    body = b"".join(text(name) + value + b"s" for name, value in entries.items())
    return b"\x80\x02}" + body + b"."


def zipped(path: Path, program: bytes, storages: Mapping[str, bytes], **options) -> None:
    """A file of torch since 1.6."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def write_torch(path: Path, arrays: Mapping[str, np.ndarray], *, legacy: bool = False) -> None:
    """A file as torch writes it, in its newer or its older format."""
    keys = {name: str(i) for i, name in enumerate(arrays)}
    entries = {name: tensor(keys[name], array, legacy=legacy) for name, array in arrays.items()}
    if not legacy:
        zipped(path, pickled(entries), {keys[n]: a.tobytes() for n, a in arrays.items()})
        return
    out = io.BytesIO()
    out.write(MAGIC + pickle.dumps(1001, 2) + SYSTEM + pickled(entries))
    out.write(pickle.dumps(list(keys.values()), 2))
    for array in arrays.values():
        out.write(array.size.to_bytes(8, "little") + array.tobytes())
    path.write_bytes(out.getvalue())


EMBEDDINGS = ("shared", "embed_tokens", "relative_attention_bias", "wte", "wpe")


def as_in_flax(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names, with slashes, and directions of transformers' Flax models, which version 5 removed."""
    found = {}
    for name, array in arrays.items():
        *place, last = name.split(".")
        if last == "weight" and place[-1] in EMBEDDINGS:
            last = "embedding"
        elif last == "weight" and place[-1].startswith("ln_"):
            last = "scale"
        elif last == "weight" and array.ndim == 2:
            last, array = "kernel", array.T
        found["/".join([*place, last])] = array
    return found


def write_flax(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A file as flax writes it, of arrays with slashes in their names."""
    tree = traverse_util.unflatten_dict(dict(arrays), sep="/")
    path.write_bytes(serialization.to_bytes(tree))


def rewrite(directory: Path, arrays: Mapping[str, np.ndarray], form: str) -> Path:
    """Put the weights of a directory into another format: "bin", "legacy", "flax", or shards."""
    kind, *sharded = form.split("-")
    if kind == "flax":
        arrays, stem, suffix, write = as_in_flax(arrays), "flax_model", "msgpack", write_flax
    else:
        stem, suffix = "pytorch_model", "bin"

        def write(path, arrays):
            write_torch(path, arrays, legacy=kind == "legacy")

    (directory / "model.safetensors").unlink()
    if not sharded:
        write(directory / f"{stem}.{suffix}", arrays)
        return directory
    names, weight_map = sorted(arrays), {}
    for i in range(3):
        file = f"{stem}-{i + 1:05}-of-00003.{suffix}"
        write(directory / file, {name: arrays[name] for name in names[i::3]})
        weight_map |= dict.fromkeys(names[i::3], file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / f"{stem}.{suffix}.index.json").write_text(index)
    return directory


# --- T5X ---------------------------------------------------------------------------------------

KINDS = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
}
PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def as_in_t5x(name: str, *, each: bool = False) -> str:
    """T5X's name for one of Hugging Face's; `each` layer may have a bias of its own."""
    if name == "shared.weight":
        return "token_embedder/embedding"
    if name == "lm_head.weight":
        return "decoder/logits_dense/kernel"
    stack, *rest = name.split(".")
    if rest[0] == "final_layer_norm":
        return f"{stack}/{stack}_norm/scale"
    _, layer, _, sublayer, module, *part, _ = rest
    place = f"{stack}/layers_{layer}"
    if part == ["relative_attention_bias"]:
        return f"{place if each else stack}/relpos_bias/rel_embedding"
    if module == "layer_norm":
        return f"{place}/{NORMS[stack][int(sublayer)]}/scale"
    if module == "DenseReluDense":
        return f"{place}/mlp/{part[0]}/kernel"
    kind = "attention" if stack == "encoder" else KINDS[module]
    return f"{place}/{kind}/{PARTS[part[0]]}/kernel"


def write_t5x(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    chunk: int = 10,
    version: int = 3,
    inline: tuple[str, ...] = (),
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict,
) -> Path:
    """A checkpoint as T5X writes it: zarr folders, and their descriptions in `checkpoint`.

    Args:
      directory: made; config.json is none of its files.
      arrays: under Hugging Face's names.
      chunk: the longest side of a chunk.
      version: before 3 bfloat16 is written as uint16.
      inline: T5X's paths of arrays that stand in `checkpoint` itself.
      change: makes other arrays from T5X's, such as `scanned`.
    """
    import tensorstore

    directory.mkdir(parents=True, exist_ok=True)
    each = any("block.1.layer.0.SelfAttention.rel" in name for name in arrays)
    named, target = {}, {}
    for name, array in arrays.items():
        path = as_in_t5x(name, each=each)
        named[path] = array.T if path.endswith(("kernel", "rel_embedding")) else array
    for path, stored in change(named).items():
        if path in inline:
            target[path] = np.ascontiguousarray(stored)
            continue
        if version < 3 and stored.dtype.name == "bfloat16":
            stored = stored.view(np.uint16)
        folder = f"target.{path.replace('/', '.')}"
        metadata = {
            "shape": list(stored.shape),
            "chunks": [min(chunk, size) for size in stored.shape],
            "compressor": {"id": "gzip"},
        }
        spec = {"driver": "zarr", "metadata": metadata, "dtype": stored.dtype.name}
        place = {"driver": "file", "path": str(directory / folder)}
        store = tensorstore.open({**spec, "kvstore": place}, create=True, open=True).result()
        store.write(np.ascontiguousarray(stored)).result()
        # Where it once lay is nobody's business any more.
        target[path] = {**spec, "kvstore": {"driver": "gfile", "path": folder}}
    tree = {
        "version": version,
        "optimizer": {
            "target": _nested(target),
            "state": {"step": np.int32(7), "param_states": {"x": {"m": np.ones(3)}}},
        },
    }
    (directory / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    return directory


def scanned(arrays: Mapping[str, np.ndarray], axis: int, num_heads: int) -> dict[str, np.ndarray]:
    """T5X's arrays as its scalable T5 has them: layers along an axis, and heads with their own."""
    found: dict[str, list[np.ndarray]] = {}
    for path, array in arrays.items():
        place = re.sub(r"(\w+)/layers_\d+", r"\1/\1", path)
        if "/query/" in path or "/key/" in path or "/value/" in path:
            array = array.reshape(len(array), num_heads, -1)
        elif "/out/" in path:
            array = array.reshape(num_heads, -1, array.shape[1])
        found.setdefault(place, []).append(array)
    return {
        place: np.stack(layers, axis) if re.match(r"(\w+)/\1/", place) else layers[0]
        for place, layers in found.items()
    }


def _nested(flat):
    tree: dict = {}
    for path, value in flat.items():
        *place, last = path.split("/")
        inner = tree
        for part in place:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree
