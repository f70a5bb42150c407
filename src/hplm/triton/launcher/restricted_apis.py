"""Triton's APIs that only the launcher may use: they load and unload models, and read or change what all tenants share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# The value of HEADER is drawn at each start.
HEADER = "hplm-launcher"
APIS = ("model-repository", "shared-memory", "trace", "logging", "statistics")
HTTP_FLAG, GRPC_FLAG = "--http-restricted-api", "--grpc-restricted-protocol"


@dataclass(frozen=True)
class RestrictedApis:
    """`flags` for Triton, the `headers` with which the launcher may use every API over HTTP, and the secret among them."""

    flags: tuple[str, ...]
    headers: Mapping[str, str] = field(repr=False)
    secret: str = field(repr=False)


def restrict(given_flags: Sequence[str]) -> RestrictedApis:
    """Restrict APIS to this process. An API that the operator's `given_flags` restrict already keeps the operator's header."""
    secret = secrets.token_hex(32)
    headers = {HEADER: secret}
    flags = []
    for flag in (HTTP_FLAG, GRPC_FLAG):
        restricted: set[str] = set()
        # `--http-restricted-api=API,API:NAME=VALUE`
        for value in _values(given_flags, flag):
            apis, _, header = value.partition(":")
            restricted.update(api.strip() for api in apis.split(","))
            if flag == HTTP_FLAG:
                name, _, text = header.partition("=")
                headers[name.strip()] = text
        if free := [api for api in APIS if api not in restricted]:
            flags.append(f"{flag}={','.join(free)}:{HEADER}={secret}")
    return RestrictedApis(tuple(flags), headers, secret)


def _values(flags: Sequence[str], name: str) -> Iterator[str]:
    """Yield the values of a flag that may be given several times, as `NAME=VALUE` or as two arguments."""
    for index, flag in enumerate(flags):
        key, sign, value = flag.partition("=")
        if key == name:
            yield value if sign else "".join(flags[index + 1 : index + 2])
