"""Server addresses: `http://host:port` or `grpc://host:port`."""

from __future__ import annotations

from urllib.parse import urlsplit

from hplm.errors import ConfigError


def split_url(url: str) -> tuple[str, str]:
    """(`http` or `grpc`, `host:port`). Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    # A name and password, a query or a fragment would be sent to nobody.
    plain = host and port is not None and parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in url)
    if not plain or parts.scheme not in ("http", "grpc"):
        raise ConfigError(f"{url!r} is not an address; write http://HOST:8000 or grpc://HOST:8001")
    return parts.scheme, f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
