"""Server addresses: `http://host:port` or `grpc://host:port`."""

from __future__ import annotations

from urllib.parse import urlsplit

from hplm.errors import ConfigError


def split_url(url: str) -> tuple[str, str]:
    """(`http` or `grpc`, `host:port`). Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "grpc") or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"{url!r} is not an address; write http://HOST:8000 or grpc://HOST:8001")
    return parts.scheme, f"{parts.hostname}:{port}"
