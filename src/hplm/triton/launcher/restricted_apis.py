"""Triton's APIs that only the launcher may use: they load and unload models, and read or change what all tenants share.

Triton takes the secret value of their header as an argument only, which `ps` shows to every user of the machine for as long
as Triton runs. So the launcher overwrites the secret in Triton's arguments once Triton has read them. Until then, for some
tenths of a second of each start, other users of the machine can read the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hplm.runtime.process import stat_of
from hplm.triton.launcher.command_line import flag_values

# The value of HEADER is drawn at each start.
HEADER = "hplm-launcher"
APIS = ("model-repository", "shared-memory", "trace", "logging", "statistics")
HTTP_FLAG, GRPC_FLAG = "--http-restricted-api", "--grpc-restricted-protocol"
# Indices in `stat_of`: the addresses of a process's arguments. Both are 0 if the system does not tell them.
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46


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
        for value in flag_values(given_flags, flag):
            apis, _, header = value.partition(":")
            restricted.update(api.strip() for api in apis.split(","))
            if flag == HTTP_FLAG:
                name, _, text = header.partition("=")
                headers[name.strip()] = text
        if free := [api for api in APIS if api not in restricted]:
            flags.append(f"{flag}={','.join(free)}:{HEADER}={secret}")
    return RestrictedApis(tuple(flags), headers, secret)


def hide_secret(pid: int, secret: str) -> bool:
    """Overwrite a secret in the arguments of a child process. Return False if the system does not allow it.

    Call it only when the child has read its arguments.
    """
    hidden = secret.encode()
    try:
        fields = stat_of(pid)
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            at = arguments.find(hidden)
            while at >= 0:
                memory.seek(start + at)
                memory.write(b"*" * len(hidden))
                at = arguments.find(hidden, at + len(hidden))
        with open(f"/proc/{pid}/cmdline", "rb") as shown:
            return hidden not in shown.read()
    except (OSError, ValueError, IndexError):
        return False
