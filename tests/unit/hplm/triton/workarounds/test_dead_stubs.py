"""Models whose stubs die are loaded again, each after its own pauses. The stubs are real processes of a small server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from hplm.triton.launcher.ports import Ports
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds import dead_stubs
from hplm.triton.workarounds.dead_stubs import SETTLED_S, STUB, StubKeeper, stubs_of
from tests.waiting import until


@dataclass
class Process:
    pid: int
    is_killed: bool = False

    def kill(self) -> None:
        self.is_killed = True


class SmallTriton:
    """Loads each model as a process, as Triton does. Models of `broken` are refused, and models of `dying` end at once.

    Whoever has it load one of `hanging` or `lost` waits until it `is_free`. The process of a `lost` one dies unnoticed.
    """

    def __init__(self, folder: Path) -> None:
        self.process = Process(os.getpid())
        self.broken: set[str] = set()
        self.dying: set[str] = set()
        self.hanging: set[str] = set()
        self.lost: set[str] = set()
        self.is_free = threading.Event()
        self.loads: list[str] = []
        self._folder = folder
        self._stubs: list[tuple[str, subprocess.Popen[bytes]]] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                model, step = self.path.split("/")[-2:]
                self.send_response(200 if step == "unload" or small.load(model) else 400)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.ports = Ports(self._http.server_port, 0, 0)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def launcher_headers(self) -> dict[str, str]:
        return {}

    def ends(self, within_s: float = 0.5) -> bool:
        return False

    def hide_texts(self) -> None:
        """Do nothing: this server has no texts."""

    def load(self, model: str) -> bool:
        self.loads.append(model)
        if model in self.lost:
            stub = subprocess.Popen([STUB], executable="/bin/true", stdin=subprocess.PIPE)
            self._stubs.append((model, stub))
            os.waitid(os.P_PID, stub.pid, os.WEXITED | os.WNOWAIT)
        if model in self.hanging | self.lost:
            self.is_free.wait()
        if model in self.broken | self.hanging | self.lost:
            return False
        script = self._folder / model / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("read line\n")
        stub = subprocess.Popen([STUB, str(script)], executable="/bin/sh", stdin=subprocess.PIPE)
        # The process is visible a moment before its command is.
        until(lambda: Path(f"/proc/{stub.pid}/cmdline").read_bytes() != b"")
        self._stubs.append((model, stub))
        if model in self.dying:
            self.kill(model)
        return True

    def kill(self, model: str) -> None:
        for other, stub in self._stubs:
            if other == model:
                stub.kill()
                stub.wait()

    def close(self) -> None:
        self.is_free.set()
        for model, stub in self._stubs:
            self.kill(model)
            assert stub.stdin is not None
            stub.stdin.close()
        self._http.shutdown()
        self._http.server_close()


class Kept:
    """Two models, alpha and beta, and a keeper with a manual clock."""

    def __init__(self, server: SmallTriton) -> None:
        self.server = server
        self.now_s = 1000.0
        for model in ("alpha", "beta"):
            server.load(model)
        self.is_over = False
        self._keeper = StubKeeper(cast(TritonServer, server), lambda: self.is_over, clock=lambda: self.now_s)

    def look(self) -> list[str]:
        return self._keeper.look()

    def looks(self, duration_s: float) -> list[str]:
        """Look every fifth of a second, and return the models that were loaded."""
        self.server.loads.clear()
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            self._keeper.look()
            self.now_s += 0.2
        return self.server.loads.copy()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    server = SmallTriton(tmp_path)
    yield Kept(server)
    server.close()


def test_a_model_that_cannot_be_loaded_does_not_keep_another_waiting(kept: Kept) -> None:
    kept.server.broken.add("alpha")
    kept.server.kill("alpha")
    assert set(kept.looks(40.0)) == {"alpha"}
    kept.server.kill("beta")
    assert "beta" in kept.looks(0.1)
    kept.server.broken.clear()
    assert kept.looks(60.0) == ["alpha"]


def test_a_model_that_dies_whenever_it_is_loaded_is_loaded_after_pauses_that_double(kept: Kept) -> None:
    kept.server.dying.add("alpha")
    kept.server.kill("alpha")
    # Loads happen at once and after 1, 3, 7, 15 and 31 seconds.
    assert kept.looks(35.0) == ["alpha"] * 6


def test_a_model_that_has_lived_for_long_is_loaded_at_once(kept: Kept) -> None:
    kept.server.dying.add("alpha")
    kept.server.kill("alpha")
    kept.looks(35.0)
    kept.server.dying.clear()
    assert kept.looks(40.0 + SETTLED_S) == ["alpha"]
    kept.server.kill("alpha")
    assert kept.looks(0.1) == ["alpha"]
    kept.server.kill("alpha")
    assert kept.looks(0.7) == []
    assert kept.looks(0.4) == ["alpha"]


def test_a_model_that_has_a_new_stub_already_is_not_loaded_again(kept: Kept) -> None:
    kept.server.kill("alpha")
    kept.server.load("alpha")
    assert kept.looks(5.0) == []
    kept.server.kill("alpha")
    assert kept.looks(0.1) == ["alpha"]


def test_a_load_that_hangs_is_waited_for_no_longer_when_it_is_over_with_triton(kept: Kept) -> None:
    kept.server.hanging.add("alpha")
    kept.server.kill("alpha")
    looking = threading.Thread(target=kept.looks, args=(0.1,))
    looking.start()
    until(lambda: "alpha" in kept.server.loads)
    assert looking.is_alive()
    kept.is_over = True
    until(lambda: not looking.is_alive())
    # The load itself has not ended.
    assert not kept.server.is_free.is_set()


def test_a_process_of_the_machine_whose_name_is_no_text_is_in_nobodys_way(kept: Kept) -> None:
    # The system cuts names at 15 bytes, also within a letter.
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xd0\\xbe\\xd0 ) (', 0, 0, 0); print(flush=True)"
    odd = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert odd.stdout is not None
        odd.stdout.readline()
        assert sorted(stubs_of(os.getpid()).values()) == ["alpha", "beta"]
        assert kept.looks(1.0) == []
    finally:
        odd.communicate()


def test_a_server_that_waits_for_a_new_stub_that_has_died_is_ended(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_stubs, "LOST_S", 0.2)
    kept.server.kill("alpha")
    kept.server.lost.add("alpha")
    assert kept.look() == ["Triton waits for a new stub of model alpha that has died: Triton is ended"]
    assert kept.server.process.is_killed
