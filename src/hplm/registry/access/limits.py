"""The part of the registry that holds the limits of tenants, and what servers have leased of them.

In the table `leases`, a row without a server is a tenant's account: what is left of its quotas, and when. A row without a
tenant says that a server lives. All other rows are leases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, delete, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from hplm.quotas.limits import Limits, Use
from hplm.quotas.token_bucket import Bucket, Rate, full, given_back, settle
from hplm.registry.database import IN_ONE_QUERY, RegistryPart, bump
from hplm.registry.schema import leases, limits, state
from hplm.registry.tenant_bases import current_numbers

# The tenant of the limits of all tenants that have none of their own.
DEFAULT: Final = ""
# The server of a tenant's account.
_ACCOUNT: Final = ""
# Seconds for which a server counts as alive after its last sign, and for which its leases are its own.
ALIVE_S = 3.0
# Seconds after which an unused account is full again at any rate that a limit may have, so that its row may be deleted.
FULL_AFTER_S = 600.0


@dataclass(frozen=True)
class LimitChanges:
    """Limits that changed up to `generation`, by tenant. With `full` they are all limits, and other limits are gone."""

    generation: int
    limits: Mapping[str, Limits]
    full: bool


class TenantLimits(RegistryPart):
    """Limits and leases. Leases are on the database's clock, so that servers with different clocks agree."""

    def set_limits(self, tenant: str, new: Limits) -> None:
        """Set a tenant's limits in place of earlier ones, or the default of all tenants. Raises UnknownTenantError.

        The accounts of all whom the limits are for begin anew, without debts.
        """
        with self._database.writing() as connection:
            if tenant != DEFAULT:
                current_numbers(connection, tenant)
            values = {**new.quotas, "generation": bump(connection)}
            changed = connection.execute(update(limits).where(limits.c.tenant == tenant).values(values))
            if not changed.rowcount:
                connection.execute(insert(limits).values(tenant=tenant, **values))
            whose = leases.c.tenant == tenant if tenant != DEFAULT else leases.c.tenant != ""
            connection.execute(delete(leases).where(whose))

    def limits(self, tenant: str) -> Limits:
        """Return the limits of a tenant's own, or the default of all tenants."""
        with self._database.reading() as connection:
            row = connection.execute(select(limits).where(limits.c.tenant == tenant)).first()
        return Limits() if row is None else _limits(row)

    def limits_since(self, generation: int) -> LimitChanges:
        """Return the limits that changed after `generation`, or all if it is 0 or belongs to another registry."""
        with self._database.reading() as connection:
            now, floor = connection.execute(select(state.c.generation, state.c.floor)).one()
            full_list = not floor <= generation <= now
            query = select(limits).where(limits.c.generation > (0 if full_list else generation))
            found = {row.tenant: _limits(row) for row in connection.execute(query)}
        return LimitChanges(now, found, full_list)

    def announce_server(self, server: str) -> int:
        """Note that a server lives, and return how many do. Accounts and servers that nobody needs any more are removed."""
        with self._database.writing() as connection:
            now_s = _now_s(connection)
            is_server = leases.c.tenant == ""
            # Times later than that were written before the clock stepped back. They would count as long as the step.
            latest_s = now_s + ALIVE_S
            connection.execute(update(leases).where(leases.c.until_s > latest_s).values(until_s=latest_s))
            connection.execute(delete(leases).where(is_server, leases.c.until_s < now_s))
            connection.execute(
                delete(leases).where(leases.c.server == _ACCOUNT, leases.c.until_s < now_s - FULL_AFTER_S)
            )
            _put(connection, [_row(server, "", latest_s, {})])
            return connection.scalar(select(func.count()).where(is_server)) or 0

    def settle_quotas(self, server: str, spent: Mapping[str, Use], of: Mapping[str, Limits]) -> dict[str, Use]:
        """Book what the tenants have spent on a server since it last settled, and return what each may spend now.

        `of` has the limits of each tenant. The leases of lost servers come back first.
        """
        leased: dict[str, Use] = {}
        with self._database.writing() as connection:
            now_s = _now_s(connection)
            rows = _rows(connection, spent)
            changed = []
            for tenant, use in spent.items():
                account, own = _settled(connection, server, tenant, rows[tenant], use, of[tenant], now_s)
                changed.append(_row(_ACCOUNT, tenant, now_s, account))
                changed.append(_row(server, tenant, now_s + ALIVE_S, own._asdict()))
                leased[tenant] = own
            # All at once: leases last for a tenth of a second, and each statement is a round trip to the database.
            _put(connection, changed)
        return leased

    def give_back_quotas(self, server: str, of: Mapping[str, Limits]) -> None:
        """Give the leases of tenants back, which the server does not need now."""
        with self._database.writing() as connection:
            now_s = _now_s(connection)
            for tenant, rows in _rows(connection, of).items():
                if server in rows:
                    account = _given_back(rows, [server], of[tenant], now_s)
                    _put(connection, [_row(_ACCOUNT, tenant, now_s, account)])
                    _drop(connection, tenant, [server])

    def leased_quotas(self, tenant: str) -> dict[str, Use]:
        """Return what each server has leased of a tenant's quotas."""
        with self._database.reading() as connection:
            rows = _rows(connection, [tenant])[tenant]
        return {server: Use(**amounts) for server, (_, amounts) in rows.items() if server != _ACCOUNT}

    def end_server(self, server: str) -> None:
        """Note that a server has ended. Its leases come back when another server settles."""
        with self._database.writing() as connection:
            connection.execute(delete(leases).where(leases.c.server == server, leases.c.tenant == ""))
            connection.execute(update(leases).where(leases.c.server == server).values(until_s=0.0))


