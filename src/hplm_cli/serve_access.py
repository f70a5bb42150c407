"""Who may call a server that `hplm serve` starts: keys, and from where it can be reached."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hplm.access.access_mode import MODE_VARIABLE, OPEN, AccessMode, access_mode, keys_environment
from hplm.access.gate import server_header
from hplm.access.keys import HEADER
from hplm.errors import StartError
from hplm.triton.launcher.command_line import flag_values

# Triton's options for the addresses on which it listens, and options that make it listen on further ports of all addresses.
ADDRESS_FLAGS = ("--http-address", "--grpc-address", "--metrics-address")
FURTHER_PORTS = ("--allow-sagemaker", "--allow-vertex-ai")
# Triton's options for a cache of answers. The cache answers before a key is checked.
CACHE_FLAGS = ("--cache-config", "--cache-directory", "--response-cache-byte-size")


@dataclass(frozen=True)
class ServeAccess:
    """The variables and flags of one start of Triton."""

    environment: Mapping[str, str] = field(repr=False)
    flags: tuple[str, ...]
    mode: AccessMode

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the headers with which `hplm serve` itself asks for an answer of a tenant. They are valid for 10 minutes."""
        return server_header(self.mode, tenant)


def choose_access(*, keys: bool, insecure: bool, host: str, flags: Sequence[str]) -> ServeAccess:
    """Return how a server is accessed that listens on `host`, with the operator's `flags` for Triton.

    Keys are on with `keys`, or if the environment says so. Raises StartError if the server could be reached from other
    machines without keys, unless `insecure`; or if the flags do not fit keys. Raises ConfigError if the environment is wrong.
    """
    needs_keys = keys or os.environ.get(MODE_VARIABLE, OPEN) != OPEN
    if needs_keys and insecure:
        raise StartError("--insecure is for a server without keys: leave it out, or leave out --keys and HPLM_ACCESS")
    if needs_keys:
        if cached := next((flag for flag in CACHE_FLAGS if any(flag_values(flags, flag))), None):
            raise StartError(f"{cached}: Triton's cache of answers would answer clients without a key; leave it out")
        environment = keys_environment()
        forward = (f"--http-header-forward-pattern={HEADER}", f"--grpc-header-forward-pattern={HEADER}")
        return ServeAccess(environment, forward, access_mode({**os.environ, **environment}))
    if not insecure:
        _check_loopback(host, flags)
    return ServeAccess({MODE_VARIABLE: OPEN}, (), AccessMode())


def _check_loopback(host: str, flags: Sequence[str]) -> None:
    """Raise StartError if a server can be reached from other machines."""
    listens = [("--host", host), *((flag, value) for flag in ADDRESS_FLAGS for value in flag_values(flags, flag))]
    reachable = [f"{flag} {address}" for flag, address in listens if not _is_loopback(address)]
    reachable += [
        flag for flag in FURTHER_PORTS for value in flag_values(flags, flag) if value.lower() not in ("0", "false")
    ]
    if reachable:
        raise StartError(
            f"{reachable[0]}: other machines could call every tenant and the manager, because requests need no keys. Give "
            "--keys (docs/access.md), or --insecure if only trusted clients reach this address"
        )


def _is_loopback(host: str) -> bool:
    """Return whether an address, or every address of a name, is one of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        # A name that this machine does not know; `check_free` says so.
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
