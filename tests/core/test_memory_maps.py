"""Compiled programs are dropped before a process runs out of memory maps, and never while they are
timed."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import test_admission
from specjax.decoding import building, streaming
from specjax.measure import timing
from specjax.measure.stopwatch import Stopwatch
from specjax.sampling import Sampling
from specjax.support import memory_maps
from specjax.support.memory_maps import _Process, kept, make_room

pytestmark = pytest.mark.skipif(not memory_maps.limit(), reason="only Linux limits memory maps")


@pytest.fixture
def cleared(monkeypatch):
    """The clearings so far, in a process that seems to have compiled all that it has room for."""
    found = []
    real = jax.clear_caches
    most = memory_maps.used() + 1_000
    monkeypatch.setattr(memory_maps, "limit", lambda: most)
    monkeypatch.setattr(jax, "clear_caches", lambda: (found.append(memory_maps.used()), real()))
    for name, value in {"compiled": True, "left": 0, "kept": 0, "warned": True}.items():
        monkeypatch.setattr(_Process, name, value)
    return found


def test_nothing_is_dropped_where_there_is_room(cleared, monkeypatch):
    """A program takes maps; they are counted once for all that has compiled."""
    counted = []
    monkeypatch.setattr(memory_maps, "used", lambda: counted.append(1) or 6_000)
    monkeypatch.setattr(memory_maps, "limit", lambda: 65_530)
    make_room()
    make_room()
    assert (len(counted), cleared) == (1, [])
    jax.jit(lambda x: x - 3.5)(jnp.ones(7))
    make_room()
    make_room()
    assert (len(counted), cleared) == (2, [])
    make_room(methods=50)
    assert not cleared, "nothing has compiled since"
    before = memory_maps.clearings()
    monkeypatch.setattr(_Process, "compiled", True)
    make_room(methods=50)
    assert (len(cleared), memory_maps.clearings()) == (1, before + 1)


@pytest.mark.parametrize(("found", "most"), [(48_000, 65_530), (600, 0), (0, 0), (0, 65_530)])
def test_room_enough_or_no_limit(cleared, monkeypatch, found, most):
    monkeypatch.setattr(memory_maps, "used", lambda: found)
    monkeypatch.setattr(memory_maps, "limit", lambda: most)
    make_room()
    assert cleared == []


def test_clearing_gives_maps_back_and_is_said_once(cleared, monkeypatch):
    monkeypatch.setattr(_Process, "warned", False)
    jax.jit(lambda x: jnp.sort(x)[::-1] + jnp.cumsum(x))(jnp.ones(7))
    with pytest.warns(RuntimeWarning, match=r"had [\d,]+ of the [\d,]+ memory maps .*fewer shapes"):
        make_room()
    assert memory_maps.used() < cleared[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for left, drops in ((_Process.left, 1), (0, 2)):  # what remained is not cleared again
            _Process.compiled, _Process.left = True, left
            make_room()
            assert len(cleared) == drops


def test_a_stream_goes_on(cleared):
    """Rows are the same when programs are dropped between two of them."""
    method, target = building.plain(test_admission.COUNT, Sampling(0.0)), test_admission.COUNT
    options = {"max_new_tokens": 3, "key": test_admission.KEY, "batch_size": 1}
    rows = streaming.stream(method, target, [[2], [3]], **options)
    assert next(rows).tokens == [3, 4, 5]
    assert len(cleared) == 1, "it makes room before it compiles"
    _Process.compiled, _Process.left = True, 0
    make_room()
    assert len(cleared) == 2
    assert next(rows).tokens == [4, 5, 6]


def test_no_program_is_dropped_while_it_is_timed(cleared):
    """Room is made for the loops before they compile; after that they stay."""
    method, target = test_admission.made("plain")
    compiled = []

    def note(state):
        compiled.append(_Process.compiled)
        _Process.compiled, _Process.left = True, 0  # as if a neighbour had compiled
        make_room()

    watch = Stopwatch(target, 3, test_admission.KEY, repeats=2, width=8)
    watch.race({"one": method}, test_admission.IDS[:2], note=note)
    assert (len(cleared), len(compiled), _Process.kept) == (1, 4, 0)
    make_room()
    assert len(cleared) == 2


def test_turns_keep_what_has_compiled(cleared):
    """`in_turns` drops nothing, before its runs or in them; an error ends the block."""

    def run(batch):
        make_room()
        return 1.0, 1.0, [], None

    timing.in_turns({"one": run}, [0], 1)
    assert cleared == []
    with pytest.raises(ZeroDivisionError), kept():
        raise ZeroDivisionError
    make_room()
    assert len(cleared) == 1
