"""Triton does not restart a stub (the process of a Python model) that died.

Behaviour: after the death of a stub, every request of its model fails, and the model still says that it is ready. Only
unloading and loading the model starts a new stub.
Releases: 24.10; no release that mends it was seen. From 25.12 on, the model says that it is not ready.
Workaround: `StubKeeper` looks for dead stubs and loads their models again.
Switched off: if Triton has started a new stub itself, the model is not loaded again.
"""

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
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.runtime.process import stat_of
from hplm.triton.workarounds.running_server import RunningServer

STUB = "triton_python_backend_stub"
# Seconds for one load or unload: a load reads and verifies tables, an unload waits for running requests.
LOAD_TIMEOUT_S = 3600.0
# Characters of Triton's reason that an error repeats.
MOST_REASON = 1000
# Seconds between two loads of a model whose stub keeps dying; the pause doubles.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# A stub that lives so long did not die of being loaded: the pauses start anew.
SETTLED_S = 30.0


def stubs_of(triton: int) -> dict[int, str]:
    """Return the stubs of a Triton process: process id -> model."""
    stubs = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or _state_and_parent(int(folder.name))[1] != triton:
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # STUB <repository>/<model>/<version>/model.py ...
        if Path(os.fsdecode(command[0])).name == STUB:
            stubs[int(folder.name)] = Path(os.fsdecode(command[1])).parts[-3]
    return stubs


@dataclass(frozen=True)
class _Pause:
    """The time from a load of a model, or a failed load, until it may be loaded again."""

    from_s: float
    length_s: float


class StubKeeper:
    """Loads a model again when its stub has died, whatever killed it."""

    def __init__(
        self,
        server: RunningServer,
        is_over: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a server whose models have just become ready.

        `is_over` says whether the server has ended. It is called again and again during a load, which may take
        LOAD_TIMEOUT_S.
        """
        self._server = server
        self._is_over = is_over
        self._stubs = stubs_of(server.process.pid)
        self._models = set(self._stubs.values())
        # By model, so that a model that cannot be loaded does not delay another.
        self._pauses: dict[str, _Pause] = {}
        self._clock = clock

    def look(self) -> list[str]:
        """Load models again whose stubs have died, and return messages about it.

        A model that cannot be loaded, or whose stub dies soon after, is tried again after pauses that double. If Triton
        itself has ended, nothing is loaded, because its stubs end with it.
        """
        # A model whose new stub died at once has no stub that was ever seen.
        dead = self._models - set(self._stubs.values())
        dead |= {model for pid, model in self._stubs.items() if _state_and_parent(pid)[0] in "ZX"}
        now_s = self._clock()
        self._pauses = {
            model: pause for model, pause in self._pauses.items() if model in dead or now_s < pause.from_s + SETTLED_S
        }
        due = [model for model in sorted(dead) if self._may_load(model, now_s)]
        if not due or self._server.ends():
            return []
        messages: list[str] = []
        for model in due:
            if self._stubs_of(model).keys() <= self._stubs.keys():
                last = self._pauses.get(model)
                pause_s = min(2 * last.length_s, LONGEST_PAUSE_S) if last else FIRST_PAUSE_S
                try:
                    if not (self._request(model, "unload") and self._request(model, "load")):
                        return messages
                    messages.append(f"The stub of model {model} had died; the model is loaded again.")
                except StartError as error:
                    # The model may be loaded all the same, by a load that took longer than the timeout.
                    messages.append(f"{error}; trying again in {pause_s:.0f} s")
                self._pauses[model] = _Pause(self._clock(), pause_s)
            # Otherwise somebody else has loaded the model.
            self._server.hide_texts()
            # Stubs of other models stay as they were known: the next look sees which of them died.
            known = {pid: other for pid, other in self._stubs.items() if other != model}
            self._stubs = known | self._stubs_of(model)
        return messages

    def _may_load(self, model: str, now_s: float) -> bool:
        pause = self._pauses.get(model)
        return pause is None or now_s >= pause.from_s + pause.length_s

    def _stubs_of(self, model: str) -> dict[int, str]:
        """Return the present stubs of a model."""
        return {pid: other for pid, other in stubs_of(self._server.process.pid).items() if other == model}

    def _request(self, model: str, step: str) -> bool:
        """Have Triton load or unload a model. Return False if Triton has ended meanwhile; raise StartError if it refuses."""
        url = f"{self._server.ports.http_url}/v2/repository/models/{model}/{step}"
        errors: list[OSError] = []
        reasons: list[str] = []

        def post() -> None:
            try:
                LOCAL_HTTP.open(urllib.request.Request(url, data=b"{}"), timeout=LOAD_TIMEOUT_S).close()
            except OSError as error:
                errors.append(error)
                if isinstance(error, HTTPError):
                    with error:
                        reasons.append(error.read(MOST_REASON).decode(errors="replace"))

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        # If Triton is killed while it starts a stub, the stub lives on and keeps this connection open.
        while thread.is_alive():
            if self._is_over():
                return False
            thread.join(0.1)
        if errors and not self._server.ends():
            reason = " ".join([str(errors[0]), *reasons])
            raise StartError(f"the stub of model {model} has died and Triton cannot {step} the model: {reason}")
        return not errors


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state and parent; the state is "X" if there is no such process."""
    try:
        state, parent = stat_of(pid)[:2]
    except OSError:
        return "X", 0
    return state, int(parent)
