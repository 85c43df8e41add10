"""Ctrl-C in a command: none is lost, and a second one ends the process at once."""

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

STATUS = 128 + signal.SIGINT  # of a command that Ctrl-C ended
PAUSE = 0.3  # seconds in which several signals are one: parents may pass theirs on
AGAIN = 1.0  # seconds after which an interrupt without effect is raised again

came = threading.Event()
"""Whether a SIGINT has come since `insistent` began."""


@contextlib.contextmanager
def insistent() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body until it takes effect; a second SIGINT ends the process.

    Python drops an exception that is raised in a callback, such as that of JAX for the garbage
    collector, and it handles no signal before a call of C code, such as a compilation, returns. So
    a thread counts the signals as they come.

    Nothing changes outside of the main thread, or where SIGINT is ignored or has a handler already.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came.clear()
    read, write = os.pipe()
    os.set_blocking(write, False)
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda one: None if one.exc_type is KeyboardInterrupt else unraisable(one)
    watch = threading.Thread(target=_watch, args=(read,), daemon=True)
    watch.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(before)
        sys.unraisablehook = unraisable
        os.close(write)
        watch.join()
        os.close(read)


def _interrupt(*_) -> None:
    """Raise KeyboardInterrupt, unless the program is already ending because of one."""
    handled = sys.exception()
    while handled is not None:
        if isinstance(handled, KeyboardInterrupt):
            return
        handled = handled.__context__
    raise KeyboardInterrupt


def _watch(read: int) -> None:
    """Count the signals that the pipe shows, until the body closes it."""
    with contextlib.suppress(EOFError):
        _sigint(read)
        came.set()
        time.sleep(PAUSE)
        while _sigint(read, 0):
            pass
        waits = 0
        while not _sigint(read, AGAIN):
            if not waits:
                print("stopping; Ctrl-C again ends at once", file=sys.stderr, flush=True)
            waits += 1
            _thread.interrupt_main()
            _sigint(read, 0)  # this one
        os.write(2, b"ended\n")
        os._exit(STATUS)


def _sigint(read: int, seconds: float | None = None) -> bool:
    """Wait for a SIGINT, so long at most; EOFError if the pipe is closed."""
    while select.select([read], [], [], seconds)[0]:
        if not (number := os.read(read, 1)):
            raise EOFError
        if number[0] == signal.SIGINT:  # of all signals that have a handler, the pipe has a byte
            return True
    return False
