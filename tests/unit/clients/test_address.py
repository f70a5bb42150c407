"""Addresses of servers."""

from __future__ import annotations

import pytest
from hplm_client import Client
from hplm_client.address import Address, split_url
from hplm_client.connection import HEADERS_VARIABLE

from hplm.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", Address("http", "127.0.0.1:8000")),
        ("grpc://triton.example:8001/", Address("grpc", "triton.example:8001")),
        ("http://[::1]:8000", Address("http", "[::1]:8000")),
        ("https://triton.example", Address("http", "triton.example:443", tls=True)),
        ("grpcs://triton.example:8443", Address("grpc", "triton.example:8443", tls=True)),
    ],
)
def test_an_address_is_a_protocol_a_host_and_a_port(url: str, found: Address) -> None:
    assert split_url(url) == found


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
            "http://a:99999",
            "http://[::1:8000",
        ),
        *("http://me:secret@a:8000", "http://a:8000/v2", "http://a:8000?x=1", "grpc://a:8001#x"),
    ],
)
def test_anything_else_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; write"):
        split_url(url)


@pytest.mark.parametrize("value", ["authorization: Bearer x", "[1]", '{"authorization": 1}'])
def test_headers_that_are_no_json_object_of_strings_are_refused_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, value)
    with pytest.raises(ConfigError, match="HPLM_HEADERS must be a JSON object") as said:
        Client("http://127.0.0.1:1")
    assert "Bearer x" not in str(said.value)
