"""How clients may access a server of `hplm serve`: with or without keys, from this machine or from other machines."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hplm.access.access_mode import MODE_VARIABLE, OPEN, AccessMode, access_mode, keys_environment
from hplm.access.gate import MANAGE, server_header, server_proof
from hplm.access.keys import HEADER
from hplm.access.last_uses import LastUseCollector
from hplm.core.roles import served_base
from hplm.errors import StartError
from hplm.runtime.process import SHARED_MEMORY
from hplm.store.layout import Store
from hplm.triton.launcher.command_line import flag_values

# The prefix of the folders in memory, one for each start.
FOLDER_PREFIX = "hplm-access-"
# Seconds after its making during which a folder is left alone, because its server may be about to lock it.
YOUNG_S = 60.0
# Triton's options for the addresses on which it listens, and options that make it listen on further ports of all addresses.
ADDRESS_FLAGS = ("--http-address", "--grpc-address", "--metrics-address")
FURTHER_PORTS = ("--allow-sagemaker", "--allow-vertex-ai")
# Triton's options for a cache of answers. The cache answers before a key is checked.
CACHE_FLAGS = ("--cache-config", "--cache-directory", "--response-cache-byte-size")
# The version of a tenant in a request to an inner stage that does not know the version.
UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class ServeAccess:
    """The variables and flags of one start of Triton."""

    environment: Mapping[str, str] = field(repr=False)
    flags: tuple[str, ...]
    mode: AccessMode

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the headers with which `hplm serve` itself asks for an answer of a tenant. They are valid for 10 minutes."""
        return server_header(self.mode, tenant)

    def manage_proof(self) -> bytes | None:
        """Return the proof with which `hplm serve` itself asks the manager, None without keys, see `headers`."""
        return server_proof(self.mode, "", MANAGE)

    def inner_proof(self, tenant: str) -> bytes | None:
        """Return the proof with which `hplm serve` itself asks an inner stage, None without keys, see `headers`.

        The proof is for a question that knows no version of the tenant.
        """
        return server_proof(self.mode, tenant, str(UNKNOWN_VERSION))


WITHOUT_KEYS = ServeAccess({MODE_VARIABLE: OPEN}, (), AccessMode())


class LastUses:
    """The folder in memory of one start, and what records the last uses of keys from it, until `close`."""

    def __init__(self, folder: Path, store: Store) -> None:
        """Make the folder, and lock it until `close`. The folders of killed servers are removed."""
        remove_dead_folders(folder.parent)
        self._folder = folder
        folder.mkdir(mode=0o700)
        self._lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._collector = LastUseCollector(folder, store)
        self._collector.start()

    def close(self) -> None:
        """Record what is left, and remove the folder."""
        self._collector.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def remove_dead_folders(parent: Path) -> None:
    """Remove the folders of this user that no living server locks."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            made = folder.lstat()
            if made.st_uid != os.geteuid() or time.time() - made.st_mtime < YOUNG_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def record_last_uses(access: ServeAccess, models: Path) -> LastUses | None:
    """Begin to record when keys were last used with a repository's server; None if the server needs no keys."""
    if access.mode.folder is None:
        return None
    served = served_base(models)
    return LastUses(access.mode.folder, Store(served.store_root, served.settings.encode.registry))


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
        environment = keys_environment(SHARED_MEMORY / f"{FOLDER_PREFIX}{secrets.token_hex(8)}")
        forward = (f"--http-header-forward-pattern={HEADER}", f"--grpc-header-forward-pattern={HEADER}")
        return ServeAccess(environment, forward, access_mode({**os.environ, **environment}))
    if not insecure:
        _check_loopback(host, flags)
    return WITHOUT_KEYS


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
        # The name has no address; `check_free` says so if `--insecure` is given.
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
