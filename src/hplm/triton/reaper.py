"""A process beside a Triton that outlives whoever kills it, and ends what it leaves: `python -m hplm.triton.reaper PID FOLDER`.

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

from hplm.process import begun, stat_of
from hplm.triton import leftovers

PERIOD_S = 0.5
# Of a process's state in /proc: ended, with nobody yet who asked how.
_ENDED = "ZX"


def start_reaper(server: int, folder: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start it, in the empty folder `work`, for a Triton that leads a process group and has `folder`. Raises OSError.

    It ends with what it has done when Triton ends, and may be killed any time before.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "hplm.triton.reaper", str(server), str(folder)],
        # First on sys.path, and empty.
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not in the group of who may be killed as one.
        start_new_session=True,
    )


def _main(server: int, folder: Path) -> None:
    with suppress(OSError):
        since = begun(server)
        while stat_of(server)[0] not in _ENDED and begun(server) == since:
            time.sleep(PERIOD_S)
    with suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
        # One that has not met its end yet may write a file once more.
        time.sleep(PERIOD_S)
    leftovers.remove(folder, server)


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
