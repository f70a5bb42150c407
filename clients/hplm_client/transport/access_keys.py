"""The keys that a client sends: one key for all its requests, or a key for each tenant."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from hplm.access.keys import HEADER, KEY_VARIABLE, checked_key, header_of
from hplm.errors import ConfigError, ForbiddenError
from hplm_client.transport.headers import checked_headers

# A key, or keys by the names of tenants.
KeyOrKeys: TypeAlias = "str | Mapping[str, str]"


class AccessKeys:
    """The keys of one client, and how they travel.

    One key goes in the header `authorization`. It goes as a tensor beside each text if `headers` use that header already, as a
    proxy may want. Keys by tenant always go as a tensor. Raises ConfigError, which shows no key.
    """

    def __init__(self, key: KeyOrKeys | None, headers: Mapping[str, str] | None) -> None:
        self.headers = {} if headers is None else headers
        self._key: str | None = None
        self._by_tenant: Mapping[str, str] | None = None
        if key is None:
            return
        if isinstance(key, Mapping):
            self._by_tenant = {tenant: checked_key(value) for tenant, value in key.items()}
        elif HEADER in checked_headers(self.headers):
            self._key = checked_key(key)
        else:
            self.headers = {**self.headers, **header_of(key)}

    def of_tenants(self, tenants: Sequence[str]) -> list[bytes] | None:
        """Return the key for each text's tenant, for the tensor KEY; None if the header has the key, or there is no key.

        Raises ForbiddenError for a tenant without a key.
        """
        if self._by_tenant is None:
            return None if self._key is None else [self._key.encode()] * len(tenants)
        if missing := [tenant for tenant in tenants if tenant not in self._by_tenant]:
            raise ForbiddenError(f"this client has no key for tenant {missing[0]!r}")
        return [self._by_tenant[tenant].encode() for tenant in tenants]

    def of_operator(self) -> bytes | None:
        """Return the key for the tensor KEY of a manage request; None if the header has the key, or there is no key."""
        return None if self._key is None else self._key.encode()


def one_key(key: KeyOrKeys | None) -> str | None:
    """Return a key for manage requests. Raises ConfigError for keys by tenant, because a manage request has one key."""
    if isinstance(key, Mapping):
        raise ConfigError("a manage request has one key, not a key for each tenant: give an operator's key")
    return key


def keys_from_environment() -> KeyOrKeys | None:
    """Return what commands send: the key in `HPLM_KEY`, or the keys by tenant of the JSON file that `@FILE` in it names.

    Raises ConfigError, which shows no key.
    """
    value = os.environ.get(KEY_VARIABLE, "").strip()
    if not value:
        return None
    if not value.startswith("@"):
        return _checked(value, KEY_VARIABLE)
    path = Path(value[1:])
    try:
        keys = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(f"{KEY_VARIABLE} names {path}, which cannot be read: {reason}") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{KEY_VARIABLE} names {path}, which must be a JSON object of tenants and their keys")
    return {tenant: _checked(key, f"tenant {tenant!r} in {path}") for tenant, key in keys.items()}


def _checked(key: str, place: str) -> str:
    try:
        return checked_key(key)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
