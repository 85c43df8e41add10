"""Compiled programs on disk: on by default, and never against what the user has set."""

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


def test_import_is_enough(tmp_path):
    """A process that imports specjax finds what another one compiled."""
    code = (
        "import jax, specjax\n"
        "from jax import monitoring\n"
        f"jax.config.update({SECONDS!r}, 0.0)\n"
        "found = []\n"
        "monitoring.register_event_listener(lambda name, **_: found.append(name))\n"
        "jax.jit(lambda x: x + 1)(jax.numpy.zeros(3))\n"
        "print('/jax/compilation_cache/cache_hits' in found)"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    home = {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    said = [
        subprocess.check_output([sys.executable, "-c", code], env=kept | home, text=True)
        for _ in range(2)
    ]
    assert said == ["False\n", "True\n"]
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


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
        compilation_cache.enable()
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
