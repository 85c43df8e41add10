"""Programs that compile side by side."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from specjax.loop import Method, decode


def at_once(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Call a function that compiles on each item: on a CPU in threads, since XLA leaves cores idle.

    Elsewhere one after the other, since compilation may try kernels on the device and time them. So
    too with several processes, which must run their programs in the same order.
    """
    alone = jax.default_backend() == "cpu" and jax.process_count() == 1
    workers = os.cpu_count() if alone else 1
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))  # raises the error of a call


def compile_at_once(methods: Iterable[Method], begin: Callable[[Method], Any]) -> bool:
    """Compile `start` and `decode` of each method side by side, on a CPU that holds all of it.

    Elsewhere nothing is compiled here, since shapes alone do not say where the arrays will lie; the
    result is False then.

    Args:
      begin: returns the context and state of a method, by `start`.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return False
    parts: list[Callable[[], Any]] = []
    for method in {jax.tree.structure(method): method for method in methods}.values():
        shapes = jax.eval_shape(partial(begin, method))
        parts += [partial(begin, method), decode.lower(method, *shapes).compile]
    at_once(lambda part: part(), parts)
    return True
