"""A plan before a run: what each device of a mesh holds, how many rows fit, and the fastest token.

    python -m experiments.plan --config=configs/paper.py:t5-11b_en-de --mesh=model=4 \\
        --memory=80GB --bandwidth=3.35TB/s --interconnect=450GB/s --alpha=0.75

Compiles plain and speculative decoding for the mesh, on virtual devices and from shapes alone: some
minutes for a mesh and two drafts of a large model. Prints for each device bytes of weights, of
caches and all else that is kept, and of temporaries, at the config's batch_size; with --memory, the
largest batch that fits; with --bandwidth, the least time of a token of each row, plain and with the
draft: weights and caches are read once a call. With --interconnect (bytes per second that a device
sends) collectives take their time as well, with --latency (seconds) each of them waits, and with
--launch (seconds) each call of a model does. What is not given is left out of both times, so their
ratio is no bound of the speedup. For speculative decoding at --alpha, or at --tau tokens a round.
experiments/plan/README.md says how all of it is computed.

Of the config: target, draft or drafts, gamma, dtype ("": float32), temperature and filters,
max_source_len, max_new_tokens, batch_size, replicate_draft, mesh. A model is a name of
experiments/plan/published.py, a directory that need hold no more than a config.json, or a name on
the hub.
Several meshes: --mesh=model=4 --mesh=data=2,model=4. With --workdir rows are added to its
plan.jsonl, of which plan.md is the table; those that are there already are not computed again.

A config of experiments.train, such as configs/paper_train.py:t5-v1_1-xxl_en-de, plans training:
weights, optimizer, gradients and activations on each device, and with --flops the most target
tokens a second (`experiments.plan.training`).
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from experiments import command
from experiments.plan import parts, training
from experiments.plan.published import PUBLISHED
from experiments.reproduce.study import find
from experiments.train.config import TrainConfig
from experiments.train.loop import fields_of
from specjax import checkpoints, drafters, sampling
from specjax.batching import bucket
from specjax.cli.defaults import DTYPES
from specjax.decoding import building
from specjax.measure import provenance, report
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import gigabytes
from specjax.models.meshes import sizes_of
from specjax.models.sharding import Placement
from specjax.support import command_line, files
from specjax.support.named import short

GIVEN = ("memory", "bandwidth", "interconnect")
MAX_DEVICES = 4096  # each is one of this machine's CPU, with memory of its own
WAITS = ("latency", "launch")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{name}i": 1024**power for power, name in enumerate("KMGT", 1)}


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    meshes = {text: sizes_of(text) for text in args.mesh or [config.mesh or "model=1"]}
    given = {name: amount(name, args[name].value or "") for name in GIVEN}
    if "target_tokens" in config:
        show_training(config, list(meshes), given["memory"], args)
        return
    check(args, config)
    use_virtual_devices(max(math.prod(sizes.values()) for sizes in meshes.values()))
    workdir = command_line.make_workdir(args.workdir) if args.workdir else None
    results = provenance.Results(workdir / "plan.jsonl") if workdir else None
    rows = []
    for text, sizes in meshes.items():
        for row in plans(config, text, sizes, given, args, results.done if results else ()):
            rows.append(row)
            if results is not None and row not in results.done:
                results.append(row)
    if workdir is not None and results is not None:
        columns = [("target", lambda row: short(row["target"])), *COLUMNS]
        files.write_text(workdir / "plan.md", report.markdown(columns, results.done) + "\n")
    report.show(command.console(), COLUMNS, rows, f"{short(config.target)}, on each device")


def show_training(config, meshes: Sequence[str], memory: float | None, args) -> None:
    """Print what training takes on each device of some meshes, and add it to a workdir."""
    rows, workdir, flops = [], args.workdir, amount("flops", args.flops)
    for mesh in meshes:
        settings = TrainConfig(**fields_of(config) | {"mesh": mesh})
        shape = checkpoints.described(PUBLISHED.get(config.start, config.start)).config
        found = training.need(settings, shape, mesh)._asdict()
        row = {"start": config.start, "mesh": mesh, "memory": memory, "flops": flops, **found}
        rows.append(row | {"dtype": config.compute_dtype, "batch": config.target_tokens})
        rows[-1]["seed"] = config.seed
        rows[-1]["in all"] = sum(found.values())
        if flops:
            rows[-1]["tokens/s"] = training.tokens_a_second(settings, shape, mesh, flops)
    if workdir:
        results = provenance.Results(command_line.make_workdir(workdir) / "plan.jsonl")
        for row in rows:
            if not find(results.done, row):
                results.append(row)
    title = f"Training {short(config.start)}, on each device"
    report.show(command.console(), TRAINING, rows, title)


def check(args, config) -> None:
    """Raise a ValueError for what is wrong before anything is compiled."""
    if not config.target:
        raise ValueError(
            "No target: give --config.target=DIR, or a name of experiments/plan/published.py."
        )
    if args.alpha is not None and args.tau is not None:
        raise ValueError(f"--alpha={args.alpha} and --tau={args.tau}: give one of them.")
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise ValueError(f"--alpha={args.alpha} must lie in [0, 1].")


def amount(name: str, text: str) -> float | None:
    """Bytes, or bytes a second, of "80GiB" or "3.35TB/s"; None: not given."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+\.?\d*)\s*([KMGT]i?)?B?(/s)?", text)
    if found is None or not float(found[1]):
        raise ValueError(f"--{name}={text} must be a number with a unit, as 80GiB or 3.35TB/s.")
    return float(found[1]) * UNITS[found[2] or ""]


