"""The part of the registry that holds the keys of tenants and operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, or_, select, update

from hplm.errors import BadManageRequestError, UnknownKeyError
from hplm.registry.database import RegistryPart, bump
from hplm.registry.schema import keys, state
from hplm.registry.tenant_bases import current_numbers

# Most keys of one tenant, and of all operators, that are not revoked. Servers hold all keys in memory.
MOST_KEYS = 100
# Seconds for which a revoked or expired key is still listed: a year.
KEEP_S = 365 * 86_400.0


@dataclass(frozen=True)
class AccessKey:
    """A key without its secret. `tenant` is None for an operator's key; `sha256` is of the secret, 32 bytes.

    Times are unix seconds. `expires_s` None means never.
    """

    id: str
    tenant: str | None
    role: str
    sha256: bytes = field(repr=False)
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None


@dataclass(frozen=True)
class KeyChanges:
    """Keys that changed up to `generation`. With `full` they are all keys, and other keys are gone."""

    generation: int
    keys: tuple[AccessKey, ...]
    full: bool


class Keys(RegistryPart):
    """Keys. The registry never holds a secret."""

    def add_key(self, key: AccessKey) -> None:
        """Add a new key. Raises UnknownTenantError, or BadManageRequestError if the tenant has too many keys already."""
        with self._database.writing() as connection:
            if key.tenant is not None:
                current_numbers(connection, key.tenant)
            k = keys.c
            old = key.created_s - KEEP_S
            connection.execute(delete(keys).where(or_(k.revoked_s < old, k.expires_s < old)))
            of_owner = k.tenant.is_(None) if key.tenant is None else k.tenant == key.tenant
            count = connection.scalar(select(func.count()).where(of_owner, k.revoked_s.is_(None)))
            if (count or 0) >= MOST_KEYS:
                owner = "operators" if key.tenant is None else f"tenant {key.tenant!r}"
                raise BadManageRequestError(f"{owner} has {MOST_KEYS} keys already: revoke some (`hplm key list`)")
            values = {**vars(key), "sha256": key.sha256.hex(), "generation": bump(connection)}
            connection.execute(insert(keys).values(values))

    def revoke_key(self, key_id: str, now_s: float) -> AccessKey:
        """Revoke a key and return it; a key that is revoked already stays as it is. Raises UnknownKeyError."""
        with self._database.writing() as connection:
            found = _key(connection, key_id)
            if found.revoked_s is None:
                values = {"revoked_s": now_s, "generation": bump(connection)}
                connection.execute(update(keys).where(keys.c.id == key_id).values(values))
            return _key(connection, key_id)

    def key(self, key_id: str) -> AccessKey:
        """Return a key. Raises UnknownKeyError."""
        with self._database.reading() as connection:
            return _key(connection, key_id)

    def access_keys(self, *, tenant: str | None = None, after: str = "", limit: int = 100) -> list[AccessKey]:
        """List at most `limit` keys by their ids after `after`: all keys, or those of one tenant."""
        query = select(keys).where(keys.c.id > after).order_by(keys.c.id).limit(limit)
        if tenant is not None:
            query = query.where(keys.c.tenant == tenant)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def keys_since(self, generation: int) -> KeyChanges:
        """Return the keys that changed after `generation`, or all if it is 0 or belongs to another registry."""
        with self._database.reading() as connection:
            now, floor = connection.execute(select(state.c.generation, state.c.floor)).one()
            full = not floor <= generation <= now
            query = select(keys).where(keys.c.generation > (0 if full else generation))
            found = tuple(_record(row) for row in connection.execute(query))
        return KeyChanges(now, found, full)

    def note_key_uses(self, used_s: Mapping[str, float]) -> None:
        """Record when keys were last used, in unix seconds by their ids. An older time than the recorded one is ignored."""
        if not used_s:
            return
        changed = update(keys).where(
            keys.c.id == bindparam("of_key"),
            or_(keys.c.last_used_s.is_(None), keys.c.last_used_s < bindparam("used_s")),
        )
        with self._database.writing() as connection:
            rows = [{"of_key": key_id, "used_s": time_s} for key_id, time_s in used_s.items()]
            connection.execute(changed.values(last_used_s=bindparam("used_s")), rows)


def _key(connection: Connection, key_id: str) -> AccessKey:
    row = connection.execute(select(keys).where(keys.c.id == key_id)).first()
    if row is None:
        raise UnknownKeyError(f"there is no key {key_id!r}: give the id, the part between `hplm_` and the second `_`")
    return _record(row)


def _record(row: Row[tuple[object, ...]]) -> AccessKey:
    values = dict(row._mapping)
    del values["generation"]
    return AccessKey(**{**values, "sha256": bytes.fromhex(values["sha256"])})
