"""A child process that is started again whenever it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hplm.runtime.restart_pauses import RestartPauses

# Seconds for a killed child to end.
KILLED_S = 5.0


class Supervisor:
    """Runs a command and starts it again whenever it ends. The pauses double while it keeps ending soon.

    The child's output is appended to `log`, and `environment` is added to this process's environment. The child has its own
    session, so that Ctrl-C in the terminal does not reach it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 60.0,
    ) -> None:
        self._command, self._log = list(command), log
        self._environment = {**os.environ, **(environment or {})}
        self._pauses = RestartPauses(first_pause_s, longest_pause_s)
        self._changing = threading.Condition()
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        # One thread starts every child, because a child that is tied to its parent dies with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the child to end, kill it if it does not end in time, and start no other. Safe to call twice."""
        with self._changing:
            self._stopping = True
            self._changing.notify_all()
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)
        self._thread.join(timeout_s)
        with self._changing:
            if self._process is not None:
                self._process.kill()
        # A child that waits for a disk that is gone may outlive even this.
        self._thread.join(KILLED_S)

    def _keep(self) -> None:
        while True:
            began_s = time.monotonic()
            self._run()
            pause_s = self._pauses.after(time.monotonic() - began_s)
            with self._changing:
                if self._changing.wait_for(lambda: self._stopping, pause_s):
                    return

    def _run(self) -> None:
        """Start a child process and wait for its end."""
        with self._changing:
            if self._stopping:
                return
            try:
                with self._log.open("ab") as log:
                    process = subprocess.Popen(
                        self._command,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        # Python puts the working directory first on sys.path, and other users may write to the present one.
                        cwd="/",
                    )
            except OSError as error:  # no memory, or no room for the log: treated as a child that ended at once
                logging.getLogger(__name__).warning("%s cannot be started: %s", self._command[0], error)
                return
            self._process = process
        status = process.wait()
        with self._changing:
            self._process = None
            if self._stopping:
                return
        reason = f"killed by signal {-status}" if status < 0 else f"status {status}"
        logging.getLogger(__name__).warning(
            "the process that writes %s has ended (%s) and is started again", self._log, reason
        )
