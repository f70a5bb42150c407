"""tritonclient's clients of an address: plain or over TLS, with headers for whoever guards the server."""

from __future__ import annotations

import importlib
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any

from hplm.errors import ConfigError
from hplm_client.address import Address

HEADERS_VARIABLE = "HPLM_HEADERS"


def connect(
    address: Address,
    headers: Mapping[str, str] | None,
    *,
    timeout_s: float,
    concurrency: int = 1,
    is_async: bool = False,
) -> tuple[Any, Any]:
    """tritonclient's module for the address, and a client of it; `timeout_s` is for HTTP, over gRPC each call has its own.

    Over TLS the server's certificate must be one that the system trusts, or that the file of `SSL_CERT_FILE` signed.
    `headers` None: those of `HPLM_HEADERS`. Raises ConfigError.
    """
    module = importlib.import_module(f"tritonclient.{address.protocol}{'.aio' if is_async else ''}")
    options: dict[str, Any] = {}
    if address.protocol == "grpc":
        if address.tls:
            options.update(ssl=True, root_certificates=ssl.get_default_verify_paths().cafile)
    elif is_async:
        options.update(conn_timeout=timeout_s)
        if address.tls:
            options.update(ssl=True, ssl_context=ssl.create_default_context())
    else:
        options.update(concurrency=concurrency, connection_timeout=timeout_s, network_timeout=timeout_s)
        if address.tls:
            # Imported late: with gevent come its loops.
            from gevent.ssl import create_default_context

            # Left to itself, gevent's client trusts a list of its own.
            options.update(ssl=True, ssl_context_factory=lambda cafile: create_default_context())
    triton = module.InferenceServerClient(address.host, **options)
    given = headers_of_environment() if headers is None else headers
    # gRPC, which calls them metadata, refuses capitals; HTTP does not mind.
    added = {name.lower(): value for name, value in given.items()}
    triton.register_plugin(lambda request: request.headers.update(added))
    return module, triton


def headers_of_environment() -> Mapping[str, str]:
    """A JSON object of names and values in `HPLM_HEADERS`. Raises ConfigError."""
    try:
        found = json.loads(os.environ.get(HEADERS_VARIABLE) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        # Not what it holds: that may be a secret.
        raise ConfigError(f'{HEADERS_VARIABLE} must be a JSON object of strings, as {{"authorization": "Bearer ..."}}')
    return found
