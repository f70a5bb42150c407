"""Server addresses: `http://HOST:PORT` or `grpc://HOST:PORT`; over TLS `https://HOST` or `grpcs://HOST`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hplm.errors import ConfigError

TLS = {"https": "http", "grpcs": "grpc"}
TLS_PORT = 443


@dataclass(frozen=True)
class Address:
    """`protocol` is `http` or `grpc`, `host` is `host:port`."""

    protocol: str
    host: str
    tls: bool = False


def split_url(url: str) -> Address:
    """Raises ConfigError."""
    if not isinstance(url, str):
        raise ConfigError(f"an address is a str, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # a part of a name that is empty or too long: UnicodeError, a ValueError
    except ValueError:
        host = port = None
    tls = parts.scheme in TLS if host else False
    if tls and port is None:
        port = TLS_PORT
    # A name and password, a query or a fragment would be sent to nobody.
    plain = host and port is not None and parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in url)
    protocol = TLS.get(parts.scheme, parts.scheme) if host else ""
    if not plain or protocol not in ("http", "grpc"):
        # What stands before an @ may be a password.
        shown = "what has an @ in it" if "@" in url else repr(url)
        raise ConfigError(
            f"{shown} is not an address; write http://HOST:8000 or grpc://HOST:8001, over TLS https://HOST or grpcs://HOST"
        )
    return Address(protocol, f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}", tls)
