"""Headers that a client sends with each request, such as a token for a proxy in front of the server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from hplm.errors import ConfigError

HEADERS_VARIABLE = "HPLM_HEADERS"
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# gRPC reads the value of a name that ends with -bin as bytes.
GRPC_NAME = re.compile(r"(?!.*-bin\Z)[0-9a-z_.-]+")
VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def checked_headers(headers: Mapping[str, str], protocol: str = "http") -> dict[str, str]:
    """Return the headers with lower-case names, because gRPC refuses capitals.

    Raises ConfigError, which shows no value because a value may be a secret.
    """
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers are a mapping of names to values, not {type(headers).__name__}")
    for name, value in headers.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise ConfigError(f"{name!r} is not a name of a header")
        if protocol == "grpc" and not GRPC_NAME.fullmatch(name.lower()):
            raise ConfigError(
                f"{name.lower()!r} is not a name of a header over gRPC: use letters, digits and _ . -, and no -bin at the end"
            )
        if not (isinstance(value, str) and VALUE.fullmatch(value)):
            raise ConfigError(
                f"header {name}: the value must be printable ASCII, without spaces or line ends before or after it"
            )
    return {name.lower(): value for name, value in headers.items()}


def headers_from_environment() -> dict[str, str]:
    """Return the headers that commands send: the JSON object in `HPLM_HEADERS`. Raises ConfigError."""
    try:
        headers = json.loads(os.environ.get(HEADERS_VARIABLE) or "{}")
    except ValueError:
        headers = None
    if not isinstance(headers, dict):
        # The error does not show the value, because it may be a secret.
        raise ConfigError(f'{HEADERS_VARIABLE} must be a JSON object of strings, as {{"authorization": "Bearer ..."}}')
    return checked_headers(headers)
