"""Triton's log: one a server, those of the last ones beside it."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.errors import StartError

# A server that is started again and again must not lose what the first one said.
KEPT = 5
# A Triton whose launcher was killed takes a moment to end.
FREE_WITHIN_S = 6.0
# A Triton that may open no more files says so a million times a second.
MOST_READ = 4 << 20
# Every start without a GPU says these.
USUAL = ("CudaDriverHelper", "CUDA driver version is insufficient", "Failed to initialize NVML")
SHOWN_LINES = 12
# What Triton says first of a signal that ends it. By 2 and 15 it is asked to stop.
_CRASH = re.compile(rb"^Signal \((?!2\)|15\))\d+\) received\.", re.MULTILINE)
_LONGEST_MARK = 64


def fresh(log: Path) -> IO[bytes]:
    """An empty log, locked while it or a copy of it is open; what the last servers wrote, which may say why they ended, stays
    beside it as `NAME.1` and so on. A device or a pipe is only opened.

    Raises StartError where another server writes it, or it cannot be written.
    """
    try:
        if log.exists() and not is_plain(log):
            return log.open("ab")
        # To be appended to, so that it may be cut short while it is written.
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
    """Whether it is a file that may be renamed; /dev/stdout may lead to one."""
    return log.is_file() and not {Path("/dev"), Path("/proc")}.intersection(log.absolute().parents)


def _locked(log: Path) -> IO[bytes]:
    """The file, ours alone as far as its file system has such locks."""
    file = log.open("ab")
    until_s = time.monotonic() + FREE_WITHIN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                file.close()
                raise StartError(f"another server writes {log}: stop it, or give this one another with --log") from None
            time.sleep(0.1)
            continue
        except OSError:
            return file
        if log.exists() and os.path.samestat(os.fstat(file.fileno()), log.stat()):
            return file
        # Whoever had it before us has put it aside meanwhile.
        file.close()
        file = log.open("ab")


def set_apart(log: Path) -> Path:
    """Rename the log of a start that failed: many of them must not push out what servers that served have said."""
    with suppress(OSError):
        if is_plain(log):
            return log.replace(log.with_name(f"{log.name}.failed"))
    return log


def errors_in(log: Path) -> str:
    """The lines that say why a start failed, as far as one can tell."""
    if not log.is_file():
        return ""
    with log.open(errors="replace") as file:
        lines = file.read(MOST_READ).splitlines()
    # After it come pages of help.
    unknown = [line for line in lines if "unrecognized option" in line or "requires an argument" in line]
    lines = [line for line in lines if not any(usual in line for usual in USUAL)]
    marks = ("Error:", "[err]", "[warn]")
    errors = [line for line in lines if line.startswith("E") or any(mark in line for mark in marks)]
    return "\n".join([*dict.fromkeys(unknown or errors or lines)][-SHOWN_LINES:])


class CrashWatch:
    """Looks into Triton's log as it grows: has it met a signal that ends it?

    It may not end: it asks for memory to tell where it was, and where that is damaged it waits for ever, says that it is ready,
    and answers nobody (seen on 24.10).
    """

    def __init__(self, log: Path | None) -> None:
        """Nothing can be seen in one that is no file, as /dev/stdout."""
        self._log = log if log is not None and is_plain(log) else None
        self._read_bytes = 0
        self._end = b""
        self._has_crashed = False

    def has_crashed(self) -> bool:
        """Whether the log says so by now."""
        if self._log is None or self._has_crashed:
            return self._has_crashed
        with suppress(OSError), self._log.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read_bytes:
                # Cut short by whoever rotates logs.
                self._read_bytes, self._end = 0, b""
            file.seek(self._read_bytes)
            new = file.read(MOST_READ)
            self._read_bytes += len(new)
            said = self._end + new
            self._has_crashed = _CRASH.search(said) is not None
            # As the line begins that has no end yet.
            self._end = said[said.rfind(b"\n") + 1 :][:_LONGEST_MARK]
        return self._has_crashed
