"""Renders chat templates in a child process, which the kernel stops at a limit of time and memory.

A chat template is a program of the checkpoint. Jinja's sandbox keeps it from files and from Python,
and bounds neither its loops nor its texts. The child process is this file, run as a program. It
renders one chat for each line of its input, and lives as long as its parent.
"""

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

MAX_TEMPLATE = 1 << 20  # letters; published templates have at most some 30,000
MAX_PROMPT = 1 << 24  # letters
MAX_SECONDS = 1  # of a processor, for one chat; compiling a template takes less than a tenth
MAX_BYTES = 1 << 29  # of data in the child, which begins with a quarter of that
LOCK = threading.Lock()


def render(template: str, messages: list[dict[str, Any]], fields: dict[str, Any]) -> str:
    """Write a chat by a template, as transformers does.

    Args:
      fields: variables of the template, and arguments of transformers' `render_jinja_template`.

    Raises:
      ValueError: the template fails, or reaches a limit; the message has the reason alone.
    """
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"it has {len(template):,} letters, more than {MAX_TEMPLATE:,}")
    asked = {**fields, "conversations": [messages], "chat_template": template}
    line = json.dumps(asked, default=str) + "\n"
    with LOCK:
        child = _child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except BaseException as error:  # an answer that nobody has read belongs to no later chat
            child.kill()
            _end(child)
            if not isinstance(error, BrokenPipeError):
                raise
            answer = ""
        if not answer:
            status = _end(child)
            late = status == -signal.SIGPROF
            why = f"after {MAX_SECONDS} s of computing" if late else f"with status {status}"
            raise ValueError(f"stopped {why}")
    found = json.loads(answer)
    if "error" in found:
        raise ValueError(found["error"])
    return found["prompt"]


@functools.cache
def _child() -> subprocess.Popen:
    """Start the process that renders; it ends when its input is closed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRANSFORMERS_VERBOSITY": "error",
        "OPENBLAS_NUM_THREADS": "1",  # each thread takes memory
    }
    # -P: the folder of this file has modules that are called as packages.
    child = subprocess.Popen(
        [sys.executable, "-P", __file__], env=environment, text=True, encoding="ascii",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the parent's
    )  # fmt: skip
    atexit.register(_end, child)
    return child


def _end(child: subprocess.Popen) -> int:
    """End the process, and return its status; the next chat starts another."""
    _child.cache_clear()
    atexit.unregister(_end)
    for stream in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    return child.wait()


def _serve() -> None:
    """Answer each chat of standard input by a line with its prompt or an error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # whose signal ends the process
        try:
            prompt = render_jinja_template(**json.loads(line))[0][0]
            if len(prompt) > MAX_PROMPT:
                raise ValueError(f"a prompt of {len(prompt):,} letters, more than {MAX_PROMPT:,}")
            answer = {"prompt": prompt}
        except MemoryError:
            answer = {"error": f"it needs more than {MAX_BYTES >> 20} MB"}
        except Exception as error:  # a template is a program, and raises any kind
            reason = str(error).strip().split("\n")[0]
            answer = {"error": f"{type(error).__name__}: {reason[:200]}"}
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _serve()
