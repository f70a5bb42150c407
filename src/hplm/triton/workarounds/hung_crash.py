"""A Triton that has crashed may hang instead of ending.

Behaviour: the handler of a fatal signal allocates memory to print where the server was. If the memory is damaged, the
handler waits for ever. The server still says that it is ready, and answers no request.
Workaround: the log is watched for the line that the handler writes first. If the server then neither ends nor answers, it
is killed.
Switched off: harmless; nothing happens without a crash.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from hplm.core import wire
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.triton.workarounds.running_server import RunningServer

# Seconds that a crashed Triton may take to end, and to answer a request.
CRASH_ENDS_S, ANSWERS_S = 5.0, 10.0
# Bytes of the log that one look reads: a Triton that may open no more files writes a million lines a second.
MOST_READ_BYTES = 4 << 20
# The first line about a signal that ends Triton. Signals 2 and 15 ask it to stop.
_CRASH = re.compile(rb"^Signal \((?!2\)|15\))\d+\) received\.", re.MULTILINE)
# Bytes of an unfinished line that are kept for the next look; the pattern above is shorter.
_MOST_KEPT_BYTES = 64


class CrashLog:
    """Triton's log, read as it grows: does it say that a signal ends the server?"""

    def __init__(self, log: Path | None) -> None:
        """`log` is None if the log is no file that can be read, such as /dev/stdout."""
        self._log = log
        self._read_bytes = 0
        self._unfinished_line = b""
        self._says_crash = False

    def says_crash(self) -> bool:
        """Read what is new and return whether the log has a crash by now."""
        if self._log is None or self._says_crash:
            return self._says_crash
        with suppress(OSError), self._log.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read_bytes:
                # A log rotation has cut the file.
                self._read_bytes, self._unfinished_line = 0, b""
            file.seek(self._read_bytes)
            new = file.read(MOST_READ_BYTES)
            self._read_bytes += len(new)
            lines = self._unfinished_line + new
            self._says_crash = _CRASH.search(lines) is not None
            self._unfinished_line = lines[lines.rfind(b"\n") + 1 :][:_MOST_KEPT_BYTES]
        return self._says_crash


class HangWatch:
    """Sees when a server has ended, and kills a server that has crashed and hangs."""

    def __init__(self, server: RunningServer, log: Path | None) -> None:
        """`log` as in `CrashLog`."""
        self._server, self._log = server, CrashLog(log)
        self.has_hung = False

    def is_over(self) -> bool:
        """Return whether the server has ended, or hung and was killed now."""
        if self.has_hung or self._server.has_ended:
            return True
        if self._log.says_crash() and not self._server.ends(CRASH_ENDS_S) and not self._answers():
            self.has_hung = True
            with suppress(ProcessLookupError):
                os.kill(self._server.process.pid, signal.SIGKILL)
        return self.has_hung

    def _answers(self) -> bool:
        """Return whether the server answers a request, also with an error, or is writing a core dump."""
        inputs = [
            {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [""]} for name in (wire.TEXT, wire.TENANT)
        ]
        request = urllib.request.Request(
            f"{self._server.ports.http_url}/v2/models/{wire.MODEL}/infer",
            json.dumps({"inputs": inputs}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with LOCAL_HTTP.open(request, timeout=ANSWERS_S):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            with suppress(OSError):
                return "CoreDumping:\t1" in Path(f"/proc/{self._server.process.pid}/status").read_text()
            return False
