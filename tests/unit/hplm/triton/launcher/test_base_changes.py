"""Models of bases that are added to a repository are loaded, and those of deleted bases unloaded, by a small server."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from hplm.core.roles import base_roles, models_of, names
from hplm.triton.launcher.base_changes import LOOK_EVERY_S, RETRY_S, BaseChanges, ServerWithModels
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.launcher.ports import Ports
from tests.waiting import until


@dataclass
class Process:
    pid: int


class SmallTriton:
    """Notes which models it is told to load and unload, as Triton does; loads of `broken` models are refused."""

    def __init__(self, models: Collection[str]) -> None:
        self.process = Process(0)
        self.models = set(models)
        self.ready = set(models)
        self.broken: set[str] = set()
        self.steps: list[tuple[str, str]] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = b""
                if self.path.endswith("/index"):
                    content = json.dumps([{"name": name, "state": "READY"} for name in small.ready]).encode()
                    status = 200
                else:
                    status = small.step(*self.path.split("/")[-2:])
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.ports = Ports(self._http.server_port, 0, 0)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def step(self, model: str, step: str) -> int:
        self.steps.append((step, model))
        if step == "load" and model in self.broken:
            return 400
        (self.ready.add if step == "load" else self.ready.discard)(model)
        return 200

    @property
    def launcher_headers(self) -> dict[str, str]:
        return {}

    def ends(self, within_s: float = 0.5) -> bool:
        return False

    def hide_texts(self) -> None:
        pass

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Followed:
    """A repository with the base `hbert`, a server over it, and a manual clock. It is the watch of stubs, too."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.add("hbert")
        self.server = SmallTriton(models_of(models))
        self.now_s = 1000.0
        self.watched: set[str] = set()
        self._changes = BaseChanges(
            models, cast(ServerWithModels, self.server), self, lambda: False, clock=lambda: self.now_s
        )

    def add(self, name: str) -> None:
        for role in base_roles(name):
            write_model(self.models, role, {"store": "s", "base": name, "table": "t", "registry": ""})

    def remove(self, name: str) -> None:
        for role in base_roles(name):
            shutil.rmtree(self.models / role.name)

    def watch(self, models: Collection[str]) -> None:
        self.watched |= set(models)

    def forget(self, models: Collection[str]) -> None:
        self.watched -= set(models)

    def look(self, after_s: float = LOOK_EVERY_S) -> list[str]:
        """Look once the clock is so far on, and until what then begins has ended."""
        self.now_s += after_s
        messages = list(self._changes.look())
        until(lambda: not self._changes.is_changing)
        return messages + self._changes.look()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    made = Followed(tmp_path)
    yield made
    made.server.close()


LATE = names(base_roles("late"))


def test_a_base_that_is_added_is_loaded_in_order_and_one_that_is_deleted_unloaded_in_the_other(
    followed: Followed,
) -> None:
    assert followed.look() == []
    followed.add("late")
    assert followed.look(LOOK_EVERY_S / 2) == []
    assert followed.look() == ["model late was added to the repository and is served"]
    assert followed.server.steps == [("load", model) for model in LATE]
    assert followed.watched == {*LATE}
    assert followed.server.models == followed.server.ready == {*names(base_roles()), *LATE}
    followed.server.steps.clear()
    followed.remove("late")
    assert followed.look() == ["model late was deleted from the repository and is unloaded"]
    assert {*followed.server.steps[:2]} == {("unload", "late"), ("unload", "late_dispatch")}
    assert {*followed.server.steps} == {("unload", model) for model in LATE}
    assert followed.watched == set()
    assert followed.server.models == followed.server.ready == {*names(base_roles())}
    assert followed.look() == []


def test_no_half_of_a_base_that_cannot_be_loaded_stays_and_it_is_tried_again(followed: Followed) -> None:
    followed.server.broken.add("late_upper")
    followed.add("late")
    (message,) = followed.look()
    assert "Triton cannot load model late_upper" in message
    assert f"tried again in {RETRY_S:.0f} s, or when its files change" in message
    assert followed.server.models == followed.server.ready == {*names(base_roles())}
    assert followed.look() == []
    followed.server.broken.clear()
    assert followed.look(RETRY_S / 2) == []
    assert followed.look(RETRY_S) == ["model late was added to the repository and is served"]


def test_a_base_that_could_not_be_loaded_is_tried_as_soon_as_its_files_change(followed: Followed) -> None:
    followed.server.broken.add("late_plot")
    followed.add("late")
    assert len(followed.look()) == 1
    followed.server.broken.clear()
    path = followed.models / "late_plot" / "1" / "settings.json"
    path.write_text(path.read_text() + "\n")
    assert followed.look() == ["model late was added to the repository and is served"]


def test_files_of_a_served_base_that_change_are_told_once(followed: Followed) -> None:
    path = followed.models / "hbert_upper" / "1" / "settings.json"
    path.write_text(path.read_text() + "\n")
    assert followed.look() == ["the files of model hbert have changed: they are used when `hplm serve` starts again"]
    assert followed.look() == []


def test_a_repository_that_is_away_for_a_moment_changes_nothing(followed: Followed) -> None:
    away = followed.models.with_name("away")
    followed.models.rename(away)
    assert followed.look() == []
    away.rename(followed.models)
    assert followed.look() == []
    assert followed.server.steps == []
