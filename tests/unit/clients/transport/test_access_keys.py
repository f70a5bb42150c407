"""Clients send keys, and show them nowhere."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hplm_client import AsyncClient, Client, ManageClient
from hplm_client.transport.access_keys import AccessKeys, KeyOrKeys, keys_from_environment, one_key

from hplm.access.keys import new_key
from hplm.errors import ConfigError, ForbiddenError, HplmError

KEY, OTHER = new_key().text(), new_key().text()
# A secret may have an underscore.
SECRETS = [key.split("_", 2)[2] for key in (KEY, OTHER)]
REFUSAL = json.dumps({"error": "FORBIDDEN: the key is missing, or is not valid for this tenant"}).encode()


class Recorder(ThreadingHTTPServer):
    """A server that refuses each request, and keeps the header `authorization` and the body of the last infer request."""

    authorization: str | None = None
    body: bytes = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        self.server.body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.authorization = self.headers["authorization"]
        self.send_response(400)
        self.send_header("Content-Length", str(len(REFUSAL)))
        self.end_headers()
        self.wfile.write(REFUSAL)

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Recorder]:
    with Recorder(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def predict(url: str, key: KeyOrKeys | None, headers: dict[str, str] | None) -> None:
    with Client(url, key=key, headers=headers, model="hbert") as client:
        client.predict_batch([("films", "good"), ("news", "bad")])


def predict_async(url: str, key: KeyOrKeys | None, headers: dict[str, str] | None) -> None:
    async def ask() -> None:
        async with AsyncClient(url, key=key, headers=headers, model="hbert") as client:
            await client.predict_batch([("films", "good"), ("news", "bad")])

    asyncio.run(ask())


def manage(url: str, key: KeyOrKeys | None, headers: dict[str, str] | None) -> None:
    assert isinstance(key, str)
    with ManageClient(url, key=key, headers=headers) as client:
        client.list_tenants()


Ask = Callable[[str, "KeyOrKeys | None", "dict[str, str] | None"], None]


@pytest.mark.parametrize("ask", [predict, predict_async, manage])
@pytest.mark.parametrize("given", [KEY, f" {KEY}\r\n"], ids=["plain", "with blanks"])
def test_one_key_goes_in_the_header(server: Recorder, ask: Ask, given: str) -> None:
    with pytest.raises(ForbiddenError):
        ask(server.url, given, {"x-other": "1"})
    assert server.authorization == f"Bearer {KEY}"
    assert b'"KEY"' not in server.body


@pytest.mark.parametrize("ask", [predict, predict_async, manage])
def test_beside_a_header_for_a_proxy_the_key_goes_as_a_tensor(server: Recorder, ask: Ask) -> None:
    with pytest.raises(ForbiddenError):
        ask(server.url, KEY, {"Authorization": "Bearer of-the-proxy"})
    assert server.authorization == "Bearer of-the-proxy"
    assert b'"KEY"' in server.body
    assert server.body.count(KEY.encode()) == (1 if ask is manage else 2)


@pytest.mark.parametrize("ask", [predict, predict_async])
def test_each_text_has_the_key_of_its_own_tenant(server: Recorder, ask: Ask) -> None:
    with pytest.raises(ForbiddenError, match="the key is missing"):
        ask(server.url, {"films": KEY, "news": OTHER, "more": KEY}, None)
    assert server.authorization is None
    assert 0 < server.body.index(KEY.encode()) < server.body.index(OTHER.encode())


@pytest.mark.parametrize("ask", [predict, predict_async])
def test_a_tenant_without_a_key_is_named_before_anything_is_sent(server: Recorder, ask: Ask) -> None:
    with pytest.raises(ForbiddenError, match="this client has no key for tenant 'news'"):
        ask(server.url, {"films": KEY}, None)
    assert server.body == b""


@pytest.mark.parametrize("ask", [predict, predict_async, manage])
def test_no_key_is_in_an_error_or_a_traceback(server: Recorder, ask: Ask) -> None:
    for url, headers in ((server.url, None), ("http://127.0.0.1:1", None), (server.url, {"authorization": "Basic x"})):
        with pytest.raises(HplmError) as caught:
            ask(url, KEY, headers)
        shown = "".join(traceback.format_exception(caught.value))
        assert not any(secret in shown for secret in SECRETS)


def test_no_key_is_in_what_python_prints_of_a_client() -> None:
    client, manager = Client("http://127.0.0.1:1", key=KEY), ManageClient("http://127.0.0.1:1", key=KEY)
    shown = f"{client!r} {manager!r} {AccessKeys({'films': KEY}, None)!r}"
    assert not any(secret in shown for secret in SECRETS)


@pytest.mark.parametrize("made", [Client, ManageClient])
@pytest.mark.parametrize(
    "wrong",
    ["", "secret", f"{KEY[:-1]}\n{KEY[-1]}", f"Bearer {KEY}"],
    ids=["empty", "a word", "a line", "with its scheme"],
)
def test_a_text_that_is_no_key_is_refused_at_once_and_not_shown(made: Callable[..., object], wrong: str) -> None:
    with pytest.raises(ConfigError, match="the key has not the form hplm_ID_SECRET") as refused:
        made("http://127.0.0.1:1", key=wrong)
    assert "secret" not in str(refused.value)
    assert SECRETS[0] not in str(refused.value)


def test_commands_read_one_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPLM_KEY", raising=False)
    assert keys_from_environment() is None
    for value in (KEY, f"{KEY}\n", f"\t{KEY} \r\n"):
        monkeypatch.setenv("HPLM_KEY", value)
        assert keys_from_environment() == KEY


def test_commands_read_keys_by_tenant_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"films": KEY, "news": f" {OTHER}\n"}))
    monkeypatch.setenv("HPLM_KEY", f"@{path}\n")
    keys = keys_from_environment()
    assert keys == {"films": KEY, "news": OTHER}
    with pytest.raises(ConfigError, match="a manage request has one key"):
        one_key(keys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("secret", "it is not JSON"),
        ('["secret"]', "must be a JSON object"),
        ('{"films": "secret"}', r"tenant 'films' in .* has not the form"),
        ('{"films": ["secret"]}', r"tenant 'films' in .* has not the form"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("HPLM_KEY", f"@{path}")
    with pytest.raises(ConfigError, match=words) as refused:
        keys_from_environment()
    assert "secret" not in str(refused.value)


def test_a_wrong_key_in_the_environment_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPLM_KEY", "secret")
    with pytest.raises(ConfigError, match="HPLM_KEY: the key has not the form") as refused:
        keys_from_environment()
    assert "secret" not in str(refused.value)
