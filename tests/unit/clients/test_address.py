"""Addresses of servers."""

from __future__ import annotations

import pytest
from hplm_client.address import split_url

from hplm.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1:8000")),
        ("grpc://triton.example:8001/", ("grpc", "triton.example:8001")),
        ("http://[::1]:8000", ("http", "[::1]:8000")),
    ],
)
def test_an_address_is_a_protocol_a_host_and_a_port(url: str, found: tuple[str, str]) -> None:
    assert split_url(url) == found


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8000", "https://a:8000", "http://a", "http://:8000", "http://a:99999", "http://[::1:8000"),
        *("http://me:secret@a:8000", "http://a:8000/v2", "http://a:8000?x=1", "grpc://a:8001#x"),
    ],
)
def test_anything_else_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; write"):
        split_url(url)
