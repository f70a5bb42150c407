"""The need of each manage request: the role of an operator's key, and whether a tenant's own manage key suffices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hplm.access.roles import Right
from hplm.manage import requests

READ, MANAGE, ADMIN = Right("read"), Right("manage"), Right("admin")
# A tenant's manage key may send these requests about its own tenant, its own jobs, and uploads whose ids it knows.
TENANT_READS, TENANT_MANAGES = Right("read", by_tenant=True), Right("manage", by_tenant=True)
# Values of `teacher` that name no base.
TEACHERS = ("auto", "full")
RIGHTS: dict[str, Right] = {
    "tenant.create": MANAGE,
    "tenant.update": TENANT_MANAGES,
    "tenant.students": TENANT_MANAGES,
    "tenant.target": MANAGE,
    "tenant.delete": MANAGE,
    "tenant.rollback": TENANT_MANAGES,
    "tenant.least_students": MANAGE,
    "tenant.show": TENANT_READS,
    "tenant.list": READ,
    "domain.create": MANAGE,
    "domain.update": MANAGE,
    "domain.delete": MANAGE,
    "domain.show": READ,
    "domain.list": READ,
    "base.list": READ,
    "job.show": TENANT_READS,
    "job.list": READ,
    "job.cancel": TENANT_MANAGES,
    "upload.start": TENANT_MANAGES,
    "upload.chunk": TENANT_MANAGES,
    "upload.finish": TENANT_MANAGES,
    "upload.list": READ,
    "upload.drop": TENANT_MANAGES,
    "key.create": ADMIN,
    "key.list": ADMIN,
    "key.revoke": ADMIN,
    "tenant.limit": ADMIN,
    "audit.list": ADMIN,
}


# Actions that change what is served, queued or allowed. An upload changes nothing until a change names it.
_CHANGES = frozenset(
    action
    for action, right in RIGHTS.items()
    if right.role != "read" and not action.startswith("upload.") and action not in ("key.list", "audit.list")
)
# The changes that only operators make, and the changes that a tenant's key may make too.
CHANGES = (
    frozenset(action for action in _CHANGES if not RIGHTS[action].by_tenant),
    frozenset(action for action in _CHANGES if RIGHTS[action].by_tenant),
)


def is_change(action: str) -> bool:
    """Return whether an action changes what is served, queued or allowed."""
    return action in _CHANGES


def subject_of(request: requests.ManageRequest) -> str:
    """Return what a request is about, as the audit log names it; empty for a listing."""
    for kind in ("tenant", "domain", "job", "upload", "key"):
        if (name := getattr(request, kind, None)) is not None:
            return f"{kind}:{name}"
    return ""


def details_of(action: str, request: requests.ManageRequest, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request has changed beyond its subject, for the audit log. A key's secret is never in it."""
    match request:
        case requests.CreateKey() | requests.OfKey():
            return {name: answer["key"][name] for name in ("id", "tenant", "role", "expires_s")}
        case requests.LimitTenant():
            values = {name: value for name, value in request.limits.quotas.items() if value is not None}
            return {"cleared": True} if request.clear else values
        case requests.RollBackTenant():
            return {"bases": answer["bases"]}
        case requests.LeastStudents():
            return {"least": request.least}
        case requests.FineTune() | requests.Retarget() | requests.Pretrain():
            return {"job": answer["job"]}
        case requests.OfTenant() | requests.OfDomain() if is_change(action) and request.base is not None:
            return {"base": request.base}
    return {}


def bases_of(request: requests.ManageRequest) -> set[str]:
    """Return the bases that a request names: its own, its levels, and the teacher of its students."""
    students = getattr(request, "students", None)
    named = {getattr(request, "base", None), None if students is None else students.teacher}
    return {*named, *(getattr(request, "levels", None) or ())} - {None, *TEACHERS}


def uses_paths(request: requests.ManageRequest) -> bool:
    """Return whether a request names files by their paths on the server."""
    return isinstance(request, requests.FineTune) and any(
        source is not None and source.path is not None for source in vars(request.data).values()
    )
