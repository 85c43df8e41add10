"""Writes the weights of a checkpoint in every format that is read, without torch.

`pickled` writes instructions one by one, so that hostile ones can be written too.
"""

import io
import json
import math
import pickle
import shutil
import zipfile
from collections.abc import Mapping
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


def as_in_t5x(name: str) -> str:
    """T5X's name for one of Hugging Face's."""
    if name == "shared.weight":
        return "token_embedder/embedding"
    if name == "lm_head.weight":
        return "decoder/logits_dense/kernel"
    stack, *rest = name.split(".")
    if rest[0] == "final_layer_norm":
        return f"{stack}/{stack}_norm/scale"
    if "relative_attention_bias" in rest:
        return f"{stack}/relpos_bias/rel_embedding"
    _, layer, _, sublayer, module, *part, _ = rest
    place = f"{stack}/layers_{layer}"
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
) -> Path:
    """A checkpoint as T5X writes it: zarr folders, and their descriptions in `checkpoint`.

    Args:
      directory: made; config.json is none of its files.
      arrays: under Hugging Face's names.
      chunk: the longest side of a chunk.
      version: before 3 bfloat16 is written as uint16.
      inline: names of arrays that stand in `checkpoint` itself.
    """
    import tensorstore

    directory.mkdir(parents=True, exist_ok=True)
    target = {}
    for name, array in arrays.items():
        path = as_in_t5x(name)
        stored = array.T if path.endswith(("kernel", "rel_embedding")) else array
        if name in inline:
            target[path] = np.ascontiguousarray(stored)
            continue
        if version < 3 and array.dtype.name == "bfloat16":
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


def _nested(flat):
    tree: dict = {}
    for path, value in flat.items():
        *place, last = path.split("/")
        inner = tree
        for part in place:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def gin(raw: Mapping, *, block: bool = False) -> str:
    """What a run's config.gin says of the network, as bindings or as a block."""
    gated = raw["feed_forward_proj"].startswith("gated")
    fields = {
        "vocab_size": raw["vocab_size"],
        "emb_dim": raw["d_model"],
        "num_heads": raw["num_heads"],
        "num_encoder_layers": raw["num_layers"],
        "num_decoder_layers": raw["num_decoder_layers"],
        "head_dim": raw["d_kv"],
        "mlp_dim": "%WIDE",
        "mlp_activations": ("gelu", "linear") if gated else ("relu",),
        "dropout_rate": "%DROPOUT_RATE",
    }
    lines = [f"{key} = {value}" for key, value in fields.items()]
    head = f"from __gin__ import dynamic_registration\n# Macros:\nWIDE = {raw['d_ff']}\n\n"
    if block:
        return head + "network.T5Config:\n" + "".join(f"  {line}\n" for line in lines)
    return head + "".join(f"network.T5Config.{line}\n" for line in lines)


def copy_config(source: Path, directory: Path) -> None:
    """config.json of one directory into another."""
    shutil.copy(source / "config.json", directory)
