"""A plan of a run: what arrays take on a mesh, what fits, and what no run is faster than."""

import dataclasses
import importlib
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

import command_line
import plan_worker
import t5_variants
import workers
from configs import paper as paper_config
from configs import plan as plan_config
from experiments.benchmark.cases import SHAPES, step_bytes
from experiments.plan import parts, training
from experiments.plan.parts import Call
from experiments.plan.published import PUBLISHED
from experiments.train.config import TrainConfig
from specjax import checkpoints
from specjax.batching import bucket
from specjax.decoding import building
from specjax.models.memory import Need
from specjax.models.t5 import T5Config
from specjax.sampling import Sampling

CASES = [
    ("t5", {"data": 2, "model": 2}, "bfloat16"),
    ("llama", {"model": 4}, "float32"),
]


@pytest.fixture(scope="module")
def found():
    """What the worker says of each case, by family."""
    lines = workers.ask(plan_worker, CASES)
    return {family: line for (family, *_), line in zip(CASES, lines, strict=True)}


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_plan_is_what_arrays_take(found, family):
    """To the byte, on every device; what is on none of the mesh is three ids."""
    params, kept, temporary = found[family]["need"]
    assert max(found[family]["weights"]) == params
    assert params - min(found[family]["weights"]) < 16
    assert found[family]["kept"] == [kept] * 4
    assert temporary > 0


def test_what_a_call_reads_and_exchanges(found):
    """By hand: a Llama of two layers over 4 devices, 4 rows, float32; 8 wide, 4 heads of 2, which
    share 2 of keys and values, repeated for 4 devices; 12 wide within, 32 ids.
    """
    call = Call(*found["llama"]["call"])
    attention, within = 8 * (2 + 2 + 2) + 2 * 8, 8 * 3 * 2 + 3 * 8
    two = 8  # bytes of the temperature and of the id that ends a row
    assert call.weights == 4 * (2 * (attention + within + 2 * 8) + 8 + 8 * 32 // 4) + two
    slots = 64  # a whole tile, which holds 10 + 6 + 1
    assert call.caches == 4 * 4 * 2 * 2 * slots * 2
    sums, logits = (2 * 2 + 1) * 4 * 4 * 8, 4 * 4 * 32  # of each sublayer, and of the embedding
    assert call.exchanged == pytest.approx(2 * 3 / 4 * sums + 3 / 4 * logits, rel=0.03)


def run_of(config, longest=64, new=48):
    target = checkpoints.Checkpoint("target", checkpoints.shapes(config, platform="cpu"), config)
    method = building.build(target, None, gamma=1, sampling=Sampling(0.0))
    return parts.Plan(method, method, target, longest, new)


def test_a_step_of_t5_reads_what_the_benchmark_says():
    """But for position biases, and each row's own lookups."""
    config = SHAPES["embedded"]
    run = run_of(config)
    call = run.call(4)
    expected = step_bytes(config, batch=4, source=64, slots=64, itemsize=4)
    assert call.weights + call.caches == pytest.approx(expected, rel=0.001)
    assert call.exchanged == 0
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(run.method))
    assert call.weights < 0.9 * whole  # nothing of the encoder, nor the embedding


