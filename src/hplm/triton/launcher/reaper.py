"""A process beside a Triton that outlives whoever kills it, and ends what it leaves.

Stubs notice by themselves that their Triton has gone, but not always: one that waits for Triton's word with the interpreter's
lock taken, as for a metric behind a line of the log, waits for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hplm.runtime.process import ENDED, begun, state_of
from hplm.triton.launcher import leftovers

PERIOD_S = 0.5
# For a Triton whose launcher is gone: it would wait for as long as a client keeps a stream open.
PATIENCE_S = 10.0


def start_reaper(server: int, folder: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start it, in the empty folder `work`, for a Triton that leads a process group and has `folder`. Raises OSError.

    It ends with what it has done when Triton ends, or cannot end though whoever started both is gone, and may be killed any
    time before.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hplm.triton.launcher.reaper",
            str(server),
            begun(server),
            str(os.getpid()),
            str(folder),
        ],
        # First on sys.path, and empty.
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not in the group of who may be killed as one.
        start_new_session=True,
    )


def _main(server: int, since: str, launcher: int, folder: Path) -> None:
    alone_s = 0.0
    while (state := _look(server, since)) and state not in ENDED and alone_s < PATIENCE_S:
        time.sleep(PERIOD_S)
        if os.getppid() != launcher:
            alone_s += PERIOD_S
    # Who has its number by now has it because nobody of its group is left.
    if state:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
            # One that has not met its end yet may write a file once more.
            time.sleep(PERIOD_S)
    leftovers.remove(folder, server if state else None)


def _look(server: int, since: str) -> str:
    """`state_of`, or "?" until it can be told."""
    try:
        return state_of(server, since)
    except OSError:
        return "?"


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