# Of a tenant: until when each server's row holds, and its amounts.
_Rows = Mapping[str, tuple[float, Mapping[str, Any]]]
# The amounts of an account by quota.
_Account = dict[str, Bucket]


def _settled(
    connection: Connection, server: str, tenant: str, rows: _Rows, spent: Use, of: Limits, now_s: float
) -> tuple[_Account, Use]:
    """Return a tenant's account, with the leases of lost servers, and the new lease of a server."""
    lost = [name for name, (until_s, _) in rows.items() if name not in (_ACCOUNT, server) and until_s < now_s]
    account = _given_back(rows, lost, of, now_s)
    _drop(connection, tenant, lost)
    before = Use(**rows[server][1]) if server in rows else Use()
    own: dict[str, float] = {}
    for quota, rate in _rates(of).items():
        account[quota], own[quota] = settle(account[quota], rate, getattr(before, quota), getattr(spent, quota), now_s)
    return account, Use(**own)


def _given_back(rows: _Rows, servers: Collection[str], of: Limits, now_s: float) -> _Account:
    """Return a tenant's account with what these servers had leased."""
    account: _Account = {}
    known = rows[_ACCOUNT][1] if _ACCOUNT in rows else {}
    for quota, rate in _rates(of).items():
        bucket = Bucket(*known[quota]) if quota in known else full(rate, now_s)
        for server in servers:
            bucket = given_back(bucket, rate, rows[server][1].get(quota, 0.0), now_s)
        account[quota] = bucket
    return account


def _rates(of: Limits) -> dict[str, Rate]:
    rates = {"requests": of.requests, "tokens": of.tokens}
    return {quota: rate for quota, rate in rates.items() if rate is not None}


def _rows(connection: Connection, tenants: Collection[str]) -> dict[str, dict[str, tuple[float, Mapping[str, Any]]]]:
    """Return each tenant's rows by server."""
    found: defaultdict[str, dict[str, tuple[float, Mapping[str, Any]]]] = defaultdict(dict)
    names = list(tenants)
    for start in range(0, len(names), IN_ONE_QUERY):
        part = names[start : start + IN_ONE_QUERY]
        for row in connection.execute(select(leases).where(leases.c.tenant.in_(part))):
            found[row.tenant][row.server] = row.until_s, row.amounts
    return {tenant: found[tenant] for tenant in names}


def _row(server: str, tenant: str, until_s: float, amounts: Mapping[str, Any]) -> dict[str, Any]:
    return {"server": server, "tenant": tenant, "until_s": until_s, "amounts": dict(amounts)}


def _put(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in place of earlier rows of the same server and tenant."""
    if not rows:
        return
    made = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(leases)
    new = {"until_s": made.excluded.until_s, "amounts": made.excluded.amounts}
    connection.execute(made.on_conflict_do_update(index_elements=["server", "tenant"], set_=new), list(rows))


def _drop(connection: Connection, tenant: str, servers: Collection[str]) -> None:
    if servers:
        connection.execute(delete(leases).where(leases.c.tenant == tenant, leases.c.server.in_(servers)))


def _now_s(connection: Connection) -> float:
    """Return unix time: of the database, which all servers share; of this machine for a file."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
    return time.time()


def _limits(row: Row[Any]) -> Limits:
    return Limits(row.requests_per_s, row.tokens_per_s, row.concurrent, row.generation)
