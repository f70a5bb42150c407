"""A server that is guarded: over TLS, and for those alone who send its header, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import Queue

import pytest
import tritonclient.grpc as triton_grpc
from hplm_client import AsyncClient, Client, ManageClient
from hplm_client.transport.headers import HEADERS_VARIABLE
from tritonclient.utils import InferenceServerException

from hplm import errors
from tests import managed
from tests.managed import FAST, Place
from tests.triton.access.certificates import make_certificate, needs_openssl

pytestmark = [pytest.mark.triton, needs_openssl]
TEXT = "the red cat runs to Paris"
# Triton puts words before the name over gRPC alone.
HEADERS = {"Guard": "let me in", "Triton-Grpc-Protocol-Guard": "let me in"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("guarded-tls") / "made")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Place]:
    guard = "inference:guard=let me in"
    flags = (
        "--grpc-use-ssl=1",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={certificate.with_name('key.pem')}",
        f"--grpc-restricted-protocol={guard}",
        # The operator's header takes the place of the launcher's.
        "--grpc-restricted-protocol=model-repository,model-config,shared-memory,trace,logging:admin=the operator",
        f"--http-restricted-api={guard}",
    )
    with managed.serving(tmp_path_factory.mktemp("guarded"), flags=flags) as made:
        yield made


@pytest.fixture(scope="module")
def https(place: Place, certificate: Path) -> Iterator[str]:
    """Triton has no TLS over HTTP: as an operator has it, something before it has."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    ports: Queue[int] = Queue()
    loops: Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def resolve_future(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", place.server.ports.http)
        await asyncio.gather(copy(reader, behind[1]), copy(behind[0], writer))

    async def serve() -> None:
        over = asyncio.Event()
        async with await asyncio.start_server(resolve_future, "127.0.0.1", 0, ssl=context) as server:
            loops.put((asyncio.get_running_loop(), over))
            ports.put(server.sockets[0].getsockname()[1])
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, over = loops.get(timeout=30)
    yield f"https://127.0.0.1:{ports.get(timeout=30)}"
    loop.call_soon_threadsafe(over.set)
    thread.join()


@pytest.fixture(params=["https", "grpcs"])
def url(request: pytest.FixtureRequest, place: Place, https: str) -> str:
    return https if request.param == "https" else f"grpcs://127.0.0.1:{place.server.ports.grpc}"


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.mark.usefixtures("trusted")
def test_who_trusts_the_certificate_and_sends_the_header_is_answered(url: str, place: Place) -> None:
    async def ask() -> str:
        async with AsyncClient(url, headers=HEADERS) as client:
            return (await client.predict("alpha", TEXT)).label

    with Client(url, headers=HEADERS) as client:
        label = client.predict("alpha", TEXT).label
        assert [one.label for one in client.predict_many([("alpha", TEXT)] * 20)] == [label] * 20
    assert asyncio.run(ask()) == label
    with ManageClient(url, headers=HEADERS) as manage, place.working():
        name = f"new-{url[:5]}"
        told = []
        manage.wait(manage.create_tenant(name, train=manage.upload(place.rows), settings=FAST), told.append)
        assert told[-1].state == "done"
        assert manage.show_tenant(name).version == 1


@pytest.mark.usefixtures("trusted")
def test_commands_send_the_headers_of_their_environment(
    url: str, hplm: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = (
        ["predict", "--tenant", "alpha", TEXT],
        ["tenant", "show", "alpha"],
        ["domain", "list"],
        ["job", "list"],
    )
    for command in commands:
        done = hplm(*command, "--url", url)
        assert done.returncode != 0
        assert "FORBIDDEN" in done.stderr
    monkeypatch.setenv(HEADERS_VARIABLE, json.dumps(HEADERS))
    for command in commands:
        done = hplm(*command, "--url", url)
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("trusted")
def test_a_load_goes_over_tls_and_sends_the_headers_of_its_environment(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, json.dumps(HEADERS))
    (tmp_path / "tenants").write_text("alpha\nbeta\n")
    (tmp_path / "texts").write_text(f"{TEXT}\n")
    report = tmp_path / "report.json"
    files = f"--tenants {tmp_path}/tenants --text {tmp_path}/texts --json {report}"
    command = f"loadtest steady --url {url} --rate 40 --duration 2 {files}".split()
    hplm = Path(sys.executable).parent / "hplm"
    done = subprocess.run([hplm, *command], capture_output=True, text=True, timeout=100, check=False)
    # Status 1 is also where the load fell behind its plan, as it may beside other tests.
    assert report.exists(), done.stderr
    (row,) = json.loads(report.read_text())["rows"]
    assert row["requests"] > 40
    assert (row["lost"], row["failed"], row["refused"]) == (0, 0, 0)


def test_over_grpc_only_the_operator_loads_unloads_or_sets_anything(place: Place, certificate: Path) -> None:
    url = f"127.0.0.1:{place.server.ports.grpc}"
    with closing(triton_grpc.InferenceServerClient(url, ssl=True, root_certificates=str(certificate))) as triton:
        for ask in (
            lambda **how: triton.unload_model("hbert_plot", **how),
            lambda **how: triton.get_model_config("hbert_plot", **how),
            lambda **how: triton.get_system_shared_memory_status(**how),
            lambda **how: triton.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}, **how),
            lambda **how: triton.update_log_settings({"log_verbose_level": 1}, **how),
        ):
            for headers in ({}, {"triton-grpc-protocol-guard": "let me in"}):
                with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                    ask(headers=headers)
        assert triton.get_model_config("hbert_plot", headers={"triton-grpc-protocol-admin": "the operator"})


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("headers", [{}, {name: "wrong" for name in HEADERS}], ids=["none", "wrong"])
def test_who_does_not_send_the_header_is_refused_as_forbidden(url: str, headers: dict[str, str]) -> None:
    async def ask() -> None:
        async with AsyncClient(url, headers=headers) as client:
            await client.predict("alpha", TEXT)

    with Client(url, headers=headers) as client, ManageClient(url, headers=headers) as manage:
        for wrong in (lambda: client.predict("alpha", TEXT), manage.list_tenants, lambda: asyncio.run(ask())):
            with pytest.raises(errors.ForbiddenError, match="refuses this client"):
                wrong()


@pytest.mark.parametrize("problem", ["nobody trusts it", "another host"])
def test_a_certificate_that_is_not_the_servers_is_an_address_that_does_not_answer(
    url: str, problem: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem == "another host":
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        url = url.replace("127.0.0.1", "localhost")

    async def ask() -> None:
        async with AsyncClient(url, headers=HEADERS, timeout_s=60) as client:
            await client.predict("alpha", TEXT)

    # gRPC says no more than that it cannot connect.
    said = "ertificate" if url.startswith("https") else None
    with Client(url, headers=HEADERS, timeout_s=60) as client:
        for wrong in (lambda: client.predict("alpha", TEXT), lambda: asyncio.run(ask())):
            with pytest.raises(errors.UnreachableError, match=said):
                wrong()
