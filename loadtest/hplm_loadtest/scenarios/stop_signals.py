"""Ends a command on SIGINT or SIGTERM: with one line, with the signal's status, and with its child processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals(command: str) -> None:
    """Install the handlers of both signals. A second signal is ignored, so that cleaning up is not cut short."""

    def stop(number: int, _: object) -> None:
        ignore_stop_signals()
        # Without this, the command would wait until the load of every generator is over.
        for process in multiprocessing.active_children():
            process.terminate()
        raise stopped(command, number)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def ignore_stop_signals() -> None:
    """Ignore both signals until the process ends.

    Only ignored signals stay harmless while the interpreter ends: it restores the default action, which kills the process, in
    place of every handler written in Python.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stopped(command: str, number: int) -> SystemExit:
    """Print which signal stopped the command, and return the exit to raise: its status is 128 plus the signal's number."""
    print(f"hplm {command}: stopped by {signal.Signals(number).name}", file=sys.stderr)
    return SystemExit(128 + number)
