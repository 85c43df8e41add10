"""Ctrl-C in a command, as a process of its own gets it from a terminal."""

import signal
import subprocess
import sys

import pytest

from command_line import ROOT

# Each body sends itself a SIGINT, and does not end by itself.
LOST = """
def callback(phase, info):
    if phase == "start" and not lost:
        lost.append(os.kill(os.getpid(), signal.SIGINT))
        for _ in range(1000):  # Python handles the signal here, and drops the exception
            pass
lost = []
gc.callbacks.append(callback)
gc.collect()
while True:
    time.sleep(0.01)
"""
SWALLOWED = """
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)  # which is another signal, and counts for nothing
try:
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
try:
    while True:
        time.sleep(0.01)
finally:
    time.sleep(1.5)
    print("cleaned", flush=True)
"""
IN_C = """
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)
"""
CODE = """
import gc, hashlib, os, signal, threading, time
signal.alarm(60)  # a command that nothing ends would never return
from specjax.support import command_line
def main(argv):
{body}
command_line.run(main, None)
"""


@pytest.mark.parametrize("body", [LOST, SWALLOWED, IN_C], ids=["lost", "swallowed", "in c"])
def test_ctrl_c_ends_a_command(body):
    """Though a callback or a handler drops the exception; in C code only the second signal does."""
    code = CODE.format(body=body.replace("\n", "\n    "))
    # Tests that run in the background of a shell ignore SIGINT, and so do their children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + code
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as begun:  # fmt: skip
        assert begun.stderr.readline() == "stopping; Ctrl-C again ends at once\n"
        if body is IN_C:
            begun.send_signal(signal.SIGINT)
        out, said = begun.communicate(timeout=30)
    assert (begun.returncode, said) == (130, "ended\n" if body is IN_C else "interrupted\n")
    assert out == ("cleaned\n" if body is SWALLOWED else "")


def test_an_ignored_sigint_stays_ignored():
    """A shell ignores it for commands in its background."""
    body = "os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + CODE
    done = subprocess.run(
        [sys.executable, "-c", code.format(body=f"    {body}")], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"goes on\n")


@pytest.mark.parametrize("command", [["-m", "specjax"], ["-c", CODE.format(body="    pass")]])
def test_help_into_a_pipe_that_closes_or_a_full_disk(command):
    how = {"args": [sys.executable, *command, "--help"], "cwd": ROOT, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        done = subprocess.run(**how, stdout=full, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Cannot write standard output, or a temporary file: No space")
    with subprocess.Popen(**how, stdout=subprocess.PIPE) as begun:
        begun.stdout.close()
        assert begun.stderr.read() == b""
    assert begun.returncode == 141
