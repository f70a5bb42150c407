"""A Triton that is started again whenever it has ended, together with what watches its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from hplm.core.roles import models_of
from hplm.errors import TritonEndedError
from hplm.runtime.restart_pauses import RestartPauses
from hplm.triton.launcher.base_changes import BaseChanges
from hplm.triton.launcher.child_process import deferred_signals
from hplm.triton.launcher.log_files import is_plain
from hplm.triton.launcher.ports import check_free
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import StubKeeper
from hplm.triton.workarounds.hung_crash import HangWatch

# Starts in a row in which Triton may be killed or crash, before starting is given up.
MOST_LOST_STARTS = 5
# The longest pause before a start, in seconds: as long as Triton may be away if requests end it again and again.
LONGEST_PAUSE_S = 30.0
# "stopped" before the first start, and after the end.
State = Literal["stopped", "starting", "serving", "restarting", "draining"]


class Launch(Protocol):
    """Starts a Triton over the repository, as `TritonServer` does with these arguments. Raises StartError."""

    def __call__(self, *, models: Sequence[str] | None, note: str) -> TritonServer: ...


class KeptServer:
    """A Triton that is started again when it was killed, has crashed, or hung after a crash, also while it starts.

    Each Triton has watchers of its own: for its hanging, for its stubs, and for changes of the repository. All methods but
    the properties are for the thread that made the object, because Triton ends with the thread that started it.
    """

    def __init__(
        self, repository: Path, launch: Launch, say: Callable[[str], None], *, start_timeout_s: float = 120.0
    ) -> None:
        """`say` is told when Triton has ended, and when it serves again."""
        self._repository, self._launch, self._say = repository, launch, say
        self._start_timeout_s = start_timeout_s
        self._pauses = RestartPauses(longest_s=LONGEST_PAUSE_S)
        self._state: State = "stopped"
        self._restarts = 0
        self._server: TritonServer | None = None
        self._watch: HangWatch | None = None
        self._stubs: StubKeeper | None = None
        self._changes: BaseChanges | None = None

    @property
    def state(self) -> State:
        """The present state of Triton. Requests are answered while the state is "serving" or "draining"."""
        return self._state

    @property
    def restarts(self) -> int:
        """How often Triton was started again after it had served."""
        return self._restarts

    @property
    def models(self) -> set[str]:
        """The names of the models that are loaded, empty before the first start."""
        return set() if self._server is None else set(self._server.models)

    @property
    def dead_models(self) -> set[str]:
        """The models of which a process has died and is not there again."""
        return set() if self._stubs is None else self._stubs.dead_models()

    def start(self, note: str = "") -> None:
        """Start Triton and wait until it is ready. `note` is a line at the head of its log.

        Raises StartError if a restart cannot mend what is wrong, and TritonEndedError if Triton was killed or has crashed in
        MOST_LOST_STARTS starts in a row.
        """
        self._state = "starting"
        self._start(None, note)
        self._state = "serving"

    def look(self) -> list[str]:
        """Start Triton again if it has ended. Load models again whose stubs have died, and follow the repository.

        Returns messages about what has changed. Raises what `start` raises.
        """
        assert self._server is not None
        assert self._watch is not None
        assert self._stubs is not None
        assert self._changes is not None
        if self._watch.is_over():
            self._restart(self._server, self._server.how_it_ended(was_hung=self._watch.has_hung))
            return []
        messages = [*self._stubs.look(), *self._changes.look()]
        if self._server.renew_reaper():
            messages.append("the process that cleans up after a killed server has ended: starting another")
        return messages

    def drain(self, timeout_s: float, is_cut_short: Callable[[], bool]) -> bool:
        """Refuse new requests and wait for the answers to all others, see `TritonServer.drain`. Call `stop` then."""
        if self._state != "serving" or self._server is None:
            return True
        self._state = "draining"
        return self._server.drain(timeout_s, is_cut_short)

    def stop(self) -> None:
        """End Triton, see `TritonServer.stop`."""
        if self._server is not None:
            self._server.stop()
        self._state = "stopped"

    def _restart(self, ended: TritonServer, how: str) -> None:
        self._state, ended_s = "restarting", time.monotonic()
        pause_s = self._pauses.after(ended.ready_for_s)
        # The next Triton renames the log.
        log = f"; its log is kept as {ended.log_path}.1" if ended.log_path and is_plain(ended.log_path) else ""
        self._say(f"{how}{log}; starting it again in {pause_s:g} s")
        # The models that were served: a base whose files do not load must not keep the others from serving.
        models = [model for model in models_of(self._repository) if model in ended.models]
        with deferred_signals():
            ended.stop()
        time.sleep(pause_s)
        # Otherwise Triton says in many lines that another process has taken its port meanwhile.
        check_free(ended.ports)
        self._start(models or None, f"{how}, and is started again")
        self._restarts += 1
        self._state = "serving"
        self._say(f"Triton serves again, {time.monotonic() - ended_s:.1f} s after its end")

    def _start(self, models: Sequence[str] | None, note: str) -> None:
        for number in range(1, MOST_LOST_STARTS + 1):
            self._server = server = self._launch(models=models, note=note)
            log = server.log_path
            watch = HangWatch(server, log if log is not None and is_plain(log) else None)
            try:
                server.wait_ready(self._start_timeout_s, is_over=watch.is_over)
            except TritonEndedError as error:
                with deferred_signals():
                    server.stop()
                if number == MOST_LOST_STARTS:
                    raise TritonEndedError(f"in {number} starts in a row: {error}") from None
                pause_s = self._pauses.after(0.0)
                self._say(f"{error}\nstarting it again in {pause_s:g} s")
                note = f"{str(error).partition(';')[0]}, and is started again"
                time.sleep(pause_s)
                continue
            self._watch, self._stubs = watch, StubKeeper(server, watch.is_over)
            self._changes = BaseChanges(self._repository, server, self._stubs, watch.is_over)
            return
