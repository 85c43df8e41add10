"""What a run takes on each device of a mesh, and how fast it can be at most, before anything is
loaded.

Models are outlines (`hub.described`). Both programs of a run are compiled for the mesh and not run:
virtual devices of a CPU will do. Nothing is allocated.

Memory. Weights, caches and all else that is kept follow from shapes, dtypes and shardings, to the
byte. Temporaries are what the compiler says of float32 programs, which bounds those of narrower
dtypes: XLA computes bfloat16 in float32 on a CPU, and would count copies of weights in float32 that
an accelerator never holds.

Time. A call of a model reads its weights and caches once, and sends what its collectives exchange:

    call(K) = (weights + caches) / bandwidth + K · exchanged / interconnect
              + collectives · latency + launch

for K positions, on each device. No call is faster, so this is a floor: products come on top, and
so do latencies and launches where they are not given. The ratio of two floors bounds nothing, since
what a floor leaves out is not the same in both loops: plain decoding calls the target τ times as
often. Plain decoding takes a call of one position for a token, and speculative
decoding γ of the draft and one of the target with γ + 1 positions for τ tokens, where τ is
(1 − α^(γ+1)) / (1 − α) (Eq. 1 of the paper). Rows of a batch share the calls.
"""

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax

from specjax.batching import bucket
from specjax.decoding.programs import Programs, compiled
from specjax.formulas import expected_tokens
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.attention import KV
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import Need, nbytes

# Of the compiler: a plan is never run, so nothing is gained by making it fast.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a run takes on each device: a method in its dtype, and the same in float32, which is
    compiled."""

    method: Method
    wide: Method
    target: Checkpoint  # of outlines, like the methods
    longest: int  # tokens of the longest text
    max_new_tokens: int

    def need(self, rows: int) -> Need:
        """Bytes, with a batch of so many rows."""
        programs = _compiled(self, rows)
        kept = programs.context, programs.state
        narrower = nbytes(_caches(kept)) - self._narrow(nbytes(_caches(kept)))
        return Need(nbytes(self.method), nbytes(kept) - narrower, max(programs.temporary))

    def call(self, rows: int) -> "Call":
        """The call of the model in plain decoding."""
        assert self.method.drafter is None
        programs, leaves = _compiled(self, rows), jax.tree.leaves(self.method)
        context, state = programs.context, programs.state
        text = programs.decode.as_text() or ""
        placement = sharding.placement_of(self.method)
        return Call(
            weights=nbytes([leaves[i] for i in weights_read(self.wide, context, state)]),
            caches=self._narrow(nbytes(_caches((context, state.cache)))),
            exchanged=exchanged(
                text,
                1 if placement is None else placement.ways,
                _dtype(self.method).itemsize,
            ),
            collectives=len(_COLLECTIVE.findall(text)),
        )

    def _narrow(self, count: int) -> int:
        """Bytes that are float32 in what is compiled, as bytes of the method's dtype."""
        return count * _dtype(self.method).itemsize // _dtype(self.wide).itemsize


@functools.lru_cache(maxsize=4)
def _compiled(run: Plan, rows: int) -> Programs:
    return compiled(
        run.wide,
        run.target,
        run.longest,
        rows=rows,
        max_new_tokens=run.max_new_tokens,
        options=QUICKLY,
    )


def _caches(tree: Any) -> list[KV]:
    """Keys and values, all that has the parameters' dtype."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KV))
    return [part for part in parts if isinstance(part, KV)]


def _dtype(method: Method) -> Any:
    return jax.tree.leaves(method.target.params)[0].dtype  # type: ignore[attr-defined]


def largest(plan: Plan, memory: int, rows: int, step: int = 1, most: int = 4096) -> int:
    """The most rows that fit into a device of so many bytes, among the batches that are decoded
    (`batching.bucket`); 0: not even `rows` do.

    What a batch takes grows evenly, or faster at some size. So between one that fits and one that
    does not it is no more than on the line between both.

    Args:
      step: of which the rows must be a multiple: devices of the data axis.
    """
    least = plan.need(rows)
    if least.total > memory:
        return 0
    sizes = [n for n in range(rows, most + 1) if bucket(n) == n and n % step == 0]
    low, high = 0, len(sizes)  # sizes[low] fits, and takes `least`; sizes[high] does not
    grows = least.state / rows  # with each row, at least
    while high - low > 1:
        reach = sizes[low] + (memory - least.total) / grows
        guess = max((i for i in range(low + 1, high) if sizes[i] <= reach), default=low)
        if guess == low:
            break
        found = plan.need(sizes[guess])
        if found.total <= memory:
            low, least = guess, found
        else:
            high = guess
            grows = (found.total - least.total) / (sizes[guess] - sizes[low])
    return sizes[low]


# --- time ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Bytes on each device of one call of a model with a batch of rows."""

    weights: (
        float  # that it reads; not an encoder's, and of tables whose rows are looked up nothing
    )
    caches: float  # that it reads: all slots of the buffer, as an accelerator does
    exchanged: float  # that its collectives send, for each position of a row
    collectives: int = 0  # how many of them wait for each other

    def seconds(self, positions: int, on: "Hardware") -> float:
        """The least time of the call."""
        read = (self.weights + self.caches) / on.bandwidth
        sent = positions * self.exchanged / on.interconnect if self.exchanged else 0.0
        return read + sent + self.collectives * on.latency + on.launch