def test_the_floor_by_hand():
    target, draft = Call(800, 200, 30.0, collectives=4), Call(90, 10, 0.0)
    on = parts.Hardware(100.0, 10.0)
    assert parts.plain_seconds(target, on) == 10 + 3
    # Three calls of the draft; one of four positions of the target; two tokens.
    assert parts.speculative_seconds(target, draft, 3, 2.0, on) == (3 * 1 + 10 + 12) / 2
    fast = parts.Hardware(100.0)
    assert parts.speculative_seconds(target, draft, 3, 2.0, fast) == (3 * 1 + 10) / 2
    waits = parts.Hardware(100.0, 10.0, latency=2.0, launch=0.5)
    assert parts.plain_seconds(target, waits) == 10 + 3 + 4 * 2 + 0.5
    spent = 3 * (1 + 0.5) + (10 + 12 + 4 * 2 + 0.5)
    assert parts.speculative_seconds(target, draft, 3, 2.0, waits) == spent / 2
    assert parts.tau_of(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    with pytest.raises(ValueError, match="tau=5 must lie in"):
        parts.speculative_seconds(target, draft, 3, 5.0, on)


def test_the_ratio_of_two_floors_is_no_bound():
    """T5-11B on 16 devices with t5-large whole on each, τ = 3.29: .51 without latencies, and 1.44
    where each of 74 collectives of the target waits 10 µs."""
    target, draft = Call(0.23e-3, 0.0, 0.0, collectives=74), Call(0.2496e-3, 0.0, 0.0)

    def ratio(latency):
        on = parts.Hardware(bandwidth=1.0, latency=latency)
        return parts.plain_seconds(target, on) / parts.speculative_seconds(
            target, draft, 5, 3.288, on
        )

    assert ratio(0.0) == pytest.approx(0.51, abs=0.01)
    assert ratio(10e-6) == pytest.approx(1.44, abs=0.02)


@pytest.mark.parametrize("kink", [0, 40])
def test_the_largest_batch(kink):
    """Where more than so many rows take more for each, it may be one bucket less."""

    class Rows:
        def need(self, rows):
            asked.append(rows)
            return Need(1000, 10 * rows, max(5 * rows, 5 * rows + 20 * (rows - kink)))

    asked, some = [], Rows()
    sizes = [n for n in range(1, 200) if bucket(n) == n]
    for size, above in itertools.pairwise(sizes):
        totals = some.need(size).total, some.need(above).total - 1
        for memory in totals:
            found = parts.largest(some, memory, 1)
            assert found == size or (kink and found == sizes[sizes.index(size) - 1])
    assert parts.largest(some, some.need(4).total - 1, 4) == 0
    assert parts.largest(some, 10**9, 1, most=64) == 64
    assert len(asked) < 7 * 2 * len(sizes)


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    jax.devices()  # so that jax has started, and gets no virtual devices

    def call(*arguments):
        return command_line.run(monkeypatch, capsys, "experiments.plan", *arguments)

    return call


def test_a_directory_with_a_config_is_enough(run, tmp_path, monkeypatch):
    """A draft of the same, and a row for each method, which is computed once."""
    for name, width in (("target", 32), ("draft", 16)):
        variant = t5_variants.VARIANTS["v1_1"]
        (tmp_path / name).mkdir()
        raw = {**variant.raw, "d_model": width}
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    flags = [
        "--config=configs/decode.py", f"--config.target={tmp_path / 'target'}",
        f"--config.draft={tmp_path / 'draft'}", "--config.max_new_tokens=8",
        "--config.max_source_len=16", "--config.batch_size=2", "--config.gamma=3",
        "--memory=3MB", "--bandwidth=1GB/s", "--alpha=0.5", f"--workdir={tmp_path}",
    ]  # fmt: skip
    outcome = run(*flags)
    assert outcome.status == 0, outcome.stderr
    rows = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    plain, drafted = rows
    assert [row["mesh"] for row in rows] == ["model=1"] * 2
    assert plain["draft"] == ""
    assert drafted["draft"] == str(tmp_path / "draft")
    assert drafted["weights"] > plain["weights"]
    assert drafted["tau"] == 1.875
    assert drafted["plain_ms"] == plain["plain_ms"]
    assert len(drafted["collectives"]) == 2
    for row in rows:
        assert {"commit", "dtype", "batch", "seed"} <= set(row)
        assert row["largest"] > 2
        assert row["weights"] + row["kept"] + row["temporaries"] < 3e6
    assert f"{plain['plain_ms']:.2f}" in outcome.stdout
    assert "speedup" not in outcome.stdout  # two floors have no ratio that means anything
    assert "in all" in outcome.stdout
    page = (tmp_path / "plan.md").read_text()
    assert "| target | model=1 | draft | 2 |" in page
    assert page.count("| products, interconnect, latency, launch |") == 2

    monkeypatch.setattr(parts, "compiled", None)
    assert run(*flags).stdout == outcome.stdout
    assert len((tmp_path / "plan.jsonl").read_text().splitlines()) == 2

    # Rows of another latency lie before them, and are another plan's.
    waits = [{**row, "launch": 0.5, "plain_ms": 987.65} for row in rows]
    lines = [json.dumps(row) + "\n" for row in (*waits, *rows)]
    (tmp_path / "plan.jsonl").write_text("".join(lines))
    assert run(*flags).stdout == outcome.stdout
    assert "987.65" in run(*flags, "--launch=0.5").stdout
    assert (tmp_path / "plan.md").read_text().count("| products, interconnect, latency |") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh=rows=2"], "'rows' is no axis"),
        (["--mesh=model=64"], "A mesh of 64 devices, and jax has started with"),
        (["--memory=80 apples"], "--memory=80 apples must be a number with a unit"),
        (["--alpha=0.5", "--tau=2"], "give one of them"),
        (["--alpha=1.5"], "--alpha=1.5 must lie in [0, 1]"),
        (["--config.target="], "No target"),
        (["--config.target=/nowhere"], "No such directory: /nowhere."),
    ],
)
def test_what_cannot_be_planned(run, flags, message):
    outcome = run("--config=configs/plan.py:llama-70b", *flags)
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_plan_of_training(run, tmp_path):
    """A small v1.1, whose float32 weights are cut in two; norms and positions are not."""
    outcome = run(
        "--config=configs/paper_train.py:t5-v1_1-small_en-de", "--mesh=data=4,model=2",
        "--config.buckets=((64, 64),)", "--config.target_tokens=4096", "--memory=1GB",
        "--flops=100T/s", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert outcome.status == 0, outcome.stderr
    (row,) = map(json.loads, (tmp_path / "plan.jsonl").read_text().splitlines())
    # Eight operations for each of the 60.5 million parameters of matrices but the embedding.
    assert row["tokens/s"] == pytest.approx(8 * 100e12 / (8 * 60.5e6), rel=0.01)
    assert 4 * 76_961_152 / 2 < row["weights"] < 1.001 * 4 * 76_961_152 / 2
    assert row["gradients"] == 1.5 * row["weights"] == 3 * row["copies"]
    assert row["optimizer"] < 0.01 * row["weights"]  # sums of rows and columns
    # By hand: at least the input of each layer and the logits, for 16 rows of 64 on each device.
    assert row["activations"] > 16 * 64 * (16 * 512 * 2 + 32128 // 2 * 4)
    assert "True" in outcome.stdout
    config = TrainConfig(buckets=((64, 64),), target_tokens=4096, remat=False)
    shape = T5Config(vocab_size=256, num_layers=4, num_decoder_layers=4)
    layout = training.layout_of(shape, "data=4,model=2")
    # Layers that are computed again keep no more than their inputs.
    kept = [
        training.activations(dataclasses.replace(config, remat=again), layout, (64, 64))
        for again in (False, True)
    ]
    assert kept[0] > 3 * kept[1]
    outcome = run("--config=configs/paper_train.py:t5-v1_1-small_en-de", "--mesh=model=4")
    assert outcome.status == 1
    assert "num_heads=6 cannot be split over 4 devices" in outcome.stderr


def test_units():
    plan = importlib.import_module("experiments.plan.__main__")
    amount = plan.amount
    assert amount("memory", "80GiB") == 80 * 2**30
    assert amount("bandwidth", "3.35TB/s") == 3.35e12
    assert amount("interconnect", "1000000") == 1e6
    assert amount("memory", "") is None
    with pytest.raises(ValueError, match=r"99999 devices: 4096 at most"):
        plan.use_virtual_devices(10**20 - 1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B", 70.6),
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("meta-llama/Llama-3.2-1B", 1.24),
        ("google-t5/t5-11b", 11.3),
        ("google/flan-t5-xxl", 11.1),
    ],
)
def test_published_shapes(name, billions):
    """They have as many parameters as their cards say."""
    raw = PUBLISHED[name]
    field = "num_layers" if raw["model_type"] == "t5" else "num_hidden_layers"

    def parameters(layers):
        model = checkpoints.described(
            {**raw, field: layers}, dtype=jnp.bfloat16, platform="gpu"
        ).model
        return sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e9

    one, two = parameters(1), parameters(2)
    assert one + (raw[field] - 1) * (two - one) == pytest.approx(billions, rel=0.005)


def test_configs_name_published_shapes():
    for choice in plan_config.CHOICES:
        config = plan_config.get_config(choice)
        assert {config.target, *config.drafts} <= set(PUBLISHED)
    for choice in paper_config.CHOICES:
        config = paper_config.get_config(choice)
        assert {config.target, *config.drafts} <= set(PUBLISHED)
    with pytest.raises(ValueError, match="choose one of t5-11b, llama-70b"):
        plan_config.get_config("llama")


def test_what_does_not_fit_on_a_mesh_is_refused_before_it_is_loaded(
    pair, monkeypatch, capsys, tmp_path
):
    """By what models, caches and distributions take together."""
    inputs = tmp_path / "in.txt"
    inputs.write_text("a text\n")
    monkeypatch.setattr("specjax.checkpoints.load", None)
    monkeypatch.setattr("specjax.models.memory.memory_free", lambda device: 200_000)
    outcome = command_line.run(
        monkeypatch, capsys, "specjax decode", "--config.mesh=model=1", f"--input={inputs}",
        f"--config.target={pair.target.name}", f"--config.draft={pair.draft.name}",
    )  # fmt: skip
    assert outcome.status == 1
    assert outcome.stderr.startswith("error: The models, caches and distributions of 1 rows need ")
    assert "0.2 MB are free on this machine" in outcome.stderr
