"""Stubs, the processes in which Triton runs Python models: one that dies stays dead until its model is loaded again."""

from __future__ import annotations

import os
import threading
import urllib.request
from pathlib import Path

from hplm.errors import StartError
from hplm.triton.server import TritonServer

STUB = "triton_python_backend_stub"
# Loading reads tables and verifies them; unloading waits for requests under way.
LOAD_TIMEOUT_S = 300.0


def stubs_of(triton: int) -> dict[int, str]:
    """The stubs of a Triton process: process id -> model."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or _state_and_parent(int(folder.name))[1] != triton:
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # STUB <repository>/<model>/<version>/model.py ...
        if Path(os.fsdecode(command[0])).name == STUB:
            found[int(folder.name)] = Path(os.fsdecode(command[1])).parts[-3]
    return found


class StubKeeper:
    """Loads a model again when its stub has died: out of memory, by a fault in a library, by an operator's hand.

    Triton itself goes on saying that such a model is ready, and refuses its requests for ever.
    """

    def __init__(self, server: TritonServer) -> None:
        """Of a server whose models are ready."""
        self._server = server
        self._stubs = stubs_of(server.process.pid)

    def look(self) -> list[str]:
        """Load again the models whose stubs have died; returns their names. Raises StartError where that fails.

        Where Triton itself has ended there is nothing to load: its stubs end with it.
        """
        dead = sorted({model for pid, model in self._stubs.items() if _state_and_parent(pid)[0] in "ZX"})
        if not dead or self._server.ends():
            return []
        for model in dead:
            for step in ("unload", "load"):
                if not self._ask(model, step):
                    return []
        self._server.wait_ready()
        self._stubs = stubs_of(self._server.process.pid)
        return dead

    def _ask(self, model: str, step: str) -> bool:
        """False where Triton ends meanwhile. Raises StartError where it refuses."""
        url = f"{self._server.ports.http_url}/v2/repository/models/{model}/{step}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        failed: list[OSError] = []

        def ask() -> None:
            try:
                direct.open(urllib.request.Request(url, data=b"{}"), timeout=LOAD_TIMEOUT_S).close()
            except OSError as error:
                failed.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        # When Triton is killed while it starts a stub, the stub lives on, and our connection with it.
        while asking.is_alive():
            if self._server.ends(0):
                return False
            asking.join(0.1)
        if failed and not self._server.ends():
            raise StartError(f"the stub of model {model} has died and Triton cannot {step} it: {failed[0]}")
        return not failed


def _state_and_parent(pid: int) -> tuple[str, int]:
    """As the system tells it; `X` where there is no such process."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)
