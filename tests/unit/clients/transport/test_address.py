"""Addresses, headers and certificates of a client."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient
from hplm_client.transport.address import Address, split_url
from hplm_client.transport.headers import HEADERS_VARIABLE, headers_from_environment

from hplm.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("http", "127.0.0.1:8000")),
        ("grpc://triton.example:8001/", Address("grpc", "triton.example:8001")),
        ("http://[::1]:8000", Address("http", "[::1]:8000")),
        ("https://triton.example", Address("http", "triton.example:443", tls=True)),
        ("grpcs://triton.example:8443", Address("grpc", "triton.example:8443", tls=True)),
    ],
)
def test_an_address_is_a_protocol_a_host_and_a_port(url: str, address: Address) -> None:
    assert split_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "127.0.0.1:8000",
            "ftp://a:8000",
            "https://",
            "http://a",
            "http://:8000",
            "http://a..b:8000",
            "http://a:99999",
            "http://[::1:8000",
        ),
        *("http://me:secret@a:8000", "http://a:8000/v2", "http://a:8000?x=1", "grpc://a:8001#x"),
    ],
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; write"):
        split_url(url)


@pytest.mark.parametrize("url", ["http://me:secret@a:8000", "https://me:secret@a"])
def test_a_password_in_an_address_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        split_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", ["authorization: Bearer secret", '["secret"]', '{"authorization": ["secret"]}'])
def test_headers_of_another_form_than_a_json_object_of_strings_are_refused_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, value)
    with pytest.raises(ConfigError, match=r"HPLM_HEADERS must be a JSON object|header authorization") as refused:
        headers_from_environment()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
@pytest.mark.parametrize("made", [Client, ManageClient])
@pytest.mark.parametrize(
    "headers",
    [{"a": "secret\n"}, {"a": "secret\r\nb: c"}, {"a": ""}, {"a": "sécret"}, {"a": 1}, {"a b": "x"}, {"": "x"}],
)
def test_a_header_that_cannot_be_sent_is_refused_at_once_and_its_value_is_not_shown(
    url: str, made: Callable[..., object], headers: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="header") as refused:
        made(url, headers=headers)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("made", [Client, ManageClient])
@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "grpcs://127.0.0.1:1"])
def test_a_missing_file_of_certificates_is_named(
    url: str, made: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such.pem")
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE names /no/such\.pem"):
        made(url)


@pytest.mark.parametrize("made", [Client, ManageClient])
@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "grpcs://127.0.0.1:1"])
def test_a_file_without_certificates_is_named(
    url: str, made: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "empty.pem"))
    with pytest.raises(ConfigError, match=r"empty\.pem, which holds no certificates"):
        made(url)


def test_grpc_does_not_fall_back_to_its_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    without_file = ssl.get_default_verify_paths()._replace(cafile=None)
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: without_file)
    with pytest.raises(ConfigError, match="set SSL_CERT_FILE"):
        Client("grpcs://127.0.0.1:1")
