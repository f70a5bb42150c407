"""A tritonserver of the operator's own: the backend directory and the command that `hplm build backends` gives for it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest
from hplm_client import Client

from hplm.errors import DeadlineError, HplmError
from hplm.store.layout import Store
from hplm.triton.launcher.install import find_triton
from hplm.triton.launcher.ports import free_ports
from tests import tiny

pytestmark = pytest.mark.triton

Hplm = Callable[..., subprocess.CompletedProcess[str]]


def build_backends(hplm: Hplm, out: Path, models: Path) -> subprocess.CompletedProcess[str]:
    return hplm("build", "backends", "--out", str(out), "--models", str(models))


def test_the_printed_command_serves_whatever_folder_it_is_run_in_and_ends_while_a_load_hangs(
    hplm: Hplm, tmp_path: Path
) -> None:
    tiny_models = tiny.make_repository(tmp_path / "tiny")
    # As on a file server that is gone: who reads it waits for ever.
    weights = Store(tmp_path / "tiny" / "store").tenant_version("beta", 1) / "weights.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    # The second time it is in place of the first, as after an upgrade.
    for _ in range(2):
        done = build_backends(hplm, tmp_path / "backends", tiny_models)
        assert done.returncode == 0, done.stderr
    ports = free_ports()
    flags = f"--http-port={ports.http} --grpc-port={ports.grpc} --metrics-port={ports.metrics}"
    script = tmp_path / "serve.sh"
    script.write_text(f"{done.stdout.strip()} {flags}\n")
    (tmp_path / "hplm").mkdir()
    (tmp_path / "hplm" / "__init__.py").write_text("raise ImportError('this is not ours')\n")
    plain = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "VIRTUAL_ENV")}
    plain["PATH"] = "/usr/bin:/bin"
    with (tmp_path / "log").open("wb") as log:
        triton = subprocess.Popen(
            ["sh", str(script)], cwd=tmp_path, env=plain, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert answer(ports.grpc_url, triton, tmp_path / "log") in ("yes", "no")
        # The machine's other addresses reach nobody.
        for port in (ports.http, ports.grpc, ports.metrics):
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port)):
                pass
        with Client(ports.grpc_url) as client, pytest.raises(DeadlineError):
            client.predict("beta", "zebra xylophone", deadline_s=1)
        # Somebody reads it, and what is not written keeps him.
        with open_for_writing(weights):
            triton.send_signal(signal.SIGTERM)
            # It waits for its stubs; after half a minute it would end with 1, and leave one.
            assert triton.wait(60) == 0
    finally:
        # Its stubs, where it left any.
        with suppress(ProcessLookupError):
            os.killpg(triton.pid, signal.SIGKILL)
        triton.wait()


def open_for_writing(pipe: Path) -> BinaryIO:
    """As soon as somebody has opened it for reading."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb")
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > until_s:
                raise
        time.sleep(0.05)


def answer(url: str, triton: subprocess.Popen[bytes], log: Path) -> str:
    """The first answer, as soon as there is one."""
    until_s = time.monotonic() + 200
    while True:
        # A new one each time: gRPC tries a connection that failed again after ever longer pauses.
        try:
            with Client(url) as client:
                return str(client.predict("alpha", "zebra xylophone").label)
        except HplmError as error:
            if triton.poll() is not None or time.monotonic() > until_s:
                raise AssertionError(f"{error.wire()}\n{log.read_text(errors='replace')[-3000:]}") from None
        time.sleep(0.1)


def test_a_folder_that_holds_something_else_is_not_replaced(hplm: Hplm, tiny_models: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = build_backends(hplm, tmp_path, tiny_models)
    assert done.returncode == 1
    assert "holds 'mine', which is not a backend of hplm" in done.stderr
    assert (tmp_path / "mine").exists()


def test_a_folder_that_triton_cannot_start_a_stub_from_is_refused(
    hplm: Hplm, tiny_models: Path, tmp_path: Path
) -> None:
    done = build_backends(hplm, tmp_path / "two words", tiny_models)
    assert done.returncode == 1
    assert "give --out a symbolic link" in done.stderr
    assert not (tmp_path / "two words").exists()


def test_models_that_are_none_are_refused_before_anything_is_written(hplm: Hplm, tmp_path: Path) -> None:
    done = build_backends(hplm, tmp_path / "backends", tmp_path)
    assert done.returncode == 1
    assert "has no models of a base" in done.stderr
    assert not (tmp_path / "backends").exists()


def test_it_says_for_which_triton_it_is(hplm: Hplm, tiny_models: Path, tmp_path: Path) -> None:
    done = build_backends(hplm, tmp_path / "backends", tiny_models)
    assert find_triton().origin in done.stderr
    assert str(find_triton().binary) in done.stdout
