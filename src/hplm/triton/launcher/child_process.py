"""Starting a child process so that nothing of it is lost, and reading its exit status."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator

from hplm.runtime.process import end_with_parent


def prepare_child(stack: tuple[int, int] | None, files: tuple[int, int], parent: int | None) -> None:
    """Set the child's umask and limits, in the child before it becomes Triton, and tie it to `parent` if there is one."""
    # The manager writes training data into files, which only this user may read.
    os.umask(0o077)
    if stack is not None:
        resource.setrlimit(resource.RLIMIT_STACK, stack)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    if parent is not None:
        end_with_parent(parent)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Run the handlers of signals that end a process after the block.

    An exception from a handler would otherwise separate a new process from the code that started it. A signal mask does not
    help: another thread would take the signal, and its handler would run in the main thread all the same.
    """
    arrived: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        handlers = {number: handler for number, handler in known.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in arrived:
            signal.raise_signal(sent)


def exit_status(child: subprocess.Popen[bytes]) -> int | None:
    """Return a child's exit status (negative: the number of a signal), None while it runs.

    This is not `Popen.poll`: the exception of a signal handler may leave `poll` with its lock taken (seen), and a later
    `wait` would wait for ever. Also the child is not reaped, so its number, which is its group's, is not used again.
    """
    if child.returncode is not None:
        return child.returncode
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def exit_words(status: int) -> str:
    """Return an exit status in words: "with status 1", or "by signal 9 (SIGKILL)"."""
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by signal {-status} ({signal.Signals(-status).name})"
    return f"by signal {-status}"
