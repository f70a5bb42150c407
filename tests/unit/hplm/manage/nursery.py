"""A process that has imported everything and forks a child for each command: dying costs milliseconds, not an import.

`python -m tests.unit.hplm.manage.nursery` reads a JSON object a line and answers with the child's exit status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hplm_cli

ROOT = Path(__file__).parents[4]


class Nursery:
    """The other end: children that work on a store or ask its manager, and die where they are told to; `killed` of them did."""

    def __init__(self) -> None:
        self.killed = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def work(
        self, store: Path, crash_at: str | None = None, later_s: float = 0.0, *, kill_after_s: float | None = None
    ) -> int:
        """A worker does all there is to do, and is killed after a while where one is given; its exit status."""
        return self._run(store=str(store), crash_at=crash_at, later_s=later_s, kill_after_s=kill_after_s)

    def ask(
        self, store: Path, crash_at: str | None = None, *, kill_after_s: float | None = None, **request: Any
    ) -> int:
        """The manager answers a request, and is killed as a worker is; its exit status."""
        return self._run(store=str(store), crash_at=crash_at, request=request, kill_after_s=kill_after_s)

    def build(self, store: Path, change: str, crash_at: str | None = None, *, kill_after_s: float | None = None) -> int:
        """A command builds a tenant or domain, see `making.build`, and may be killed as a worker is; its exit status."""
        return self._run(store=str(store), crash_at=crash_at, change=change, kill_after_s=kill_after_s)

    def run(self, arguments: list[str], output: Path, stop_at: int | None = None) -> int:
        """The program `hplm` runs, or without arguments a worker on the store `output.parent / "store"`; its exit status.

        All that it says goes to the file `output`. It gets SIGTERM at the training step `stop_at`.
        """
        return self._run(
            store=str(output.parent / "store"), arguments=arguments, output=str(output), stop_at=stop_at, crash_at=None
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _run(self, **command: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        # At a crash point, or by a signal.
        self.killed += status in (128 + signal.SIGKILL, -signal.SIGKILL)
        return status


def _child(command: dict[str, Any]) -> None:
    from hplm.runtime.crash_points import CRASH_AT, STOP_AT
    from hplm.store.layout import Store
    from tests.unit.hplm.manage import making

    if "output" in command:
        handle = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if command["stop_at"] is not None:
            os.environ[STOP_AT] = str(command["stop_at"])
    if command["crash_at"] is not None:
        os.environ[CRASH_AT] = command["crash_at"]
    store = Store(Path(command["store"]))
    if command.get("arguments"):
        sys.argv = ["hplm", *command["arguments"]]
        hplm_cli.main()
    elif "request" in command:
        making.ask(making.make_service(store), **command["request"])
    elif "change" in command:
        os.environ["HPLM_CACHE"] = str(store.root.parent / "cache")
        making.build(store, command["change"])
    else:
        making.work(store, command.get("later_s", 0.0), ends_on_sigterm="output" in command)


def main() -> None:
    import torch
    from hplm_builder.cli import build, evaluate
    from hplm_builder.jobs.handlers import load_handlers

    from tests.unit.hplm.manage import making

    assert load_handlers()
    assert build.app
    assert evaluate.app
    assert making
    torch.set_num_threads(1)
    # The first step of an optimiser imports hundreds of modules.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).step()
    for line in sys.stdin:
        command = json.loads(line)
        if (child := os.fork()) == 0:
            try:
                _child(command)
                os._exit(0)
            except SystemExit as ended:
                os._exit(ended.code if isinstance(ended.code, int) else 0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if (kill_after_s := command.get("kill_after_s")) is not None:
            time.sleep(kill_after_s)
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