def use_virtual_devices(count: int) -> None:
    """As many devices of this machine's CPU, before jax starts; ValueError if it has fewer."""
    if count > MAX_DEVICES:
        raise ValueError(f"A mesh of {count} devices: {MAX_DEVICES} at most are planned for.")
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # jax has started, in a test, with what it has
        jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        raise ValueError(
            f"A mesh of {count} devices, and jax has started with {len(jax.devices())} already: "
            "unset XLA_FLAGS=--xla_force_host_platform_device_count, or raise it."
        )


def plans(
    config, text: str, sizes: dict[str, int], given, args, done: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row for plain decoding, and one for each draft, on one mesh; or that which is done."""
    count = math.prod(sizes.values())
    found = np.array(jax.devices()[:count]).reshape(list(sizes.values()))
    whole = Placement(Mesh(found, tuple(sizes)))
    aside = Placement(whole.mesh, replicate=config.replicate_draft)
    target = Model(config.target, config, whole)
    rows = sharding.padded_rows(bucket(config.batch_size), whole)
    common = {
        "target": config.target,
        "mesh": text,
        "mesh_devices": count,
        "dtype": jnp.dtype(target.dtype).name,
        "batch": rows,
        "source": target.longest,
        "new": config.max_new_tokens,
        **given,
        **{name: args[name].value for name in WAITS},
        "seed": config.seed,
    }
    tau = args.tau if args.alpha is None else parts.tau_of(args.alpha, config.gamma)
    on = given["bandwidth"] and parts.Hardware(
        given["bandwidth"], given["interconnect"] or math.inf, args.latency, args.launch
    )
    plain = target.run(config, None)
    for name in ("", *drafts_of(config)):
        key = {"draft": name, **common}
        if name:
            key |= {"replicated": config.replicate_draft, "gamma": config.gamma}
            key |= {"alpha": args.alpha, "tau": tau}
        if row := find(done, key):
            yield row
            continue
        draft = Model(name, config, aside) if name else None
        row = key | held(target.run(config, draft) if draft else plain, rows, whole, given)
        if on and draft is None:
            row["plain_ms"] = 1e3 * parts.plain_seconds(plain.call(rows), on)
        elif on and draft is not None and tau is not None:
            calls = plain.call(rows), draft.run(config, None).call(rows)
            row["plain_ms"] = 1e3 * parts.plain_seconds(calls[0], on)
            row["ms"] = 1e3 * parts.speculative_seconds(*calls, config.gamma, tau, on)
            row["collectives"] = [call.collectives for call in calls]
        yield row
        # A mesh of many devices has large programs, which jax would keep.
        jax.clear_caches()


def drafts_of(config) -> tuple[str, ...]:
    """The drafts of a config that are models."""
    names = config.get("drafts", ()) or ((config.draft,) if config.draft else ())
    return tuple(name for name in names if name in PUBLISHED or drafters.maker(name) is None)


class Model:
    """Outlines of a model on a mesh."""

    def __init__(self, name: str, config, placement: Placement):
        self.dtype, self.placement = DTYPES[config.dtype] or jnp.float32, placement
        self.given = checkpoints.described(PUBLISHED.get(name, name), **self.options(jnp.float32))
        self.longest = config.max_source_len or self.given.max_source_len

    def options(self, dtype) -> dict[str, Any]:
        # Projections lie as they do on a CPU, or the program for it would hold copies of them.
        return {"dtype": dtype, "platform": "cpu", "placement": self.placement}

    def at(self, dtype) -> Checkpoint:
        model = checkpoints.shapes(self.given.config, **self.options(dtype))
        return dataclasses.replace(self.given, model=model)

    def run(self, config, draft: "Model | None") -> parts.Plan:
        """Decoding with a draft, or without."""
        chosen = sampling.Sampling(config.temperature, config.top_k, config.top_p, config.filters)
        narrow, wide = (
            building.build(
                self.at(dtype),
                draft.at(dtype) if draft else None,
                gamma=config.gamma,
                sampling=chosen,
            )
            for dtype in (self.dtype, jnp.float32)
        )
        return parts.Plan(narrow, wide, self.given, self.longest, config.max_new_tokens)


def held(run: parts.Plan, rows: int, placement: Placement, given) -> dict[str, Any]:
    """Bytes on each device, and the largest batch that fits."""
    need = run.need(rows)
    found = {"weights": need.params, "kept": need.state, "temporaries": need.temporary}
    if given["memory"]:
        step = sharding.padded_rows(1, placement)
        found["largest"] = parts.largest(run, int(given["memory"]), rows, step)
    return found


def cell(name: str, show=str):
    """A column with a value of the row, or – where the row lacks it."""
    return lambda row: "–" if row.get(name) is None else show(row[name])


def left_out(row: dict[str, Any]) -> str:
    """What the times of a row do not count."""
    unknown = [name for name in ("interconnect", *WAITS) if not row.get(name)]
    return ", ".join(["products", *unknown]) if row.get("plain_ms") else "–"


TRAINING: list[report.Column] = [
    ("mesh", cell("mesh")),
    *(
        (name, cell(name, gigabytes))
        for name in ("weights", "optimizer", "gradients", "copies", "activations", "in all")
    ),
    ("target tokens/s at most", cell("tokens/s", "{:,.0f}".format)),
    ("fits", lambda row: cell("memory", lambda memory: str(row["in all"] <= memory))(row)),
]
COLUMNS: list[report.Column] = [
    ("mesh", cell("mesh")),
    ("draft", lambda row: short(row["draft"]) if row["draft"] else "none"),
    ("rows", cell("batch")),
    ("weights", cell("weights", gigabytes)),
    ("caches", cell("kept", gigabytes)),
    ("temporaries", cell("temporaries", gigabytes)),
    ("in all", lambda row: gigabytes(row["weights"] + row["kept"] + row["temporaries"])),
    (
        "largest batch",
        lambda row: "does not fit" if row.get("largest") == 0 else cell("largest")(row),
    ),
    ("τ", cell("tau", "{:.2f}".format)),
    ("plain, ms at least", cell("plain_ms", "{:.2f}".format)),
    ("ms at least", cell("ms", "{:.2f}".format)),
    ("left out", left_out),
]


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What would be run.", lock_config=True)
    flags.DEFINE_multi_string("mesh", [], "As data=2,model=4; may be repeated. None: config.mesh.")
    flags.DEFINE_string("memory", "", "Of a device, such as 80GiB.")
    flags.DEFINE_string("bandwidth", "", "Of a device's memory, such as 3.35TB/s.")
    flags.DEFINE_string("interconnect", "", "That a device sends, such as 450GB/s.")
    flags.DEFINE_string("flops", "", "Operations of a device in a second, such as 989T/s.")
    flags.DEFINE_float("latency", 0.0, "Seconds of a collective, such as 1e-5; 0: left out.", 0.0)
    flags.DEFINE_float("launch", 0.0, "Seconds to launch a call of a model; 0: left out.", 0.0)
    flags.DEFINE_float("alpha", None, "The chance that a drafted token is accepted.")
    flags.DEFINE_float("tau", None, "Or tokens a round.")
    flags.DEFINE_string("workdir", "", "Directory for plan.jsonl.")
    flags.mark_flag_as_required("config")
    command_line.run(main, __doc__)
