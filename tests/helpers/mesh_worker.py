"""What `test_mesh` asks of eight virtual CPU devices, which a process must have from its beginning.

    python mesh_worker.py DIRECTORY < cases.json > found.json

DIRECTORY holds a target and a draft of each kind; `write` makes them.
"""

import collections
import json
import os
import pathlib
import re
import sys

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import checkpoints, drafters, loop
from specjax.checkpoints import Checkpoint, safetensors_files
from specjax.decoding import building, starting, streaming
from specjax.decoding.outputs import read_rows
from specjax.decoding.run import Run
from specjax.models import sharding
from specjax.models.gpt import GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Gemma2Config, LlamaConfig, Qwen3Config
from specjax.models.t5 import T5Config
from specjax.sampling import Sampling

IDS = {"bos_token_id": 0, "pad_token_id": 0}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 2}
KINDS = {
    "t5": T5Config(vocab_size=40, num_heads=8, **T5),
    # Heads and ids that no axis divides; a tied embedding, and one projection in the layer.
    "t5 odd": T5Config(
        vocab_size=37, num_heads=3, feed_forward_proj="relu", tie_word_embeddings=True,
        scale_decoder_outputs=True, **T5,
    ),
    "gpt2": GPTConfig(41, 64, 16, 2, 4, tie_word_embeddings=False, **IDS),
    # Two heads of keys and values, which four devices share.
    "llama": LlamaConfig(40, 16, 24, 2, 8, 2, **IDS),
    "qwen3": Qwen3Config(39, 16, 24, 2, 4, 4, attention_bias=True, **IDS),
    "gemma2": Gemma2Config(
        40, 16, 24, 2, 8, 2, sliding_window=3, full_layers=(1,), query_pre_attn_scalar=2,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=True, **IDS,
    ),
}  # fmt: skip
SOURCES = [[5, 9, 4, 7], [8, 2, 6], [9, 9, 3, 5, 7], [4, 4], [11, 12, 13]]
LIMIT = 12


def made(config, seed: int, near: Checkpoint | None = None) -> Checkpoint:
    """Random weights, or those of another model with some noise."""
    module = checkpoints.FAMILIES[config.model_type].build(
        config, rngs=nnx.Rngs(0), dtype=jnp.float32
    )
    rng = np.random.default_rng(seed)
    if near is not None:
        module = near.model.module()

    def drawn(x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return jnp.asarray(noise if near is None else x + noise * 0.05)

    nnx.update(module, jax.tree.map(drawn, nnx.state(module)))
    return Checkpoint("made", LanguageModel.of(module), config, eos_ids=(1,))


def write(directory: pathlib.Path) -> None:
    """All kinds, a target and a draft of each."""
    for kind, config in KINDS.items():
        target = made(config, seed=1)
        checkpoints.save(directory / kind / "target", target)
        checkpoints.save(directory / kind / "draft", made(config, seed=2, near=target))


COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
SCALARS = re.compile(r"(\w+\[\](\{[^}]*\})?|[(), ])+")  # a TPU's have layouts


def collectives(program: str) -> dict[str, int]:
    """How many a compiled program has of each kind; those of single numbers are counted apart."""
    found = collections.Counter()
    for shape, kind in COLLECTIVE.findall(program):
        found["scalars" if SCALARS.fullmatch(shape) else kind] += 1
    return dict(found)


def decode(
    directory, kind, *, mesh, temperature, draft="draft", replicate=True, narrow=False, **how
):
    """Tokens of each source and the collectives of the loop, and where its caches lie.

    `narrow`: of weights and caches in int8.
    """
    in_int8 = {"weights": "int8", "cache": "int8"} if narrow else {}
    target = checkpoints.load(directory / kind / "target", mesh=mesh, **in_int8)
    chosen = None
    if draft is not None:
        place = str(directory / kind / draft)
        name = place if os.path.isdir(place) else draft
        if narrow and draft == "draft":
            name = f"int8(draft={place!r}, cache=True)"
        chosen = drafters.load(name, target, replicate=replicate)
    method = building.build(target, chosen, gamma=3, sampling=Sampling(temperature), **how)
    labels = [(index, 0) for index in range(len(SOURCES))]
    key = jax.random.key(7)
    options = {"max_new_tokens": LIMIT, "key": key, "rows": 6}
    context, state = starting.prepare(method, target, SOURCES, labels, **options)
    before = [x.sharding for x in jax.tree.leaves(state)]
    program = loop.decode.lower(method, context, state).compile().as_text()
    held = [str(x.sharding.spec) for x in jax.tree.leaves(state.cache)] if mesh else []
    state = loop.decode(method, context, state)  # compiled once: there is a cache
    kept = all(
        x.sharding.is_equivalent_to(there, x.ndim)
        for x, there in zip(jax.tree.leaves(state), before, strict=True)
    )
    rows = read_rows(state, labels, target)
    return {
        "tokens": [row.tokens for row in rows],
        "accepted": sum(row.accepted for row in rows),
        "collectives": collectives(program),
        "caches": sorted(set(held)),
        "kept": kept,
    }


def admitted(directory, kind, *, mesh, temperature, draft="draft"):
    """Tokens of each source, in two rows for five of them."""
    target = checkpoints.load(directory / kind / "target", mesh=mesh)
    place = directory / kind / draft
    chosen = drafters.load(str(place) if place.is_dir() else draft, target)
    method = building.build(target, chosen, gamma=3, sampling=Sampling(temperature))
    run = Run(LIMIT, jax.random.key(7), batch_size=2)
    rows = streaming.as_they_end(method, target, SOURCES, run)
    return {row.index: row.tokens for row in rows}


class Counted:
    """safetensors' view of a file, which counts the bytes that leave it."""

    def __init__(self, file, count):
        self.file, self.count = file, count

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_slice(self, name):
        inner, count = self.file.get_slice(name), self.count

        class Slice:
            get_dtype, get_shape = inner.get_dtype, inner.get_shape

            def __getitem__(self, at):
                found = inner[at]
                count.append(found.nbytes)
                return found

        return Slice()


def reading(directory, kind, *, mesh, device, weights=None):
    """Bytes that a process reads and holds which has one device of the mesh, and the whole's."""
    read: list[int] = []
    held: list[int] = []
    opened, from_callback = safetensors_files.safe_open, jax.make_array_from_callback

    class Open:
        def __init__(self, *args, **options):
            self.inner = opened(*args, **options)

        def __enter__(self):
            return Counted(self.inner.__enter__(), read)

        def __exit__(self, *args):
            return self.inner.__exit__(*args)

    def one_device(shape, where, callback, dtype):
        at = where.devices_indices_map(shape)[jax.devices()[device]]
        held.append(callback(at).nbytes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    safetensors_files.safe_open, jax.make_array_from_callback = Open, one_device
    try:
        found = checkpoints.load(directory / kind / "target", mesh=mesh, weights=weights)
    finally:
        safetensors_files.safe_open, jax.make_array_from_callback = opened, from_callback
    whole = checkpoints.outline(directory / kind / "target", weights=weights)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    parts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), found.model
    )
    return {"read": sum(read), "held": sum(held), "shard": size(parts), "whole": size(whole.model)}


