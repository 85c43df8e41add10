"""What a model needs follows from shapes alone, and loading takes hardly more than the model."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gpt_variants
import llama_variants
import t5_variants
from command_line import ROOT
from experiments.benchmark import cases, models
from specjax import loop
from specjax.checkpoints import load, outline
from specjax.cli import defaults, pairs
from specjax.decoding import building, starting
from specjax.decoding.programs import needed
from specjax.models import memory
from specjax.models.t5 import T5Config
from specjax.sampling import Sampling


@pytest.fixture(params=["t5", "gpt"])
def directory(request, tmp_path):
    if request.param == "t5":
        return t5_variants.write(tmp_path, t5_variants.VARIANTS["v1_1"])
    return gpt_variants.write(tmp_path, gpt_variants.VARIANTS["tied"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_outline_is_the_model_without_its_weights(directory, dtype):
    shapes, loaded = outline(directory, dtype=dtype), load(directory, dtype=dtype)
    assert jax.tree.structure(shapes.model) == jax.tree.structure(loaded.model)
    for shape, leaf in zip(jax.tree.leaves(shapes.model), jax.tree.leaves(loaded.model)):  # noqa: B905
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
    assert shapes.config == loaded.config


def test_an_outline_reads_no_weights(directory, monkeypatch):
    """But for the heads of T5 and GPT-2, which are compared with the embedding."""
    monkeypatch.setattr("specjax.checkpoints.parameters.read_into", None)
    outline(directory)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        load(directory)


def plain(sampling, target, draft):
    return building.build(target, None, gamma=1, sampling=sampling)


def speculative(sampling, target, draft):
    return building.build(target, draft, gamma=5, sampling=sampling)


@pytest.mark.parametrize(
    ("build", "sampling", "rows", "checkpoint"),
    [
        (plain, Sampling(0.0), 1, "t5"),
        (plain, Sampling(1.0, 5, 0.9), 8, "gpt"),
        (speculative, Sampling(0.0), 1, "llama"),
        (plain, Sampling(1.0), 8, "wide"),
        (speculative, Sampling(1.0), 8, "wide"),
    ],
    indirect=["checkpoint"],
)
def test_what_is_needed_is_what_a_run_takes(build, sampling, rows, checkpoint, caplog):
    """Shapes give it: parameters and state to the byte, and no less than either program takes for
    intermediate results, nor much more. The run finds its programs compiled.
    """
    shapes = dataclasses.replace(checkpoint, model=jax.eval_shape(lambda: checkpoint.model))
    longest, budget = 17, 9
    need = needed(
        build(sampling, shapes, shapes), shapes, longest, rows=rows, max_new_tokens=budget
    )
    method = build(sampling, checkpoint, checkpoint)
    with jax.log_compiles():
        context, state = starting.prepare(
            method,
            checkpoint,
            [[3] * longest] * rows,
            [(row, 0) for row in range(rows)],
            max_new_tokens=budget,
            key=jax.random.key(0),
            rows=rows,
        )
        kept = memory.nbytes((context, state))
        compiled = loop.decode.lower(method, context, state).compile()
        jax.block_until_ready(loop.decode(method, context, state))
    assert "Compiling jit(decode)" not in caplog.text
    assert "Compiling jit(start)" not in caplog.text
    assert need.params == memory.nbytes(method)
    assert need.state == kept
    looped = compiled.memory_analysis().temp_size_in_bytes
    assert need.temporary >= looped
    if checkpoint.name == "wide":  # what is largest here: the distributions of a round
        assert looped > 4 * rows * (2 * method.gamma_max + 1) * checkpoint.model.vocab_size
        assert need.temporary < 1.3 * looped
    assert need.total == need.params + need.state + need.temporary


@pytest.fixture
def checkpoint(request, tmp_path, monkeypatch):
    """Tiny models of each kind; and one whose vocabulary is 1,000 times as wide as the model."""
    if request.param == "wide":
        monkeypatch.setitem(cases.SHAPES, "wide", T5Config(16_384, 16, 8, 16, 1, 1, 1))
        return models.make("wide", dtype="float32", weights="random")
    kind = {"t5": t5_variants, "gpt": gpt_variants, "llama": llama_variants}[request.param]
    variant = {"t5": "v1_1", "gpt": "tied", "llama": "llama3"}[request.param]
    return load(kind.write(tmp_path, kind.VARIANTS[variant]))


def test_memory_is_asked_for_the_rows_that_there_are(pair, monkeypatch):
    """One input is one row, whatever batch is allowed; and samples are rows."""
    config = defaults.decode()
    method = building.build(pair.target, None, gamma=1, sampling=Sampling(0.0))
    asked = []
    monkeypatch.setattr(pairs, "check_fits", lambda *args: asked.append(args))
    for config.batch_size, config.samples in ((20_000, 1), (1, 1), (20_000, 3)):
        pairs.check_memory(config, ["a text"], pair.target, method)
    (said, many, *_), (_, one, *_), (said_of_three, three, *_) = asked
    assert many == one < three < 4 * one
    assert (said, said_of_three) == (
        "Caches and distributions of 1 rows",
        "Caches and distributions of 3 rows",
    )


def test_a_model_that_does_not_fit_says_so_before_it_is_read(directory, monkeypatch):
    size = memory.nbytes(outline(directory).model)
    monkeypatch.setattr(memory, "memory_free", lambda device: size - 1)
    monkeypatch.setattr("specjax.checkpoints.parameters.read_into", None)
    said = memory.gigabytes(size)
    with pytest.raises(ValueError, match=rf"{directory}.* float32 need {said}, and .* free on thi"):
        load(directory)
    narrow = memory.nbytes(outline(directory, dtype="bfloat16").model)
    least = memory.nbytes(outline(directory, weights="int8").model)
    for free, way_out in {
        narrow: rf"\. Load in bfloat16 \({memory.gigabytes(narrow)}\), or free memory first",
        least: rf"\. Load with weights='int8' \({memory.gigabytes(least)}\), or",
        least - 1: r"\. Choose a smaller model, or free memory first",
    }.items():
        monkeypatch.setattr(memory, "memory_free", lambda device, free=free: free)
        with pytest.raises(ValueError, match=way_out):
            load(directory)


def test_a_pair_that_does_not_fit_says_so_before_the_target_is_read(directory, monkeypatch):
    """Each model alone would fit."""
    config = defaults.decode()
    config.target = config.draft = str(directory)
    size = memory.nbytes(outline(directory).model)
    monkeypatch.setattr(memory, "memory_free", lambda device: 2 * size)
    pairs.check_fit(config)
    monkeypatch.setattr(memory, "memory_free", lambda device: 2 * size - 1)
    with pytest.raises(ValueError, match=rf"need {memory.gigabytes(2 * size)}, .* Load in bfloat"):
        pairs.check_fit(config)


@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ({"bytes_limit": 100, "bytes_in_use": 30}, 70),
        ({"bytes_limit": 100}, 100),
        ({"bytes_in_use": 30}, None),
        (None, None),
    ],
)
def test_what_an_accelerator_has(stats, free):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return stats

    assert memory.memory_free(Device()) == free


def test_what_a_container_has(tmp_path):
    """Pages of files that nobody uses are free; no limit, or no control group, says nothing."""
    assert memory._container_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert memory._container_free(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_free(tmp_path) is None


@pytest.mark.parametrize(
    ("count", "said"),
    [(45_230_000_000, "45.2 GB"), (10_000_000, "0.01 GB"), (9_900_000, "9.9 MB"), (0, "0 MB")],
)
def test_bytes_in_words(count, said):
    assert memory.gigabytes(count) == said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_peaks_below_one_and_a_fifth_of_the_model(tmp_path):
    """float16 on disk, float32 in memory: 73 MB become 147.

    VmHWM and not ru_maxrss, which a new process inherits from the one that started it. The first
    load pays for imports and the runtime. A fifth of the model is 29 MB, of which chunks of the
    file take 4 and allocators a few: what would break the bound is a second copy of the embedding
    (66 MB), not noise.
    """
    variant = t5_variants.Variant(
        "wide", {**t5_variants.V1_1, "vocab_size": 16_384, "d_model": 1024, "d_ff": 256}, True
    )
    big = t5_variants.write(tmp_path / "big", variant, dtype=np.float16)
    small = t5_variants.write(tmp_path / "small", t5_variants.VARIANTS["v1_1"], dtype=np.float16)
    program = """
        import pathlib, re, sys
        from specjax import checkpoints
        from specjax.models import memory

        def kilobytes(field):
            status = pathlib.Path("/proc/self/status").read_text()
            return int(re.search(rf"{field}:\\s+(\\d+)", status)[1])

        checkpoints.load(sys.argv[1])
        before = kilobytes("VmRSS")
        model = checkpoints.load(sys.argv[2]).model
        print(memory.nbytes(model), 1024 * (kilobytes("VmHWM") - before))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), small, big]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    model, peak = map(int, done.stdout.split())
    assert model > 140e6
    assert 0.9 * model < peak < 1.2 * model


def test_a_plain_number_takes_no_memory():
    """Settings of a user's policy need not be arrays."""
    assert memory.nbytes((jnp.zeros(3), 0.25, 2)) == 12
    assert memory.dtype_of((jnp.zeros(3, jnp.bfloat16), 0.25)) == jnp.bfloat16
