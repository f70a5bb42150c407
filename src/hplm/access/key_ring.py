"""The keys of a registry in memory, which a thread keeps up to date."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hplm.access.keys import Key, new_key, parse
from hplm.access.last_uses import LastUseWriter
from hplm.access.roles import Scope, scopes_of
from hplm.errors import ForbiddenError, RegistryUnavailableError
from hplm.registry.access.keys import AccessKey
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.registry import Registry
from hplm.runtime.polling import Poller
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.store.layout import Store

# The same words for every reason, so that a client cannot learn which tenants or keys exist.
REFUSED: Final = "the key is missing, or is not valid for this tenant"
REFUSED_ACTION: Final = "the key is missing, or is not valid for this action"


class KeyRing:
    """The keys that are neither revoked nor deleted, found by their id. Safe to use from several threads.

    If the registry cannot be read, the known keys stay valid, `failures` grows and the log says why. Raises RegistryError
    on construction.
    """

    def __init__(
        self,
        store: Store,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys. The last uses of keys are written into `folder` if there is one, see `hplm.access.last_uses`."""
        self._uses = None if folder is None else LastUseWriter(folder, clock)
        self._unix_clock = unix_clock
        self._refreshing = threading.Lock()
        self._generation = 0
        self._read_s = 0.0
        self._keys: dict[str, AccessKey] = {}
        self._last_uses: dict[str, float] = {}
        # Takes the place of a key that does not exist, so that the check does the same work.
        self._dummy_key: Key = new_key()
        self._dummy = AccessKey("", None, "", secrets.token_bytes(32), 0.0, 0.0, None, None)
        self._registry = Registry.open_read_only(store)
        self._poller = Poller(
            self.refresh,
            name="hplm-keys",
            every_s=POLL_EVERY_S,
            fault="the registry cannot be read, the known keys stay valid",
            afterwards=self._write_uses,
            clock=clock,
        )
        try:
            self.refresh()
        except BaseException:
            self._registry.close()
            raise

    def __len__(self) -> int:
        return len(self._keys)

    def start(self) -> None:
        """Start to poll the registry."""
        self._poller.start()

    def close(self) -> None:
        """Stop polling. The known keys stay known."""
        self._poller.close()
        self._registry.close()

    @property
    def failures(self) -> int:
        """The number of polls that failed or took too long."""
        return self._poller.failures

    def check(self, key: bytes, tenant: str, scope: Scope = "infer") -> str:
        """Return the id of a key that is valid for the tenant and scope. `key` is the text that the client sent.

        Raises ForbiddenError, with the same words and after the same work, for an unknown tenant, an unknown or malformed
        key, a wrong secret, a revoked or expired key, and a key of another tenant or scope.
        """
        found, is_valid = self._find(key)
        if is_valid & (found.tenant == tenant) & (scope in scopes_of(found.role)):
            self._last_uses[found.id] = self._unix_clock()
            return found.id
        raise ForbiddenError(REFUSED)

    def holder(self, key: bytes) -> AccessKey:
        """Return a key that is valid for something: its role and tenant say for what, see `hplm.access.roles.allows`.

        Raises ForbiddenError, after the same work as `check`.
        """
        found, is_valid = self._find(key)
        if is_valid:
            self._last_uses[found.id] = self._unix_clock()
            return found
        raise ForbiddenError(REFUSED_ACTION)

    def is_gone(self, key_id: str, checked_s: float) -> bool:
        """Return whether a key that another process accepted at `checked_s`, in unix seconds, is revoked or expired.

        A key that is not known here is not gone if it was accepted after the last reading of the registry: it may be new.
        """
        read_s, found = self._read_s, self._keys.get(key_id)
        if found is None:
            return checked_s < read_s
        return found.expires_s is not None and self._unix_clock() >= found.expires_s

    def take_last_uses(self) -> dict[str, float]:
        """Return when each key was used since the last call, in unix seconds by the key's id."""
        taken, self._last_uses = self._last_uses, {}
        return dict(taken)  # a check under way may still write to the old dictionary

    def refresh(self) -> None:
        """Apply what has changed since the last time. Raises RegistryError."""
        with self._refreshing:
            began_s = self._unix_clock()
            if self._registry.generation() == self._generation:
                self._read_s = began_s
                return
            changes = self._registry.keys_since(self._generation)
            if changes.full and self._keys and not changes.keys:
                # The registry was lost and is being made anew. Refusing all requests would end the service.
                raise RegistryUnavailableError(
                    f"the registry has no key, though {len(self._keys):,} were known; restore it from a backup, or create keys"
                )
            keys = {} if changes.full else dict(self._keys)
            for key in changes.keys:
                if key.revoked_s is None:
                    keys[key.id] = key
                else:
                    keys.pop(key.id, None)
            self._keys, self._generation = keys, changes.generation
            self._read_s = began_s

    def _write_uses(self) -> None:
        if self._uses is not None:
            try:
                self._uses.add(self.take_last_uses())
            except OSError as error:
                log_rate_limited("the last uses of keys cannot be written; they are tried again", error)

    def _find(self, raw: bytes) -> tuple[AccessKey, bool]:
        """Return the key with the id in `raw`, and whether its secret is right and it has not expired."""
        key = parse(raw.strip()) or self._dummy_key
        found = self._keys.get(key.id, self._dummy)
        is_right = hmac.compare_digest(key.sha256(), found.sha256)
        return found, is_right & (self._unix_clock() < (math.inf if found.expires_s is None else found.expires_s))
