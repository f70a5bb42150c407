"""Answers manage requests about keys, limits and the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hplm.access.keys import new_key
from hplm.manage import requests
from hplm.registry.access.audit import AuditEntry
from hplm.registry.access.keys import AccessKey
from hplm.registry.access.limits import DEFAULT
from hplm.registry.registry import Registry

Answer = dict[str, Any]
# Seconds within which all servers refuse a revoked key: they poll the registry every 0.2 s.
REFUSED_WITHIN_S = 1.0


def create(request: requests.CreateKey, registry: Registry, now_s: float) -> Answer:
    """Add a new key. The answer has the text of the key, which is nowhere else: it cannot be shown again."""
    key = new_key()
    role = request.operator or request.scope or "infer"
    expires_s = None if request.expires_in_s is None else now_s + request.expires_in_s
    record = AccessKey(key.id, request.tenant, role, key.sha256(), now_s, expires_s)
    registry.add_key(record)
    return {"key": {**view(record), "text": key.text()}}


def listing(request: requests.ListKeys, registry: Registry) -> Answer:
    found = registry.access_keys(tenant=request.tenant, after=request.after, limit=request.limit)
    return {"keys": [view(key) for key in found]}


def revoke(request: requests.OfKey, registry: Registry, clock: Callable[[], float]) -> Answer:
    """Revoke a key. The answer says by when all servers refuse it, counted from the end of the transaction."""
    revoked = registry.revoke_key(request.key, clock())
    return {"key": {**view(revoked), "refused_by_s": clock() + REFUSED_WITHIN_S}}


def limit(request: requests.LimitTenant, registry: Registry) -> Answer:
    """Set the limits of a tenant, or the default of all tenants, if the request gives any; return them."""
    tenant = request.tenant or DEFAULT
    if request.clear or not request.limits.is_none:
        registry.set_limits(tenant, request.limits)
    elif request.tenant is not None:
        registry.tenant(request.tenant)
    own, default = registry.limits(tenant), registry.limits(DEFAULT)
    return {"tenant": request.tenant, "limits": own.quotas, "in_force": own.over(default).quotas}


def audit(request: requests.ListAudit, registry: Registry) -> Answer:
    found = registry.audit(key=request.key, subject=request.subject, before=request.before, limit=request.limit)
    return {"entries": [entry(one) for one in found]}


def view(key: AccessKey) -> Answer:
    """Return a key as JSON, without its checksum."""
    return {name: value for name, value in vars(key).items() if name != "sha256"}


def entry(record: AuditEntry) -> Answer:
    """Return an entry of the audit log as JSON."""
    return dict(vars(record))