def saved(directory, kind, *, mesh):
    """Whether what is loaded on a mesh and saved again is what was there, and how it is called."""
    from safetensors.numpy import load_file

    name = directory / kind / "target"
    loaded = checkpoints.load(name, mesh=mesh)
    checkpoints.save(directory / "again", loaded)
    old, new = (load_file(place / "model.safetensors") for place in (name, directory / "again"))
    same = old.keys() == new.keys() and all(np.array_equal(old[key], new[key]) for key in old)
    plain = drafters.attached.fingerprint(checkpoints.load(name).model)
    return {"same": same, "fingerprint": plain == drafters.attached.fingerprint(loaded.model)}


def rounded(directory, kind, *, mesh):
    """Whether int8 and scales that a mesh has are those of one device, and how they are called."""
    one, split = (
        checkpoints.load(directory / kind / "target", weights="int8", mesh=there).model
        for there in (None, mesh)
    )
    moved, turned = sharding.moved(split), sharding.turned_paths(split.module())

    def plain(path, x):
        keys = tuple(getattr(entry, "key", None) for entry in path[1:])
        stacked = np.asarray(x).T if keys in turned else np.asarray(x)
        stacked = sharding.restored(stacked, moved.get(keys))
        return stacked.T if keys in turned else stacked

    same = jax.tree.map(np.array_equal, one.params, jax.tree.map_with_path(plain, split).params)
    attached = drafters.attached
    alike = [
        described(one) == described(split)
        for described in (attached.fingerprint, attached.rounding)
    ]
    return {"same": all(jax.tree.leaves(same)), "fingerprint": all(alike)}


def refused(directory, kind, *, target, draft):
    """The error for a pair that lies on different meshes."""
    both = (
        checkpoints.load(directory / kind / role, mesh=mesh)
        for role, mesh in (("target", target), ("draft", draft))
    )
    try:
        building.pair(*both)
    except ValueError as error:
        return str(error)
    return ""


def attach(directory, kind, *, drafter):
    """Write an untrained drafter of the target."""
    from specjax.drafters import attached, eagle, views

    target = checkpoints.load(directory / kind / "target")
    make = {
        "eagle": eagle.fresh,
        "kangaroo": lambda target: views.kangaroo(target, 1),
        "shallow": lambda target: views.shallow(target, 1),
    }
    found = make[drafter](target)
    attached.save(directory / kind / drafter, found, target, dtype=np.float32)


CHECKS = {
    "decode": decode, "reading": reading, "rounded": rounded, "saved": saved, "refused": refused,
    "attach": attach, "admitted": admitted,
}  # fmt: skip


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    for case in json.load(sys.stdin):
        check, kind, options = case
        print(json.dumps(CHECKS[check](directory, kind, **options)), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(sys.argv[1]) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    main()
