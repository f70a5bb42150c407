"""Stubs may live on after their Triton was killed.

Behaviour: a stub notices by itself that Triton is gone, but not always. A stub that waits for Triton while it holds Python's
interpreter lock waits for ever, for example when it sends a metric after a line of the log.
Workaround: a process beside the server, the reaper, outlives the launcher. When Triton ends it kills Triton's process group
and removes its files.
Switched off: harmless; after an orderly end there is nothing to kill or to remove.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hplm.runtime.process import ENDED, begun, numbered, state_of
from hplm.triton.workarounds import killed_server_files

# Seconds between two looks at the server.
PERIOD_S = 0.5
# Seconds that a Triton may take to end when its launcher is gone. It would wait as long as a client keeps a stream open.
ALONE_S = 10.0


def start_reaper(server: int, folder: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start a reaper for a Triton that leads a process group and has `folder`. Raises OSError.

    It runs in the empty folder `work`. It ends after it has reaped Triton: when Triton ends, or when Triton does not end
    though this process is gone. It may be killed any time before.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hplm.triton.workarounds.surviving_stubs",
            str(server),
            begun(server),
            str(os.getpid()),
            str(folder),
        ],
        # Python puts the working directory first on sys.path, so it must be empty.
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Outside the process group that may be killed as a whole.
        start_new_session=True,
    )


def _main(server: int, since: str, launcher: int, folder: Path) -> None:
    alone_s = 0.0
    while (state := _state(server, since)) and state not in ENDED and alone_s < ALONE_S:
        time.sleep(PERIOD_S)
        if os.getppid() != launcher:
            alone_s += PERIOD_S
    # Without a state another process has the server's number, so nothing of the server's group lives.
    if state:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
            # A stub that is about to end may write a file once more.
            time.sleep(PERIOD_S)
    killed_server_files.remove(folder, numbered(server) if state else "")


def _state(server: int, since: str) -> str:
    """Return `state_of`, or "?" while the system cannot tell it."""
    try:
        return state_of(server, since)
    except OSError:
        return "?"


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
