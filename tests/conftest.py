"""Strict settings for every test.

An array is broadcast to another rank, or cast to another type, only where the code says so;
warnings are errors (pyproject.toml); neither the network nor the user's caches are touched.
"""

import gc
import importlib.util
import os
import tempfile

# Read when jax, transformers and matplotlib are first imported: so it stands before any import.
_HOME = tempfile.TemporaryDirectory(prefix="specjax-tests-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ.pop("JAX_ENABLE_X64", None)
os.environ.pop("JAX_ENABLE_COMPILATION_CACHE", None)
os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"] = _HOME.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_compilation_cache_dir", None)
if "SPECJAX_TESTS_CACHE" in os.environ:  # small programs too, whatever a test's folder is
    _CACHE = os.path.abspath(os.environ["SPECJAX_TESTS_CACHE"])
    jax.config.update("jax_compilation_cache_dir", _CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Not the rooms whose warnings point at the caller: a checked function adds frames.
CHECKED = (
    "autoregressive", "batching", "dice", "drafters", "formulas", "log", "loop", "models",
    "passes", "policies", "replay", "rounds", "rules", "sampling", "speculative", "state", "trees",
)  # fmt: skip
if importlib.util.find_spec("beartype"):  # tests/core/test_annotations.py fails without it
    install_import_hook([f"specjax.{room}" for room in CHECKED], "annotations.checked")


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A tiny target and a draft near it, on disk and loaded."""
    import pairs  # after the settings above

    return pairs.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session", autouse=True)
def _no_load():
    """What reports say does not depend on what else runs beside the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
        patch.setattr("specjax.measure.doubts.used_by_others", lambda: 0.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _programs_of_modules():
    """Compiled programs are dropped behind a module that leaves many of them.

    Each takes a few memory maps, and a process that has Linux's 65,530 of them dies in XLA.
    """
    yield
    from specjax.support import memory_maps  # after the settings above

    if memory_maps.used() > memory_maps.limit() // 4:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def on_cpu():
    """Skips a test that reads what XLA makes of a program on a CPU."""
    if jax.default_backend() != "cpu":
        pytest.skip("reads what XLA makes of it on a CPU")


@pytest.fixture
def double():
    """Floats of 64 bits."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def standard_promotion():
    """JAX's ordinary casts, for tests that train: optax divides integer step counts by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pytest_collection_finish():
    """What is there by now stays: the collector need not look at it. Tracing makes many objects
    and few cycles."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if "torch" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))
