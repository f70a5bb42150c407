"""Triton does not restart a stub (the process of a Python model) that died.

Behaviour: after the death of a stub, every request of its model fails, and the model still says that it is ready. Only
unloading and loading the model starts a new stub. Triton also waits without end for the first message of a new stub, also if
the new stub has died.
Releases: 24.10; no release that mends it was seen. From 25.12 on, the model says that it is not ready.
Workaround: `StubKeeper` looks for dead stubs and loads their models again. A Triton that does not reap a new stub for LOST_S
seconds is killed, by `StubKeeper` or while it starts; `hplm serve` starts it again.
Switched off: if Triton has started a new stub itself, the model is not loaded again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import StartError
from hplm.runtime.process import stat_of
from hplm.runtime.unreaped import UnreapedChildren
from hplm.triton.workarounds.running_server import ModelStep, RunningServer, ask_triton

STUB = "triton_python_backend_stub"
# What brings a dead stub back.
STEPS: tuple[ModelStep, ...] = ("unload", "load")
# Seconds between two loads of a model whose stub keeps dying; the pause doubles.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# A stub that lives so long did not die of being loaded: the pauses start anew.
SETTLED_S = 30.0
# Seconds that Triton may take to reap a new stub that has died. It notices any other death of a new stub within about a second.
LOST_S = 5.0


def stubs_of(triton: int) -> dict[int, str]:
    """Return the stubs of a Triton process: process id -> model."""
    return {pid: folder.name for pid, folder in _stubs() if _state_and_parent(pid)[1] == triton}


def stubs_over(repository: Path) -> dict[str, list[int]]:
    """Return the stubs of every Triton on this machine that serves a repository: model -> process ids."""
    processes: dict[str, list[int]] = {}
    for pid, folder in _stubs():
        # A server may name the repository by a link.
        if folder.parent.resolve() == repository.resolve():
            processes.setdefault(folder.name, []).append(pid)
    return processes


def _stubs() -> Iterator[tuple[int, Path]]:
    """Yield each stub on this machine and the folder of its model."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            program, script, *_ = (*(folder / "cmdline").read_bytes().split(b"\0"), b"")
        except OSError:
            continue
        # STUB <repository>/<model>/<version>/model.py ...
        path = Path(os.fsdecode(script))
        if Path(os.fsdecode(program)).name == STUB and len(path.parts) > 2:
            yield int(folder.name), path.parents[1]


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
        `running_server.LOAD_TIMEOUT_S`.
        """
        self._server = server
        self._is_over = is_over
        self._stubs = stubs_of(server.process.pid)
        self._models = set(self._stubs.values())
        # By model, so that a model that cannot be loaded does not delay another.
        self._pauses: dict[str, _Pause] = {}
        self._clock = clock

    def watch(self, models: Collection[str]) -> None:
        """Look after the stubs of further models, which have just been loaded."""
        now = stubs_of(self._server.process.pid)
        # New objects, because `dead_models` may read the old ones in another thread.
        self._stubs = self._stubs | {pid: model for pid, model in now.items() if model in models}
        self._models = self._models | set(self._stubs.values()).intersection(models)

    def forget(self, models: Collection[str]) -> None:
        """Look after the stubs of these models no longer, because the models are going to be unloaded."""
        self._models = self._models - set(models)
        self._stubs = {pid: model for pid, model in self._stubs.items() if model not in models}

    def dead_models(self) -> set[str]:
        """Return the models of which a stub has died. Any thread may ask."""
        # A model whose new stub died at once has no stub that was ever seen.
        dead = self._models - set(self._stubs.values())
        return dead | {model for pid, model in self._stubs.items() if _state_and_parent(pid)[0] in "ZX"}

    def look(self) -> list[str]:
        """Load models again whose stubs have died, and return messages about it.

        A model that cannot be loaded, or whose stub dies soon after, is tried again after pauses that double. If Triton
        itself has ended, nothing is loaded, because its stubs end with it.
        """
        dead = self.dead_models()
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
                unreaped = UnreapedChildren(self._server.process.pid, LOST_S)
                try:
                    if not all(self._ask(model, step, unreaped) for step in STEPS):
                        if unreaped.are_left():
                            self._server.process.kill()
                            messages.append(
                                f"Triton waits for a new stub of model {model} that has died: Triton is ended"
                            )
                        return messages
                    messages.append(f"The stub of model {model} had died; the model is loaded again.")
                except StartError as error:
                    # The model may be loaded all the same, by a load that took longer than the timeout.
                    messages.append(f"the stub of model {model} has died: {error}; trying again in {pause_s:.0f} s")
                self._pauses[model] = _Pause(self._clock(), pause_s)
            # Otherwise somebody else has loaded the model.
            self._server.hide_texts()
            # Stubs of other models stay as they were known: the next look sees which of them died.
            known = {pid: other for pid, other in self._stubs.items() if other != model}
            self._stubs = known | self._stubs_of(model)
        return messages

    def _ask(self, model: str, step: ModelStep, unreaped: UnreapedChildren) -> bool:
        return ask_triton(self._server, model, step, lambda: self._is_over() or unreaped.are_left())

    def _may_load(self, model: str, now_s: float) -> bool:
        pause = self._pauses.get(model)
        return pause is None or now_s >= pause.from_s + pause.length_s

    def _stubs_of(self, model: str) -> dict[int, str]:
        """Return the present stubs of a model."""
        return {pid: other for pid, other in stubs_of(self._server.process.pid).items() if other == model}


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state and parent; the state is "X" if there is no such process."""
    try:
        state, parent = stat_of(pid)[:2]
    except OSError:
        return "X", 0
    return state, int(parent)
