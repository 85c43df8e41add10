"""What a model needs is told from shapes alone, and loading takes hardly more than the model."""

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import gpt_variants
import t5_variants
from command_line import ROOT
from specjax import decoding
from specjax.models import memory
from specjax.models.hub import load, outline
from specjax.sampling import sampling


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
    monkeypatch.setattr("specjax.models.hub.read_into", None)
    outline(directory)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        load(directory)


def test_what_is_needed_is_what_prepare_makes(directory):
    """Parameters, context and cache to the byte; counters and tokens of the state are small."""
    checkpoint = load(directory)
    texts, budget = [[3, 4, 5], [6] * 17], 12
    method = decoding.build(checkpoint, None, gamma=1, sampling=sampling(0.0))
    context, state = decoding.prepare(
        method,
        checkpoint,
        texts,
        [(0, 0), (1, 0)],
        max_new_tokens=budget,
        key=jax.random.key(0),
        rows=2,
    )
    need = decoding.needed(checkpoint, 17, rows=2, max_new_tokens=budget)
    assert need.params == memory.nbytes(checkpoint.model)
    assert need.state == memory.nbytes((context, state.cache))
    assert need.laws == 2 * checkpoint.model.vocab_size * 4
    wider = decoding.needed(checkpoint, 17, rows=2, max_new_tokens=budget, gamma=3)
    assert wider.laws == 7 * need.laws  # three drafted tokens and four positions
    assert need.total == need.params + need.state + need.laws


def test_a_model_that_does_not_fit_says_so_before_it_is_read(directory, monkeypatch):
    size = memory.nbytes(outline(directory).model)
    monkeypatch.setattr(memory, "memory_free", lambda device: size - 1)
    monkeypatch.setattr("specjax.models.hub.read_into", None)
    said = memory.gigabytes(size)
    with pytest.raises(ValueError, match=rf"{directory}.* float32 need {said}, and .* free on thi"):
        load(directory)
    with pytest.raises(ValueError, match="Choose a smaller model, load it in bfloat16, or free"):
        load(directory)


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
        from specjax.models import hub, memory

        def kilobytes(field):
            status = pathlib.Path("/proc/self/status").read_text()
            return int(re.search(rf"{field}:\\s+(\\d+)", status)[1])

        hub.load(sys.argv[1])
        before = kilobytes("VmRSS")
        model = hub.load(sys.argv[2]).model
        print(memory.nbytes(model), 1024 * (kilobytes("VmHWM") - before))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), small, big]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    model, peak = map(int, done.stdout.split())
    assert model > 140e6
    assert 0.9 * model < peak < 1.2 * model
