"""Commands in processes of their own, with virtual devices, and several that join."""

import os
import socket
import subprocess
import sys
from typing import NamedTuple

from command_line import PROGRESS, ROOT


class Ended(NamedTuple):
    """What a process left."""

    status: int
    stdout: str
    stderr: str  # without progress


def start(module, *arguments, devices=1):
    """`python -m module arguments` in a process of its own, on so many virtual devices."""
    virtual = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", *module.split(), *map(str, arguments)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "XLA_FLAGS": virtual, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def start_joined(module, *arguments, devices=1):
    """Two processes that join."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        joined = [f"--coordinator=localhost:{free.getsockname()[1]}", "--processes=2"]
    numbered = [[*arguments, *joined, f"--process={index}"] for index in range(2)]
    return [start(module, *one, devices=devices) for one in numbered]


def ended(process, timeout=400):
    """Wait for a process."""
    stdout, stderr = process.communicate(timeout=timeout)
    lines = [line for line in stderr.splitlines(True) if not line.startswith(PROGRESS)]
    return Ended(process.returncode, stdout, "".join(lines))
