"""A Triton that has ended is started again with the models that it served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from hplm.core.roles import base_roles, models_of, names
from hplm.errors import StartError, TritonEndedError
from hplm.triton.launcher.kept_server import KeptServer
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.launcher.ports import Ports, free_ports
from hplm.triton.launcher.server import TritonServer


@dataclass
class Process:
    pid: int = 0


@dataclass
class SmallTriton:
    """What is asked of a Triton that is kept; `error` is that of its start."""

    models: set[str]
    note: str = ""
    error: StartError | TritonEndedError | None = None
    has_ended: bool = False
    is_stopped: bool = False
    ready_for_s: float = 100.0
    log_path: Path | None = None
    process: Process = field(default_factory=Process)
    ports: Ports = field(default_factory=free_ports)

    def wait_ready(self, _: float, *, is_over: Callable[[], bool]) -> None:
        if self.error is not None:
            raise self.error

    def how_it_ended(self, *, was_hung: bool) -> str:
        return "Triton ended"

    def ends(self, within_s: float = 0.5) -> bool:
        return self.has_ended

    def stop(self) -> int:
        self.is_stopped = True
        return 0

    def renew_reaper(self) -> bool:
        return False

    def hide_texts(self) -> None: ...


class Place:
    """A repository with one base, a KeptServer over it, and the Tritons that the KeptServer has started."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.started: list[SmallTriton] = []
        self.errors: list[StartError | TritonEndedError] = []
        self.said: list[str] = []
        self.add("hbert")
        self.kept = KeptServer(repository, self.launch, self.said.append)

    def add(self, name: str) -> None:
        for role in base_roles(name):
            write_model(self.repository, role, {"registry": ""})

    def launch(self, *, models: Sequence[str] | None, note: str) -> TritonServer:
        error = self.errors.pop(0) if self.errors else None
        self.started.append(SmallTriton(set(models_of(self.repository) if models is None else models), note, error))
        return cast(TritonServer, self.started[-1])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "models")


def test_a_triton_that_has_ended_is_started_again_with_the_models_that_it_served(place: Place) -> None:
    place.kept.start()
    # A base that was added and does not load must not keep the other from serving.
    place.add("broken")
    place.started[0].has_ended = True
    assert place.kept.look() == []
    first, second = place.started
    assert first.is_stopped
    assert second.models == set(names(base_roles("hbert"))) == place.kept.models
    assert second.note == "Triton ended, and is started again"
    assert (place.kept.state, place.kept.restarts) == ("serving", 1)
    assert place.said[0] == "Triton ended; starting it again in 0.5 s"


def test_a_start_that_no_restart_mends_raises_its_error_at_once(place: Place) -> None:
    place.errors = [StartError("the store is damaged")]
    with pytest.raises(StartError, match="the store is damaged"):
        place.kept.start()
    assert len(place.started) == 1
    assert place.kept.state == "starting"


def test_a_triton_that_crashes_while_it_starts_is_started_again(place: Place) -> None:
    place.errors = [
        TritonEndedError("Triton ended while starting, by signal 6 (SIGABRT); the log says: lock_exception")
    ]
    place.kept.start()
    first, second = place.started
    assert first.is_stopped
    assert second.note == "Triton ended while starting, by signal 6 (SIGABRT), and is started again"
    # It has not served yet.
    assert (place.kept.state, place.kept.restarts) == ("serving", 0)
