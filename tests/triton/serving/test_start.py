"""Starting and stopping: what is broken is said before anybody waits, and nothing stays behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hplm_client import AsyncClient, Client, ManageClient
from hplm_client.transport.headers import HEADERS_VARIABLE

from hplm.errors import StartError, TritonNotFoundError
from hplm.runtime.process import SHARED_MEMORY
from hplm.store.layout import Store
from hplm.triton.launcher import ports as port_numbers
from hplm.triton.launcher import server as launcher
from hplm.triton.launcher.backend_folder import assemble_backends
from hplm.triton.launcher.install import find_triton
from hplm.triton.launcher.ports import Ports, check_free, free_ports, listening_address
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds import killed_server_files
from hplm_cli import serve
from tests import tiny
from tests.limits import limited
from tests.tiny import flip_last_byte
from tests.triton.failures.serve_process import Service
from tests.waiting import until
from tests.watching import runs, session_of

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda s: flip_last_byte(s / "plots/general/root/values.f16"), "CORRUPT_ARTIFACT|does not match the checksum"),
        (lambda s: flip_last_byte(s / "bases/tiny/upper.safetensors"), "checksum"),
        (lambda s: tiny.make_base(tiny.Store(s), tiny.config(), seed=9), "was built for base"),
    ],
    ids=["flipped-byte", "broken-base", "another-base"],
)
def test_a_broken_store_is_named_when_the_server_starts(tmp_path: Path, break_it: object, words: str) -> None:
    models = tiny.make_repository(tmp_path)
    break_it(tmp_path / "store")  # type: ignore[operator]
    with TritonServer(models, free_ports(), log=tmp_path / "log") as server, pytest.raises(StartError, match=words):
        server.wait_ready()


def test_an_option_that_triton_does_not_know_is_named_in_one_line(tiny_models: Path, tmp_path: Path) -> None:
    flags = ["--nonsense=1"]
    with TritonServer(tiny_models, free_ports(), log=tmp_path / "log", flags=flags) as server:
        with pytest.raises(StartError) as caught:
            server.wait_ready()
        _, *said = str(caught.value).splitlines()
        assert len(said) == 1
        assert "--nonsense=1" in said[0]


def test_a_folder_that_a_shell_takes_apart_serves_and_is_managed(tmp_path: Path) -> None:
    folder = tmp_path / "two words & 'more'"
    folder.mkdir()
    models = tiny.make_repository(folder, manager_settings={})
    with TritonServer(models, free_ports(), log=tmp_path / "log") as server:
        server.wait_ready()
        with Client(server.ports.grpc_url) as client:
            assert client.predict("alpha", "zebra xylophone").label in ("yes", "no")
        with ManageClient(server.ports.grpc_url) as manager:
            assert {"alpha", "beta"} <= {tenant.name for tenant in manager.list_tenants()}


def test_a_temporary_folder_that_a_shell_takes_apart_is_refused_at_once(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "two words"))
    with pytest.raises(StartError, match=r"two words.*give TMPDIR a symbolic link"):
        TritonServer(tiny_models, free_ports(), log=tmp_path / "log")


def test_what_fails_beside_a_server_is_not_lost_with_it(tiny_models: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TritonServer(tiny_models, free_ports(), log=tmp_path / "log"):
        raise ZeroDivisionError


def test_a_start_that_fails_half_way_leaves_no_triton_and_no_folder(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, Path]] = []

    def fail(pid: int, folder: Path, work: Path) -> None:
        begun.append((pid, folder))
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launcher, "start_reaper", fail)
    with pytest.raises(StartError, match=r"cannot be started: .*temporarily unavailable"):
        TritonServer(tiny_models, free_ports(), log=tmp_path / "log", tied=True)
    (pid, folder), *more = begun
    assert not more
    assert not runs(pid)
    assert not folder.exists()


def test_backoff_mode_serves_too_and_what_the_last_server_wrote_stays_beside_the_new_log(tmp_path: Path) -> None:
    # No window is computed, so any processor will do.
    models = tiny.make_repository(tmp_path, miss="backoff", plot_settings={"quantization": "int8"})
    log = tmp_path / "triton.log"
    log.write_text("Signal (6) received\n")
    with TritonServer(models, free_ports(), log=log) as server:
        server.wait_ready()
        assert re.search(r"hbert_upper: computing on cpu in float32 with \d+ threads?", log.read_text())
        assert "what no table has is backed off, so quantization changes nothing" in log.read_text()
        with Client(server.ports.grpc_url) as client:
            assert client.predict("alpha", "zebra xylophone").label in ("yes", "no")
    assert (tmp_path / "triton.log.1").read_text() == "Signal (6) received\n"


def test_a_taken_port_is_named_with_the_flag_to_change_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError, match="--grpc-port"):
            check_free(Ports(free_ports().http, taken.getsockname()[1], free_ports().metrics))


def test_an_address_that_triton_does_not_listen_on_is_named() -> None:
    for host, words in (
        ("no.such.host.invalid", "an address or a name of this machine"),
        ("fe80::1%lo", "with a zone"),
    ):
        with pytest.raises(StartError, match=words):
            listening_address(host)
    assert listening_address("localhost") == "127.0.0.1"
    with pytest.raises(StartError, match=r"203\.0\.113\.1 is no address of this machine .* see --host"):
        check_free(replace(free_ports(), host="203.0.113.1"))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address ::1")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_hplm_serve_listens_on_ipv6_and_clients_and_probes_reach_it(
    host: str, tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tiny.make_repository(tmp_path, manager_settings={})
    service = Service(models, replace(free_ports(), host="::1"), ["--no-worker", "--host", host, "--insecure"])
    service.launch()
    try:
        service.await_answers()
        service.await_ready()
        for url in (service.ports.http_url, service.ports.grpc_url):
            assert "[::1]" in url
            done = hplm("predict", "--url", url, "--tenant", "alpha", "the red cat", "--json")
            assert json.loads(done.stdout)["label"] in ("yes", "no")
            with ManageClient(url) as manage:
                assert manage.show_tenant("alpha").base == "tiny"
            assert asyncio.run(ask_async(url)) in ("yes", "no")
        assert hplm("health", "--url", service.ports.health_url).returncode == 0
        with urllib.request.urlopen(service.ports.metrics_url, timeout=10) as page:
            assert b"nv_inference_count" in page.read()
        with pytest.raises(StartError, match=f"port {service.ports.http} of ::1 is not free"):
            check_free(service.ports)
    finally:
        service.stop()


async def ask_async(url: str) -> str | None:
    async with AsyncClient(url) as client:
        label = (await client.predict("alpha", "the red cat")).label
    return label if label is None else str(label)


def test_a_port_that_is_given_twice_is_named() -> None:
    with pytest.raises(StartError, match="must be different ports, got 8000, 8000, 8002"):
        check_free(Ports(8000, 8000, 8002))


def test_triton_may_open_as_many_files_as_the_system_allows(tiny_models: Path, tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with limited(resource.RLIMIT_NOFILE, 256):
        server = TritonServer(tiny_models, free_ports(), log=tmp_path / "log")
    with server:
        server.wait_ready()
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert f"Max open files {min(hard, 65_536)} " in re.sub(" +", " ", limits)


def test_whether_triton_lives_is_asked_without_a_lock_that_a_signal_may_leave_taken(
    tiny_models: Path, tmp_path: Path
) -> None:
    with TritonServer(tiny_models, free_ports(), log=tmp_path / "log") as server:
        # As a KeyboardInterrupt within `poll` leaves it.
        lock = server.process._waitpid_lock  # type: ignore[attr-defined]
        assert lock.acquire(False)
        server.wait_ready()
        assert not server.ends(0.1)
        os.killpg(server.process.pid, signal.SIGKILL)
        assert server.ends(60)
        lock.release()
        assert server.has_ended


def test_what_a_killed_server_left_is_removed_when_the_next_one_starts(tiny_models: Path, tmp_path: Path) -> None:
    server = TritonServer(tiny_models, free_ports(), log=tmp_path / "log")
    server.wait_ready()
    # It lives.
    killed_server_files.sweep()
    folder = server._folder
    assert folder.exists()
    assert [*SHARED_MEMORY.glob(f"{folder.name}.*")]
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    # Its stubs hold the mark until they are gone too.
    until(lambda: not session_of(server))
    with TritonServer(tiny_models, free_ports(), log=tmp_path / "log"):
        assert not folder.exists()
        assert not [*SHARED_MEMORY.glob(f"{folder.name}.*")]


def test_free_ports_are_four_that_the_system_gives_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    found = free_ports()
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    numbers = [found.http, found.grpc, found.metrics, found.health or lowest]
    assert len({*numbers}) == 4
    assert max(numbers) < lowest
    check_free(found)
    monkeypatch.setattr(port_numbers, "PORTS", range(1, 1))
    with pytest.raises(StartError, match="there are no free ports"):
        free_ports()


def test_a_port_that_somebody_else_answers_on_in_another_tongue_is_not_ready_yet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def babble() -> None:
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"\x00\x00 no HTTP\r\n")

        threading.Thread(target=babble, daemon=True).start()
        server = TritonServer(tiny.make_repository(tmp_path), free_ports(), log=tmp_path / "log")
        server.ports = replace(server.ports, http=other.getsockname()[1])
        with server, pytest.raises(StartError, match="not ready after"):
            server.wait_ready(1.0)


def test_triton_root_wins_and_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_ROOT", str(tmp_path))
    with pytest.raises(TritonNotFoundError, match=r"there is no \S+/bin/tritonserver"):
        find_triton()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    (tmp_path / "backends" / "python").mkdir(parents=True)
    assert find_triton().origin == "$TRITON_ROOT"


def test_the_wheel_is_found_where_there_is_no_other_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_ROOT", raising=False)
    if Path("/opt/tritonserver/bin/tritonserver").is_file():
        assert find_triton().origin == "/opt/tritonserver"
    else:
        assert find_triton().origin == "wheel nvidia-pytriton"


def test_the_backend_folder_links_folders_and_copies_files(tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    assemble_backends(find_triton(), folder)
    assert (folder / "plot").is_symlink()
    assert (folder / "upper" / "model.py").is_file()
    assert os.access(folder / "python" / "triton_python_backend_stub", os.X_OK)


def test_hplm_serve_reports_a_broken_store_in_one_line_and_status_1(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    shutil.rmtree(tmp_path / "store" / "bases")
    command = [str(Path(sys.executable).parent / "hplm"), "serve", "--check", "--models", str(models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MISSING_ARTIFACT" in done.stderr
    assert "Traceback" not in done.stderr


def test_hplm_serve_names_a_damaged_tenant_and_serves_the_others(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    flip_last_byte(tiny.folder_of(Store(tmp_path / "store"), "beta") / "weights.safetensors")
    command = [str(Path(sys.executable).parent / "hplm"), "serve", "--check", "--models", str(models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "tenant beta cannot answer: CORRUPT_ARTIFACT" in done.stderr
    assert {one["tenant"] for one in json.loads(done.stdout)} == {"alpha", "gamma", "tagger"}


def test_hplm_serve_asks_a_guarded_server_with_the_headers_of_its_environment(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    command = [str(Path(sys.executable).parent / "hplm"), "serve", "--check", "--models", str(models)]
    command.append("--http-restricted-api=inference:guard=let me in")
    for headers, answering in (({}, set()), ({"guard": "let me in"}, set(tiny.TASKS))):
        environment = {**os.environ, HEADERS_VARIABLE: json.dumps(headers)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == (0 if answering else 1), done.stderr
        assert {one["tenant"] for one in json.loads(done.stdout)} == answering
        assert ("FORBIDDEN" in done.stderr) == (not answering)


def start(command: Sequence[str], until: str) -> tuple[subprocess.Popen[str], str]:
    """Start it; what it said up to the line that begins with `until`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith(until):
            break
    return process, said


