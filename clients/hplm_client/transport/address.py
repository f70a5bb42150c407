"""Server addresses: `http://HOST:PORT` or `grpc://HOST:PORT`; over TLS `https://HOST` or `grpcs://HOST`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hplm.errors import ConfigError

TLS_SCHEMES = {"https": "http", "grpcs": "grpc"}
TLS_PORT = 443


@dataclass(frozen=True)
class Address:
    """A server's address: `protocol` is `http` or `grpc`, `host` is `host:port`."""

    protocol: str
    host: str
    tls: bool = False


def split_url(url: str) -> Address:
    """Return the address that a URL names. Raises ConfigError."""
    if not isinstance(url, str):
        raise ConfigError(f"an address is a str, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        # An empty or too long part of a host name raises UnicodeError, which is a ValueError.
        (host or "").encode("idna")
    except ValueError:
        host = port = None
    tls = parts.scheme in TLS_SCHEMES if host else False
    if tls and port is None:
        port = TLS_PORT
    # A user name, password, query or fragment is refused, because no transport would send it.
    has_extras = host and (parts.path not in ("", "/") or parts.query or parts.fragment or "@" in url)
    protocol = TLS_SCHEMES.get(parts.scheme, parts.scheme) if host else ""
    if port is None or has_extras or protocol not in ("http", "grpc"):
        # The text before an @ may be a password.
        shown = "a URL with an @" if "@" in url else repr(url)
        raise ConfigError(
            f"{shown} is not an address; write http://HOST:8000 or grpc://HOST:8001, over TLS https://HOST or grpcs://HOST"
        )
    return Address(protocol, f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}", tls)
