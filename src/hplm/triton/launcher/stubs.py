"""Stubs, the processes in which Triton runs Python models: one that dies stays dead until its model is loaded again."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

from hplm.errors import StartError
from hplm.runtime.process import stat_of
from hplm.triton.launcher.server import DIRECT, TritonServer

STUB = "triton_python_backend_stub"
# Loading reads tables and verifies them; unloading waits for requests under way.
LOAD_TIMEOUT_S = 3600.0
# Of why Triton refuses.
MOST_SAID = 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# Who lives so long does not die of being loaded.
SETTLED_S = 30.0


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


@dataclass(frozen=True)
class _Pause:
    """After a model was loaded, or could not be, until it may be again."""

    from_s: float
    length_s: float


class StubKeeper:
    """Loads a model again when its stub has died: out of memory, by a fault in a library, by an operator's hand.

    Triton itself goes on saying that such a model is ready, and refuses its requests for ever.
    """

    def __init__(
        self,
        server: TritonServer,
        is_over: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of a server whose models have just become ready.

        `is_over` is asked again and again while a model loads, for as long as LOAD_TIMEOUT_S: whether to wait no longer.
        """
        self._server = server
        self._is_over = is_over
        self._stubs = stubs_of(server.process.pid)
        self._models = set(self._stubs.values())
        # By model: one that cannot be loaded keeps no other waiting.
        self._pauses: dict[str, _Pause] = {}
        self._clock = clock

    def look(self) -> list[str]:
        """Load the models again whose stubs have died; returns what there is to say about it.

        What cannot be loaded, or dies soon after, is tried again after pauses that double. Where Triton itself has ended there
        is nothing to load: its stubs end with it.
        """
        # A model that was loaded again and died at once has no stub that we ever saw.
        dead = self._models - set(self._stubs.values())
        dead |= {model for pid, model in self._stubs.items() if _state_and_parent(pid)[0] in "ZX"}
        now_s = self._clock()
        self._pauses = {
            model: pause for model, pause in self._pauses.items() if model in dead or now_s < pause.from_s + SETTLED_S
        }
        due = [model for model in sorted(dead) if self._may_load(model, now_s)]
        if not due or self._server.ends():
            return []
        said: list[str] = []
        for model in due:
            last = self._pauses.get(model)
            pause_s = min(2 * last.length_s, LONGEST_PAUSE_S) if last else FIRST_PAUSE_S
            try:
                if not (self._ask(model, "unload") and self._ask(model, "load")):
                    return said
                self._server.hide_texts()
                said.append(f"The stub of model {model} had died; the model is loaded again.")
                # The others' stubs stay known: who dies meanwhile is met at the next look.
                known = {pid: other for pid, other in self._stubs.items() if other != model}
                self._stubs = stubs_of(self._server.process.pid) | known
            except StartError as error:
                # It may have been loaded all the same, by a load that took longer than it was waited for.
                self._stubs = {pid: name for pid, name in self._stubs.items() if name != model} | {
                    pid: name for pid, name in stubs_of(self._server.process.pid).items() if name == model
                }
                said.append(f"{error}; trying again in {pause_s:.0f} s")
            self._pauses[model] = _Pause(self._clock(), pause_s)
        return said

    def _may_load(self, model: str, now_s: float) -> bool:
        pause = self._pauses.get(model)
        return pause is None or now_s >= pause.from_s + pause.length_s

    def _ask(self, model: str, step: str) -> bool:
        """False where it is over with Triton meanwhile. Raises StartError where it refuses."""
        url = f"{self._server.ports.http_url}/v2/repository/models/{model}/{step}"
        failed: list[OSError] = []
        why: list[str] = []

        def ask() -> None:
            try:
                DIRECT.open(urllib.request.Request(url, data=b"{}"), timeout=LOAD_TIMEOUT_S).close()
            except OSError as error:
                failed.append(error)
                if isinstance(error, HTTPError):
                    with error:
                        why.append(error.read(MOST_SAID).decode(errors="replace"))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        # When Triton is killed while it starts a stub, the stub lives on, and our connection with it.
        while asking.is_alive():
            if self._is_over():
                return False
            asking.join(0.1)
        if failed and not self._server.ends():
            said = " ".join([str(failed[0]), *why])
            raise StartError(f"the stub of model {model} has died and Triton cannot {step} it: {said}")
        return not failed


def _state_and_parent(pid: int) -> tuple[str, int]:
    """As the system tells it; `X` where there is no such process."""
    try:
        state, parent = stat_of(pid)[:2]
    except OSError:
        return "X", 0
    return state, int(parent)
