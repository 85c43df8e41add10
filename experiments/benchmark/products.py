"""Time the products of one decoder step, by their form and by the number of rows.

    python -m experiments.benchmark.products
    python -m experiments.benchmark.products --shapes=t5-base --rows=1,4,11

`specjax/models/products.py` chooses among these forms. Prints milliseconds for all matrices of a
step, the least of --turns runs that take turns.
"""

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array
from rich.console import Console

from specjax.measure import provenance, report
from specjax.models import int8, products
from specjax.support import command_line

LAYER = {  # (inputs, outputs) of a decoder layer's matrices, the number of layers, and the head
    "parse": ([(256, 1536), (512, 256), (256, 512), (512, 256), (256, 3200), (1600, 256)], 6, 2048),
    "t5-base": ([(768, 2304), *3 * [(768, 768)], (768, 3072), (3072, 768)], 12, 32128),
    "smollm2": ([(576, 960), (576, 576), (576, 3072), (1536, 576)], 30, 49152),
    "qwen2.5-0.5b": ([(896, 1152), (896, 896), (896, 9728), (4864, 896)], 24, 151936),
    "qwen2.5-1.5b": ([(1536, 2048), (1536, 1536), (1536, 17920), (8960, 1536)], 28, 151936),
}
Form = Callable[[Array, Array, bool], Array]
FORMS: dict[str, tuple[Any, Form, bool]] = {  # the dtype, the form, and whether it is (in, out)
    "float32": (jnp.float32, products.product, True),
    "bfloat16, x W": (jnp.bfloat16, products.product, True),
    "bfloat16, W xᵀ": (jnp.bfloat16, products.product, False),
    "int8, x W": (jnp.int8, int8.in_parts, True),
    "int8, W xᵀ": (jnp.int8, int8.in_parts, False),
    "uint8, W xᵀ": (jnp.uint8, int8.in_parts, False),
}


def step(form: Form, input_first: bool, turns: int) -> Callable[..., Array]:
    """Compile a loop of steps in which each product depends on the one before."""

    def once(_, carried, rows, matrices):
        for matrix in matrices:
            inputs = matrix.shape[0 if input_first else 1]
            found = form(rows[:, :inputs] + carried[:, :1], matrix, input_first)
            carried = 0.5 * carried + 1e-3 * found[:, :8]
        return carried

    def run(rows, matrices):
        def body(i, carried):
            return once(i, carried, rows, matrices)

        return jax.lax.fori_loop(0, turns, body, jnp.zeros((len(rows), 8)))

    return jax.jit(run)


def main(_) -> None:
    args, rng, inner = flags.FLAGS, np.random.default_rng(0), 5
    layer, layers, vocabulary = LAYER[args.shapes]
    layers = min(layers, args.layers or layers)
    shapes = [*layers * layer, (layer[0][0], vocabulary)]
    floats = [rng.standard_normal(shape, np.float32) * shape[0] ** -0.5 for shape in shapes]
    counts = [int(count) for count in args.rows]
    runs = {}
    for name, (dtype, form, input_first) in FORMS.items():
        stored = [x if input_first else x.T for x in floats]
        if dtype in int8.DTYPES:
            stored = [np.rint(400 * x).astype(np.int8) for x in stored]
        if dtype == jnp.uint8:
            stored = [int8.unsigned(x) for x in stored]
        matrices = [jnp.asarray(x, dtype) for x in stored]
        for count in counts:
            rows = jnp.asarray(rng.normal(size=(count, max(s[0] for s in shapes))), jnp.float32)
            call = step(form, input_first, inner)
            call(rows, matrices).block_until_ready()  # compiles
            runs[name, count] = (call, rows, matrices)
    least = dict.fromkeys(runs, np.inf)
    for _ in range(args.turns):
        for key, (call, *operands) in runs.items():
            begin = time.perf_counter()
            call(*operands).block_until_ready()
            least[key] = min(least[key], (time.perf_counter() - begin) / inner * 1e3)
    table: list[dict[str, Any]] = [{"form": name} for name in FORMS]
    for line in table:
        line |= {str(n): f"{least[line['form'], n]:.2f}" for n in counts}
    columns = [(name, itemgetter(name)) for name in ("form", *map(str, counts))]
    facts = provenance.environment()
    title = f"{args.shapes}, ms by rows: {facts['device']}, {facts['cores']} cores"
    report.show(Console(width=100), columns, table, title)


if __name__ == "__main__":
    flags.DEFINE_enum("shapes", "parse", list(LAYER), "The decoder whose matrices are multiplied.")
    flags.DEFINE_integer("layers", 0, "Layers at most; 0: all of the decoder.", lower_bound=0)
    flags.DEFINE_list("rows", ["1", "2", "4", "8", "11", "16"], "Numbers of rows.")
    flags.DEFINE_integer("turns", 8, "Runs of each form.", lower_bound=1)
    command_line.run(main, __doc__)
