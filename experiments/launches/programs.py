"""How many operations a round hands to the device, read off the compiled program.

On a GPU an operation is a launch, and takes some microseconds however little it computes. So with
small models, or one row, a round takes about as long as its launches, and a policy costs what it
adds to them. `compiled` needs no GPU: XLA compiles for one that is described to it.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from specjax import loop
from specjax.decoding.programs import blank_arguments
from specjax.decoding.starting import room_of
from specjax.loop import Method
from specjax.models.checkpoint import Checkpoint

# What XLA has to know of an H100 to compile for it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 core_count: 132
  threads_per_core_limit: 2048 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# What hands nothing to the device.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
     "partition-id", "while", "conditional", "call", "async-start", "async-update")
)  # fmt: skip


class Part(NamedTuple):
    """Of a program: all of it, a loop, a choice, or one of a choice's branches."""

    kind: str  # "program", "loop", "choice" or "branch"
    place: str  # the function that wrote it; "" where the program does not say
    operations: int  # in each turn, but for those of `parts`; a loop's condition is included
    parts: tuple["Part", ...]
    turns: int | None = None  # of a loop, where XLA knows them

    def loop(self, place: str) -> "Part":
        """The outermost one of a function.

        Raises:
          ValueError: there is none.
        """
        level = [self]
        while level:
            for part in level:
                if part.kind == "loop" and part.place == place:
                    return part
            level = [inner for part in level for inner in part.parts]
        raise ValueError(f"No loop of this program is of {place!r}.")


class Work(NamedTuple):
    """What a turn of a loop takes."""

    operations: int
    reads: int  # of a condition, by the host


def of_round(round_: Part, drafted: int) -> Work:
    """What a turn of the loop `decode` takes, with so many drafted tokens.

    The drafter is up to date. Other loops count as one turn where XLA knows no more: on a CPU that
    is attention, over a block of slots.
    """
    inside = _turn(round_, {"draft_chain": max(drafted - 1, 0), "catch_up": 0}, drafted > 0)
    return inside._replace(reads=inside.reads + 1)


def _turn(part: Part, turns: Mapping[str, int], drafts: bool) -> Work:
    """A turn of a part, given those of the loops whose turns XLA does not know. Of a choice the
    longer branch is the one that drafts."""
    operations, reads = part.operations, 0
    for inner in part.parts:
        if inner.kind == "choice":
            branches = [_turn(branch, turns, drafts) for branch in inner.parts]
            each, count, asked = (max if drafts else min)(branches), 1, 1
        else:
            each = _turn(inner, turns, drafts)
            count = turns.get(inner.place, 1) if inner.turns is None else inner.turns
            asked = count + 1 if inner.turns is None else 0
        operations += count * each.operations
        reads += count * each.reads + asked
    return Work(operations, reads)


def compiled(
    method: Method,
    target: Checkpoint,
    longest: int,
    *,
    max_new_tokens: int,
    platform: str,
    rows: int = 1,
) -> str:
    """The text of `loop.decode`, compiled.

    Args:
      method, target: of outlines, laid out for the platform.
      longest: tokens of the longest text.
      platform: "cpu", or "cuda" for an H100.

    Raises:
      ValueError: this jax cannot compile for the platform.
    """
    begun = blank_arguments(target, longest, rows)
    room = room_of(method, begun[0], max_new_tokens)
    args = method, *jax.eval_shape(partial(loop.start, buffer_len=room), method, *begun)
    options: dict[str, Any] = {}
    if platform == "cuda":
        everywhere = NamedSharding(_h100(), PartitionSpec())
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=everywhere), args
        )
        options["xla_gpu_autotune_level"] = 0  # it would time kernels
    lowered = loop.decode.trace(*args).lower(lowering_platforms=(platform,))
    return lowered.compile(options).as_text() or ""


def _h100() -> jax.sharding.Mesh:
    try:
        one = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            "This jax cannot compile for CUDA. Install its plugin, which needs no GPU: "
            f"pip install 'jax[cuda13]=={jax.__version__}' ({error})."
        ) from None
    return topologies.make_mesh(one, (1,), ("device",))


def read(text: str) -> Part:
    """The program that a text is, of `compiled` or of any other `as_text()`."""
    frames, lines, entry = _frames(text), [], ""
    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = computations.setdefault(opening[2], [])
            entry = opening[2] if opening[1] else entry
        elif line.startswith("  ") and " = " in line:
            lines.append(re.sub(r"/\*.*?\*/", "", line).strip())
    return Part("program", "", *_inside(computations, frames, entry))


def _inside(computations, frames, name: str) -> tuple[int, tuple[Part, ...]]:
    """Operations of a computation, and its parts."""
    inside = partial(_inside, computations, frames)
    operations, parts = 0, []
    for line in computations[name]:
        kind, place = _kind(line), _place(frames, line)
        if kind == "while":
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            condition = 0 if known else inside(_named(line, "condition"))[0]
            count, inner = inside(_named(line, "body"))
            turns = int(known[1]) if known else None
            parts.append(Part("loop", place, count + condition, inner, turns))
        elif kind == "conditional":
            branches = [Part("branch", place, *inside(branch)) for branch in _branches(line)]
            parts.append(Part("choice", place, 0, tuple(branches)))
        elif kind in ("call", "async-start"):
            count, inner = inside(_named(line, "to_apply" if kind == "call" else "calls"))
            operations += count
            parts += inner
        elif kind not in FREE and not kind.endswith("-done"):
            operations += 1
    return operations, tuple(parts)


def _kind(line: str) -> str:
    """Of an instruction: "%x = f32[2]{0} add(…)" is an add; the type may be a tuple."""
    made = line.split(" = ", 1)[1]
    depth = 0
    for i, letter in enumerate(made):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and not depth:
            return made[i + 1 :].split("(", 1)[0]
    return made


def _named(line: str, role: str) -> str:
    found = re.search(rf"\b{role}=%?([\w.\-]+)", line)
    assert found, line
    return found[1]


def _branches(line: str) -> list[str]:
    if several := re.search(r"branch_computations=\{([^}]*)\}", line):
        return [name.strip().lstrip("%") for name in several[1].split(",")]
    return [_named(line, f"{which}_computation") for which in ("true", "false")]


# --- who wrote it --------------------------------------------------------------------------------


class _Frames(NamedTuple):
    """Tables at a program's head, each by number."""

    files: dict[str, str]
    functions: dict[str, str]
    locations: dict[str, tuple[str, str]]  # file and function
    frames: dict[str, tuple[str, str]]  # location and the frame that called it


def _frames(text: str) -> _Frames:
    def entries(title: str, pattern: str) -> dict[str, Any]:
        section = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        found = re.findall(rf"^(\d+) {pattern}", section[1] if section else "", re.MULTILINE)
        return {number: rest[0] if len(rest) == 1 else tuple(rest) for number, *rest in found}

    return _Frames(
        entries("FileNames", r'"(.*)"'),
        entries("FunctionNames", r'"(.*)"'),
        entries("FileLocations", r"\{file_name_id=(\d+) function_name_id=(\d+)"),
        entries("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"),
    )


def _place(frames: _Frames, line: str) -> str:
    """The innermost function that is not jax's; "" where the program does not say."""
    found = re.search(r"stack_frame_id=(\d+)", line)
    frame = found[1] if found else ""
    seen = set()
    while frame in frames.frames and frame not in seen:
        seen.add(frame)
        location, caller = frames.frames[frame]
        file, function = frames.locations[location]
        if "/jax/_src/" not in frames.files[file]:
            return frames.functions[function].split(".")[-1]
        frame = caller
    return ""
