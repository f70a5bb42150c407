"""A process of `hplm serve` as an operator runs it. A benchmark can kill the process and start it again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hplm.errors import StartError
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.runtime.process import ENDED, stat_of, state_of
from hplm.triton.launcher.ports import Ports, free_ports
from hplm.triton.workarounds.dead_stubs import stubs_over

# Seconds that a server may take to be ready or to end.
START_S, END_S = 300.0, 60.0
LOOK_EVERY_S = 0.05


@dataclass
class ServeProcess:
    """`hplm serve` without a worker over a repository. Output and logs are files in `folder`. `flags` are further options."""

    models: Path
    folder: Path
    flags: Sequence[str] = ()
    ports: Ports = field(default_factory=free_ports)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and return when every model answers. Raises StartError, with what the server says."""
        command = [sys.executable, "-m", "hplm_cli", "serve", "--models", str(self.models.absolute()), "--no-worker"]
        command += [f"--{name}-port={getattr(self.ports, name)}" for name in ("http", "grpc", "metrics", "health")]
        command += [f"--log={self.folder}/triton.log", *self.flags]
        output = self.folder / "serve.log"
        with output.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            await_condition(lambda: self.is_ready, START_S, "`hplm serve` to be ready")
        except StartError as error:
            raise StartError(f"{error}; it says:\n{output.read_text(errors='replace')}") from None

    def stop(self) -> None:
        """End the server with SIGTERM, with SIGKILL if that does not end it."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End `hplm serve` with SIGKILL, and return when its Triton and its stubs have ended too."""
        assert self.process is not None
        stubs = [pid for pids in stubs_over(self.models).values() for pid in pids]
        tritons = [int(stat_of(pid)[1]) for pid in stubs[:1]]
        self.process.kill()
        self.process.wait()
        await_condition(lambda: all(state_of(pid) in ENDED for pid in (*tritons, *stubs)), END_S, "Triton to end")

    @property
    def is_ready(self) -> bool:
        """Whether every model answers, by the endpoint of `hplm serve`. Raises StartError if the process has ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise StartError(f"`hplm serve` has ended with status {self.process.returncode}")
        try:
            with LOCAL_HTTP.open(f"{self.ports.health_url}/ready", timeout=10.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def process_of(self, model: str) -> int:
        """Return the process of a model, or that of Triton, its parent, if `model` is "Triton"."""
        stubs = stubs_over(self.models)
        if model != "Triton":
            return stubs[model][0]
        return int(stat_of(next(iter(stubs.values()))[0])[1])


@contextmanager
def serving(models: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[ServeProcess]:
    """Run `hplm serve` on free ports until the block ends. Raises StartError."""
    served = ServeProcess(models, folder, flags)
    try:
        served.start()
        yield served
    finally:
        served.stop()


def await_condition(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Return when `condition()` is true. Raises StartError after `within_s` seconds."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise StartError(f"waited {within_s:.0f} s for {what}")
        time.sleep(LOOK_EVERY_S)
