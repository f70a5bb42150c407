"""Roles of keys, and the manage requests that each role allows.

A tenant's key has the role `infer` (infer requests of its tenant) or `manage` (those, and manage requests about its own
tenant). An operator's key has no tenant: `read` lists and shows, `manage` changes tenants, domains and jobs, `admin` also
keys, limits and the audit log. An operator's key cannot send infer requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["infer", "manage"]
OperatorRole = Literal["read", "manage", "admin"]
TENANT_ROLES: tuple[Scope, ...] = get_args(Scope)
OPERATOR_ROLES: tuple[OperatorRole, ...] = get_args(OperatorRole)


@dataclass(frozen=True)
class Right:
    """The need of a manage request: an operator's key of `role` or above, or with `by_tenant` a manage key of the tenant."""

    role: OperatorRole
    by_tenant: bool = False


def scopes_of(role: str) -> tuple[Scope, ...]:
    """Return the scopes of a tenant's key. `manage` includes `infer`."""
    return ("infer", "manage") if role == "manage" else ("infer",)


def allows(role: str, tenant: str | None, right: Right, subject: str | None) -> bool:
    """Return whether a key of `role` may send a manage request about tenant `subject`.

    `tenant` is the key's tenant, None for an operator's key. `subject` is None for a request about no single tenant.
    """
    if tenant is not None:
        return right.by_tenant and role == "manage" and subject in (None, tenant)
    return role in OPERATOR_ROLES and OPERATOR_ROLES.index(role) >= OPERATOR_ROLES.index(right.role)
