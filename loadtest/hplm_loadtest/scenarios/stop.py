"""Ctrl-C and SIGTERM end a command with one line and a status, and everything that it has begun with it."""

from __future__ import annotations

import multiprocessing
import signal
import sys

STOPS = (signal.SIGINT, signal.SIGTERM)


def stop_by_signals(command: str) -> None:
    """From now on. A second signal changes nothing: what was begun is still to be ended."""

    def stop(number: int, _: object) -> None:
        for each in STOPS:
            signal.signal(each, signal.SIG_IGN)
        # Who waits for a generator would wait until its load is over.
        for process in multiprocessing.active_children():
            process.terminate()
        raise stopped(command, number)

    for number in STOPS:
        signal.signal(number, stop)


def stopped(command: str, number: int) -> SystemExit:
    """To be raised. Says so; the status is 128 and the signal's number."""
    print(f"hplm {command}: stopped by {signal.Signals(number).name}", file=sys.stderr)
    return SystemExit(128 + number)
