"""The checks of manage requests about cascades, and the part of a job's request that is about its levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hplm.core.settings import ManagedBase
from hplm.errors import BadManageRequestError, ConflictError
from hplm.manage.request_parts import Target, given
from hplm.manage.requests import FineTune
from hplm.registry.records import CascadeRecord


def check_create(request: FineTune) -> None:
    """Raise BadManageRequestError for a target or a proof without levels."""
    if request.levels is None and (given(request.target) or request.data.proof is not None):
        raise BadManageRequestError(
            "`target` and `data.proof` are for a tenant with `levels`: name the bases, from small to large "
            "(`hplm tenant create NAME --levels SMALL,LARGE --train FILE`)"
        )


def check_update(request: FineTune, cascade: CascadeRecord | None) -> CascadeRecord | None:
    """Return the cascade that an update trains as one, None if the tenant has none in force.

    Raises BadManageRequestError if the request asks for something that the update of such a tenant cannot do.
    """
    if request.levels is not None:
        raise BadManageRequestError(
            "an update keeps a tenant's levels: delete the tenant and create it with other levels"
        )
    if cascade is None or not cascade.is_in_force:
        if given(request.target) or request.data.proof is not None:
            raise BadManageRequestError(
                f"`target` and `data.proof` are for a cascade, and {_state(request.tenant, cascade)}"
            )
        return None
    if request.base is not None:
        raise BadManageRequestError(
            f"tenant {request.tenant!r} has a cascade over {', '.join(cascade.levels)}, which an update trains as one: "
            "leave `base` out"
        )
    return cascade


def check_in_force(tenant: str, cascade: CascadeRecord | None) -> CascadeRecord:
    """Return the cascade of a tenant. Raises BadManageRequestError without one, ConflictError for one out of force."""
    if cascade is None:
        raise BadManageRequestError(_state(tenant, cascade))
    if not cascade.is_in_force:
        raise ConflictError(_state(tenant, cascade))
    return cascade


def check_students(tenant: str, base: str, cascade: CascadeRecord | None) -> None:
    """Refuse to train the students of one level alone. Raises BadManageRequestError: the cascade would be out of force."""
    if cascade is not None and cascade.is_in_force and base in cascade.levels:
        raise BadManageRequestError(
            f"tenant {tenant!r} has a cascade over {', '.join(cascade.levels)}, whose students an update trains: "
            f"`hplm tenant update {tenant}`"
        )


def of_levels(
    domains: Mapping[str, str], served: Mapping[str, ManagedBase], target: Target, cascade: CascadeRecord | None
) -> dict[str, Any]:
    """Return the part of a job's request that is about its levels, in the order of `domains`, small to large.

    What `target` leaves open is as in the plan of `cascade`.
    """
    known: dict[str, Any] = {}
    if cascade is not None and (plan := cascade.plan) is not None:
        known = {
            "accuracy": plan.promise.target_accuracy,
            "latency_ms": plan.promise.target_latency_ms,
            "deterministic": plan.deterministic,
            "on_late": plan.on_late,
        }
    return {
        "levels": list(domains),
        "domains": dict(domains),
        "served": {base: asdict(served[base]) for base in domains},
        "target": {**{key: value for key, value in known.items() if value is not None}, **given(target)},
    }


def _state(tenant: str, cascade: CascadeRecord | None) -> str:
    if cascade is None:
        return (
            f"tenant {tenant!r} has no cascade: create a tenant with `levels` "
            "(`hplm tenant create NAME --levels SMALL,LARGE --train FILE`)"
        )
    lost = f", because its versions over {', '.join(cascade.lost)} are no longer served" if cascade.lost else ""
    return (
        f"the cascade of tenant {tenant!r} is out of force{lost}: roll back to a version of it, or delete the tenant and "
        "create it again"
    )
