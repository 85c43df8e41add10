"""Several processes of one command: their flags, and those that run everything on one mesh."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from specjax.models import meshes
from specjax.support import processes, runs
from specjax.support.processes import Group


def define_flags(what: str, module: str = "") -> None:
    """Define the flags that `processes.joined` reads.

    Args:
      what: what the processes do, such as "share the inputs".
      module: the command's module, whose --help shows the flags; "": the main one.
    """
    of: dict[str, Any] = {"module_name": module or sys.argv[0]}
    at = "HOST:PORT of process 0, or auto: for a mesh over all."
    flags.DEFINE_string("coordinator", "", at, **of)
    flags.DEFINE_integer("processes", 0, f"How many processes {what}.", 0, **of)
    flags.DEFINE_integer("process", 0, "Which of them this is, from 0 on.", **of)
    flags.DEFINE_float("timeout", 60.0, "Seconds for all to join at the coordinator.", **of)


@contextlib.contextmanager
def on_one_mesh(args, config, why: str) -> Iterator[Group]:
    """Join processes that run each program together, on the config's mesh; one may be alone.

    Args:
      args: the flags.
      why: the reason for which processes of this command have to join, for the error.

    Raises:
      ValueError: flags that do not go together, a mesh that jax cannot make, one that leaves out
        devices of several processes, or processes that have another config.
    """
    mesh = config.get("mesh", "")
    size = meshes.size_of(mesh)
    if args.processes > 1 and not args.coordinator:
        raise ValueError(
            f"--processes={args.processes} without --coordinator: {why}. Give "
            "--coordinator=HOST:PORT too."
        )
    with processes.joined(args) as group:
        if group.count > 1:
            if size != (found := jax.device_count()):
                raise ValueError(
                    f"mesh={mesh!r} takes {size} devices, and {group.count} processes have "
                    f"{found}: give a mesh of all of them."
                )
            processes.check_alike(runs.settings(config))
        if mesh:
            meshes.mesh_of(mesh)
        yield group
