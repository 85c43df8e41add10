"""Compiled programs on disk: by a call, and never against what the user has set."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from command_line import ROOT
from specjax.support import compilation_cache

DIRECTORY, ENABLED, SECONDS = (
    f"jax_{name}"
    for name in (
        "compilation_cache_dir",
        "enable_compilation_cache",
        "persistent_cache_min_compile_time_secs",
    )
)


def run(code, home):
    """What a process of its own prints, with this home directory and no setting of JAX's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    env = kept | {"HOME": str(home), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *code], env=env, capture_output=True)
    return done.stdout.decode()


def test_an_import_sets_nothing_and_a_call_is_enough(tmp_path):
    """`import specjax` imports no jax and makes no folder; a second process finds programs."""
    bare = "import sys, specjax; print([m for m in ('jax', 'numpy', 'flax') if m in sys.modules])"
    assert run(["-c", bare], tmp_path) == "[]\n"
    assert list(tmp_path.iterdir()) == []
    code = (
        "import jax, specjax\n"
        "from jax import monitoring\n"
        "specjax.enable_compilation_cache()\n"
        f"jax.config.update({SECONDS!r}, 0.0)\n"
        "found = []\n"
        "monitoring.register_event_listener(lambda name, **_: found.append(name))\n"
        "jax.jit(lambda x: x + 1)(jax.numpy.zeros(3))\n"
        "print('/jax/compilation_cache/cache_hits' in found)"
    )
    assert [run(["-c", code], tmp_path) for _ in range(2)] == ["False\n", "True\n"]
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


def test_commands_call_it(tmp_path):
    run(["-m", "specjax", "decode"], tmp_path)  # which fails for want of flags
    assert (tmp_path / ".cache" / "specjax" / "compiled").is_dir()


@pytest.mark.parametrize(
    ("env", "given", "expected"),
    [
        ({}, {}, ("home/.cache/specjax/compiled", 0.5)),
        ({"XDG_CACHE_HOME": "{0}/x"}, {}, ("x/specjax/compiled", 0.5)),
        ({"XDG_CACHE_HOME": "x"}, {}, ("home/.cache/specjax/compiled", 0.5)),
        ({}, {DIRECTORY: "{0}/mine"}, ("mine", 1.0)),
        ({}, {ENABLED: False}, (None, 1.0)),
        ({}, {SECONDS: 7.0}, ("home/.cache/specjax/compiled", 7.0)),
        ({"HOME": "{0}/file"}, {}, (None, 1.0)),
        ({"HOME": ""}, {}, (None, 1.0)),
        ({"HOME": "", "XDG_CACHE_HOME": "{0}/x"}, {}, ("x/specjax/compiled", 0.5)),
    ],
)
def test_what_the_user_has_set(tmp_path, monkeypatch, env, given, expected):
    """A home that cannot be written to is no error."""
    (tmp_path / "file").touch()
    fresh = {DIRECTORY: None, ENABLED: True, SECONDS: 1.0}
    before = {name: jax.config.values[name] for name in fresh}
    monkeypatch.delenv("XDG_CACHE_HOME")
    for name, value in {"HOME": "{0}/home", **env}.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    try:
        for name, value in {**fresh, **given}.items():
            value = value.format(tmp_path) if isinstance(value, str) else value
            jax.config.update(name, value)
        compilation_cache.enable_compilation_cache()
        found = jax.config.values
        place, seconds = expected
        assert found[DIRECTORY] == (place and str(tmp_path / place))
        assert found[SECONDS] == seconds
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_watch_counts_what_is_compiled_once():
    """Spans within others count once; running takes none of it."""
    watch = compilation_cache.Watch()
    begin = time.perf_counter()
    run = jax.jit(lambda x: x * 3 + 1)
    jax.block_until_ready(run(jnp.ones(3)))
    assert 0 < watch.seconds() <= time.perf_counter() - begin
    again = compilation_cache.Watch()
    jax.block_until_ready(run(jnp.ones(3)))
    again._spans += [(1.0, 4.0), (2.0, 3.0), (3.5, 5.0), (7.0, 8.0)]
    assert again.seconds() == pytest.approx(5.0)
