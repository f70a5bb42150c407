"""Triton's log: one file a server, and beside it the logs of the last servers."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.core import wire
from hplm.errors import StartError

# Logs of earlier servers that stay, so that restarts do not lose what the first server wrote.
KEPT = 5
# Seconds to wait for the lock: a Triton whose launcher was killed takes a moment to end.
FREE_WITHIN_S = 6.0
# Bytes of a log that are read: a Triton that may open no more files writes a million lines a second.
MOST_READ_BYTES = 4 << 20
# Words of errors that every start without a GPU logs.
USUAL = ("CudaDriverHelper", "CUDA driver version is insufficient", "Failed to initialize NVML")
# Lines of the log that an error repeats.
SHOWN_LINES = 12
# Words of errors about a stub (the process of a Python model) that was killed or crashed while its model was loaded. Triton
# 24.10 also loses the lock that it shares with a stub.
LOST_STUB = re.compile(f"{wire.DEAD_STUB.pattern}|lock_exception")


def fresh(log: Path) -> IO[bytes]:
    """Open an empty log, locked while it or a copy of its descriptor is open.

    The logs of the last servers, which may say why they ended, stay beside it as `NAME.1` and so on. A device or a pipe is
    only opened. Raises StartError if another server writes the log, or if it cannot be written.
    """
    try:
        if log.exists() and not is_plain(log):
            return log.open("ab")
        # Opened for appending, so that a log rotation may cut the file while Triton writes.
        file = _locked(log)
        if os.fstat(file.fileno()).st_size:
            with file:
                for number in range(KEPT, 0, -1):
                    before = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
                    if before.is_file():
                        before.replace(log.with_name(f"{log.name}.{number}"))
                file = _locked(log)
    except OSError as error:
        raise StartError(
            f"Triton's log {log} cannot be written: {error.strerror}; choose another place with --log"
        ) from error
    return file


def is_plain(log: Path) -> bool:
    """Return whether the log is a file that may be renamed. A name such as /dev/stdout may lead to a file, too."""
    return log.is_file() and not {Path("/dev"), Path("/proc")}.intersection(log.absolute().parents)


def _locked(log: Path) -> IO[bytes]:
    """Open the log and lock it, if its file system has locks. Raises StartError if another server keeps the lock."""
    file = log.open("ab")
    until_s = time.monotonic() + FREE_WITHIN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                file.close()
                raise StartError(
                    f"another server writes {log}: stop that server, or choose another log with --log"
                ) from None
            time.sleep(0.1)
            continue
        except OSError:
            return file
        if log.exists() and os.path.samestat(os.fstat(file.fileno()), log.stat()):
            return file
        # The server that had the lock has renamed the file meanwhile.
        file.close()
        file = log.open("ab")


def set_apart(log: Path) -> Path:
    """Rename the log of a failed start, so that many failed starts do not push out logs of servers that ran."""
    with suppress(OSError):
        if is_plain(log):
            return log.replace(log.with_name(f"{log.name}.failed"))
    return log


def errors_in(log: Path) -> str:
    """Return the lines of a log that probably say why a start failed."""
    if not log.is_file():
        return ""
    with log.open(errors="replace") as file:
        lines = file.read(MOST_READ_BYTES).splitlines()
    # After an unknown option Triton prints pages of help.
    unknown = [line for line in lines if "unrecognized option" in line or "requires an argument" in line]
    lines = [line for line in lines if not any(usual in line for usual in USUAL)]
    marks = ("Error:", "[err]", "[warn]")
    errors = [line for line in lines if line.startswith("E") or any(mark in line for mark in marks)]
    return "\n".join([*dict.fromkeys(unknown or errors or lines)][-SHOWN_LINES:])