class Hardware(NamedTuple):
    """What a device can do, and how long it waits."""

    bandwidth: float  # bytes per second of its memory
    interconnect: float = math.inf  # bytes per second that it sends
    latency: float = 0.0  # seconds of a collective, however small
    launch: float = 0.0  # seconds to launch one call of a model


def plain_seconds(target: Call, on: Hardware) -> float:
    """The least time of a token of each row."""
    return target.seconds(1, on)


def speculative_seconds(target: Call, draft: Call, gamma: int, tau: float, on: Hardware) -> float:
    """The least time of a token of each row, where a round gives τ of them.

    Raises:
      ValueError: τ is not in [1, γ + 1].
    """
    if not 1 <= tau <= gamma + 1:
        raise ValueError(f"tau={tau:g} must lie in [1, γ + 1], and γ is {gamma}.")
    return (gamma * draft.seconds(1, on) + target.seconds(gamma + 1, on)) / tau


def tau_of(alpha: float, gamma: int) -> float:
    """Eq. 1 of the paper."""
    return float(expected_tokens(alpha, gamma))


def weights_read(method: Method, context: Any, state: Any) -> set[int]:
    """The leaves of a method that a round reads whole, by number; the others it leaves alone, or
    gathers a few rows of them.
    """
    traced = jax.make_jaxpr(_round)(method, context, state)
    count = len(jax.tree.leaves(method))
    return {i for i in _read(traced.jaxpr) if i < count}


def _round(method: Method, context: Any, state: Any) -> Any:
    """One round, without the `Round`."""
    return method.step(context, state)[0]


def _read(jaxpr: Any) -> set[int]:
    """Inputs of a program that an operation other than a gather reads, by number."""
    number = {var: i for i, var in enumerate(jaxpr.invars)}
    found: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "gather":
            read = equation.invars[1:]
        elif inner := _inner(equation):
            read = [operands[i] for program, operands in inner for i in _read(program)]
        else:
            read = equation.invars
        found |= {number[var] for var in read if not hasattr(var, "val") and var in number}
    return found


def _inner(equation: Any) -> list[tuple[Any, list[Any]]]:
    """The programs that an operation runs, each with the operands that are its inputs."""
    params, operands = equation.params, list(equation.invars)
    if equation.primitive.name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = operands[second:]
        return [
            (params["cond_jaxpr"].jaxpr, operands[:first] + carry),
            (params["body_jaxpr"].jaxpr, operands[first:second] + carry),
        ]
    if equation.primitive.name == "cond":
        return [(branch.jaxpr, operands[1:]) for branch in params["branches"]]
    program = params.get("jaxpr", params.get("call_jaxpr"))
    return [] if program is None else [(getattr(program, "jaxpr", program), operands)]


# A result, or several in brackets, and which collective gives it.
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")
# Bytes that a device sends of each byte of the result, among n devices in a ring.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: float(n - 1),
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


def exchanged(program: str, ways: int, itemsize: int) -> float:
    """Bytes that each device sends in a turn of a compiled loop, whose collectives all lie in it.

    Args:
      program: a float32 program, as text.
      ways: devices that exchange.
      itemsize: of the dtype for which it stands: sums of activations are in that, and gathered
        logits are float32 in any.
    """
    total = 0.0
    for result, kind in _COLLECTIVE.findall(program):
        for name, shape in _ARRAY.findall(result):
            count = math.prod(int(size) for size in shape.split(",") if size)
            wide = kind == "all-gather" or name != "f32"
            size = int(re.sub(r"\D", "", name)) // 8 if wide else itemsize
            total += _SENT[kind](ways) * count * max(size, 1)
    return total
