"""The checks of manage requests about students, and the part of a job's request that is about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from hplm.core.settings import ManagerSettings
from hplm.errors import ArtifactError, BadManageRequestError
from hplm.manage.request_parts import given
from hplm.manage.requests import FineTune
from hplm.manage.rights import TEACHERS
from hplm.models.base_folder import read as read_base
from hplm.registry.records import TenantVersion
from hplm.store.layout import Store


def check_request(request: FineTune, kind: str) -> None:
    """Raise BadManageRequestError for a request that names options which do not go together with its students."""
    if kind == "tenant.students" and (request.levels is not None or given(request.target) or request.data.proof):
        raise BadManageRequestError(
            "`levels`, `target` and `data.proof` are for a cascade: leave them out for students"
        )
    if kind == "tenant.students" and request.task is not None:
        raise BadManageRequestError("students have the task of their tenant: leave `task` out")


def trunks_of(store: Store, bases: Collection[str]) -> list[str]:
    """Return which of the bases are trunks. A base whose folder cannot be read is none: its own models say so."""
    return [base for base in bases if _is_trunk(store, base)]


def choose_trunk(store: Store, settings: ManagerSettings, named: str | None) -> str:
    """Return the trunk of a tenant's students: the base that a request names, or else the only trunk of the server.

    Raises BadManageRequestError if that is no trunk, or if several may be meant.
    """
    trunks = trunks_of(store, settings.managed)
    if named is not None:
        if named in settings.managed and named not in trunks:
            raise BadManageRequestError(
                f"base {named!r} is no trunk, so it has no students{_instead(trunks)}; "
                "`hplm build base --trunk 2 --from BASE --name TRUNK` makes a trunk"
            )
        return named
    if len(trunks) != 1:
        raise BadManageRequestError(f"name the trunk of the students as `base` (--base){_instead(trunks)}")
    return trunks[0]


def options_of(request: FineTune, version: TenantVersion | None) -> dict[str, Any]:
    """Return the options of a job: those of the request, or else those of the `version` that its job replaces."""
    known = {} if version is None else version.about.get("students", {}).get("asked", {})
    return {**known, **({} if request.students is None else given(request.students))}


def has_students(version: TenantVersion) -> bool:
    """Return whether a version was made with students, so that an update makes students again."""
    return "students" in version.about


def check_one_rate(request: FineTune) -> None:
    """Raise BadManageRequestError if students shall be trained at several learning rates."""
    if len(request.settings.learning_rates or ()) > 1:
        raise BadManageRequestError("students are trained at one learning rate: give one of `learning_rates`")


def of_students(options: Mapping[str, Any], store: Store, settings: ManagerSettings) -> dict[str, Any]:
    """Return the part of a job's request that is about students: `students`, and the `teachers` that the server serves.

    Raises BadManageRequestError if the teacher that was asked for is no base of the server, or a trunk.
    """
    trunks = trunks_of(store, settings.managed)
    teachers = {base: asdict(managed) for base, managed in settings.managed.items() if base not in trunks}
    asked = options.get("teacher", "auto")
    if asked not in TEACHERS and asked not in teachers:
        raise BadManageRequestError(
            "`teacher` must be auto, full, or one of the server's bases (`hplm base list` names them) that is no trunk, "
            f"got {asked!r}"
        )
    if not teachers:
        raise BadManageRequestError(
            "this server serves trunks only, and none of their layers could teach: export the base that the trunk was "
            "made of beside it (`hplm build export --base BASE --name BASE --models MODELS`)"
        )
    return {"students": dict(options), "teachers": teachers}


def _is_trunk(store: Store, base: str) -> bool:
    try:
        return read_base(store.base(base), verify=False).is_trunk
    except ArtifactError:
        return False


def _instead(trunks: Collection[str]) -> str:
    return ": `hplm base list` names the trunks" if trunks else ": this server serves no trunk"
