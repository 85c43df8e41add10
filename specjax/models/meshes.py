"""Meshes of devices by name: "data=2,model=4" splits rows over two, and the model over four."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

DATA, MODEL = "data", "model"


def mesh_of(mesh: Mesh | AbstractMesh | str) -> Mesh | AbstractMesh:
    """Make a mesh from "data=2,model=4", or check one whose axes jax is to partition.

    A text takes the first devices of the default platform. There may be more, but the mesh's size
    must divide their number. Of several processes, each makes a mesh of its own devices; if the
    mesh is larger than these, all make one together.

    Raises:
      ValueError: an axis of another name or twice, a size that is no whole number ≥ 1, or a mesh
        that does not divide the devices.
    """
    if not isinstance(mesh, str):
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise ValueError(f"mesh={mesh!r} must be a jax.sharding.Mesh, or 'data=2,model=4'.")
        _check_names(mesh.axis_names, mesh.axis_names)
        if isinstance(mesh, AbstractMesh):
            return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return Mesh(mesh.devices, mesh.axis_names)
    sizes, count = sizes_of(mesh), size_of(mesh)
    own, every = jax.local_devices(), jax.devices()
    found = own if count <= len(own) else every
    if jax.process_count() > 1 and len(own) < count != len(every):
        raise ValueError(
            f"mesh={mesh!r} takes {count} devices. Of {jax.process_count()} processes each has "
            f"{len(own)}, and all have {len(every)}: let it take as many as one has, or as all."
        )
    if count > len(found) or len(found) % count:
        raise ValueError(
            f"mesh={mesh!r} needs {count} devices, but platform {jax.default_backend()!r} has "
            f"{len(found)}. Choose sizes whose product divides {len(found)}."
        )
    # The order suits the connections of a TPU. Auto: jax places what has no sharding.
    options: dict[str, Any] = {"axis_types": (AxisType.Auto,) * len(sizes)}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=found[:count], **options)


def sizes_of(text: str) -> dict[str, int]:
    """Read the axes of "data=2,model=4"; devices are not looked at.

    Raises:
      ValueError: as `mesh_of`, devices aside.
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        _check_names([name], text)
        if name in sizes:
            raise ValueError(f"mesh={text!r} names the axis {name!r} twice: name it once.")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r}: {name}={size!r} must be a whole number ≥ 1, of devices."
            )
        sizes[name] = int(size)
    return sizes


def size_of(text: str) -> int:
    """The number of devices of "data=2,model=4"; "" is one. ValueError as `sizes_of`."""
    return math.prod(sizes_of(text).values()) if text else 1


def _check_names(names: Any, mesh: Any) -> None:
    for name in names:
        if name not in (DATA, MODEL):
            raise ValueError(
                f'mesh={mesh!r}: {name!r} is no axis that is known. Name "data" (rows of a batch), '
                '"model" (parts of the model), or both: "data=2,model=4".'
            )
