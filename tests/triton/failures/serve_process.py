"""`hplm serve` as an operator runs it, with its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hplm_client import Client

from hplm.errors import ServerError
from hplm.triton.launcher.ports import Ports
from hplm.triton.workarounds.dead_stubs import stubs_of
from tests.waiting import until
from tests.watching import runs

SOON_S = 60.0
# Seconds for a start on a busy machine.
START_S = 200.0


def children(parent: int) -> dict[int, str]:
    """Process id -> command line, of those that still run."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,stat=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )
    rows = (line.split(None, 2) for line in listed.stdout.splitlines())
    return {int(pid): command for pid, state, command in rows if not state.startswith("Z")}


@dataclass
class Service:
    """`hplm serve` with further `flags`, under something that starts it again."""

    models: Path
    ports: Ports
    flags: Sequence[str] = ()
    process: subprocess.Popen[bytes] = field(init=False)

    def launch(self) -> None:
        ports = [f"--{name}-port={getattr(self.ports, name)}" for name in ("http", "grpc", "metrics", "health")]
        command = [sys.executable, "-m", "hplm_cli", "serve", "--models", str(self.models), *ports, *self.flags]
        with (self.models.parent / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> None:
        """Return when it serves."""
        self.launch()
        until(lambda: self.pid("worker") is not None, START_S)

    def said(self) -> str:
        """Return what it has printed so far."""
        return (self.models.parent / "serve.log").read_text()

    def health(self, path: str = "ready") -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of the health endpoint."""
        try:
            with urllib.request.urlopen(f"{self.ports.health_url}/{path}", timeout=SOON_S) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def await_ready(self) -> None:
        """Return when the health endpoint says that every model answers."""
        answer: dict[str, Any] = {}

        def is_ready() -> bool:
            nonlocal answer
            status, answer = self.health()
            return status == 200

        try:
            until(is_ready)
        except AssertionError:
            raise AssertionError(answer) from None

    def await_answers(self, tenant: str = "alpha") -> None:
        """Return when a tenant answers, as soon as the server does after a start."""

        def answers() -> bool:
            assert self.process.poll() is None, self.said()
            with suppress(ServerError), Client(self.ports.grpc_url, timeout_s=5.0) as client:
                return client.predict(tenant, "the red cat").label is not None
            return False

        until(answers, START_S)

    def pid(self, what: str) -> int | None:
        """Of `serve`, of its child `triton`, `worker` or `reaper`, or of the stub of a model."""
        if what == "serve":
            return self.process.pid
        commands = {
            "triton": "bin/tritonserver ",
            "worker": "hplm_cli worker ",
            "reaper": "hplm.triton.workarounds.surviving_stubs ",
        }
        for child, command in children(self.process.pid).items():
            if what in commands and commands[what] in command:
                return child
            if what not in commands and commands["triton"] in command:
                return next((stub for stub, model in stubs_of(child).items() if model == what), None)
        return None

    def kill(self, what: str, await_moment: Callable[[], None]) -> None:
        """And start what starts nothing again by itself: when `serve` ends, whoever runs it starts it again."""
        until(lambda: self.pid(what) is not None)
        pid = self.pid(what)
        assert pid is not None
        everything = {pid for child in children(self.process.pid) for pid in (child, *children(child))}
        stubs = stubs_of(pid)
        await_moment()
        os.kill(pid, signal.SIGKILL)
        if what == "serve":
            assert self.process.wait(SOON_S) == -signal.SIGKILL
            # Nobody is left who holds the ports, a job or memory.
            until(lambda: not any(runs(one) for one in everything))
            self.start()
        else:
            # Killed while it held a lock that Triton shares with it, a stub takes Triton along, which is started again too.
            until(lambda: not runs(pid) and self.pid(what) not in (None, pid), START_S)
            assert self.process.poll() is None, self.said()
            until(lambda: not any(runs(stub) for stub in stubs))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(SOON_S) == 0
