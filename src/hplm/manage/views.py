"""The registry's records as JSON values for answers, without the server's paths."""

from __future__ import annotations

from typing import Any

from hplm.registry.records import (
    PLAN,
    CascadeRecord,
    DomainRecord,
    DomainVersion,
    Job,
    TenantRecord,
    TenantVersion,
    Upload,
)

_JOB_KEYS = (
    *("kind", "state", "step", "progress", "eta_s", "error", "result", "attempts", "cancel_requested"),
    *("created_s", "started_s", "ended_s"),
)


def job(record: Job) -> dict[str, Any]:
    """Return all of a job except the worker's name and the pinned inputs."""
    shown = {key: getattr(record, key) for key in _JOB_KEYS}
    subject = record.subject.removeprefix(PLAN)
    return {"id": record.id, "subject": subject, "dry_run": bool(record.request.get("dry_run")), **shown}


def tenant(record: TenantRecord) -> dict[str, Any]:
    """Return a tenant with its version over `base`, and the numbers of its current versions over all its bases."""
    return {
        "name": record.name,
        "base": record.base,
        "domain": record.domain,
        "domain_version": record.domain_number,
        "version": record.current.number,
        "texts": record.current.about.get("texts"),
        "created_s": record.current.created_s,
        "default_base": record.default_base,
        "bases": dict(record.bases),
        "least_students": record.least_students,
    }


def cascade(record: CascadeRecord, about: dict[str, Any]) -> dict[str, Any]:
    """Return a tenant's cascade: its plan, whether the plan is in force, and what the selection said.

    `about` is that of the version that keeps the plan.
    """
    return {
        "in_force": record.is_in_force,
        "lost": list(record.lost),
        "levels": dict(record.levels),
        "plan": None if record.plan is None else record.plan.to_json(),
        "candidates": about.get("cascade", {}).get("candidates", []),
        "calibration": about.get("cascade", {}).get("levels", []),
    }


def upload(record: Upload, name: str, jobs: list[str]) -> dict[str, Any]:
    """Return an upload; `jobs` are the ids of the jobs that need it."""
    shown = {key: getattr(record, key) for key in ("id", "bytes", "received", "complete", "created_s")}
    return {**shown, "name": name, "jobs": jobs}


def domain(record: DomainRecord) -> dict[str, Any]:
    return {"name": record.name, "base": record.base, "parent": record.parent, "version": record.current.number}


def version(record: TenantVersion | DomainVersion, current: int | None) -> dict[str, Any]:
    """Return one line of a history; `current` is the number of the version that is served."""
    scores = {"scores": record.about["scores"]} if "scores" in record.about else {}
    return {"version": record.number, "created_s": record.created_s, "current": record.number == current, **scores}