def test_hplm_serve_says_where_it_serves_when_there_is_no_tenant_yet(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    for name in tiny.TASKS:
        tiny.delete_tenant(Store(tmp_path / "store"), name)
    ports = free_ports()
    command = [str(Path(sys.executable).parent / "hplm"), "serve", "--no-worker", "--models", str(models)]
    command += [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics", "health")]
    process, said = start(command, "Ctrl-C")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert "no tenant answers: `hplm build tenant --help`" in said
    assert f"Serving HTTP on {ports.http_url}, gRPC on {ports.grpc_url}" in said


def test_of_many_tenants_hplm_serve_asks_some_and_counts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tiny.make_repository(tmp_path)
    shown, left, damaged = serve.served_tenants(models)
    assert ({card.name for _, card in shown}, left, damaged) == (set(tiny.TASKS), 0, 0)
    assert {model for model, _ in shown} == {"hbert"}
    monkeypatch.setattr(serve, "SHOWN_TENANTS", 1)
    shown, left, damaged = serve.served_tenants(models)
    assert (len(shown), left, damaged) == (1, len(tiny.TASKS) - 1, 0)


def test_hplm_serve_refuses_a_registry_of_an_older_format_with_the_command_that_builds_it_anew(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    with closing(sqlite3.connect(tmp_path / "store" / "registry.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    command = [str(Path(sys.executable).parent / "hplm"), "serve", "--check", "--models", str(models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "version 0001 of the tables" in done.stderr
    assert "`hplm build demo`" in done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_while_starting_leaves_no_triton_behind(tmp_path: Path, name: str) -> None:
    models = tiny.make_repository(tmp_path)
    hplm = str(Path(sys.executable).parent / "hplm")
    # Under nohup these tests would hand on that SIGHUP is ignored.
    command = ["env", f"--default-signal={name}", hplm, "serve", "--check", "--models", str(models)]
    process, _ = start(command, "Triton:")
    time.sleep(0.3)
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=90)
    assert process.returncode == 130
    assert processes_over(models) == ""


def processes_over(models: Path) -> str:
    """Tritons that run over a repository."""
    command = ["pgrep", "-f", f"model-repository={models}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_a_signal_in_the_midst_of_starting_a_process_leaves_no_triton_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tiny.make_repository(tmp_path)
    prepare, parent = launcher.prepare_child, os.getpid()

    def prepare_and_interrupt(*given: Any) -> None:
        """In Triton's process, before it is Triton: whoever starts it waits for that, within Popen."""
        prepare(*given)
        os.kill(parent, signal.SIGINT)

    monkeypatch.setattr(launcher, "prepare_child", prepare_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        TritonServer(models, free_ports(), log=tmp_path / "log", tied=True)
    assert processes_over(models) == ""


def test_what_nohup_started_serves_on_when_its_terminal_closes(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    command = ["nohup", str(Path(sys.executable).parent / "hplm"), "serve", "--check", "--models", str(models)]
    process, _ = start(command, "Triton:")
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert {one["tenant"] for one in json.loads(said)} == {"alpha", "beta", "gamma", "tagger"}


def test_a_triton_that_cannot_be_started_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken = tmp_path / "install" / "tritonserver"
    broken.parent.mkdir()
    broken.touch(0o644)
    with pytest.raises(StartError, match=f"{broken} cannot be started: .*Permission denied"):
        TritonServer(tmp_path, free_ports(), install=replace(find_triton(), binary=broken))
    assert [path.name for path in tmp_path.iterdir()] == ["install"]


def test_hplm_serve_counts_tenants_whose_files_are_not_sound(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    (tiny.folder_of(Store(tmp_path / "store"), "alpha") / "manifest.json").write_text("{")
    shown, _, damaged = serve.served_tenants(models)
    assert ({card.name for _, card in shown}, damaged) == (set(tiny.TASKS) - {"alpha"}, 1)
