"""What the registry answers with: plain values, times in unix seconds, paths relative to the store's root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
UNFINISHED: tuple[JobState, ...] = ("queued", "running")
# Before the subject of a dry run, which so is another than that of the jobs that change something.
PLAN = "plan:"


@dataclass(frozen=True)
class BaseRecord:
    name: str
    fingerprint: str
    path: str


@dataclass(frozen=True)
class DomainRecord:
    """A domain; `parent` is that of its current version, None for a root (a PLOT)."""

    base: str
    name: str
    parent: str | None
    current: int | None


@dataclass(frozen=True)
class DomainVersion:
    """One immutable version of a domain."""

    id: int
    base: str
    domain: str
    number: int
    parent_id: int | None
    path: str
    created_s: float
    about: dict[str, Any]


@dataclass(frozen=True)
class TenantVersion:
    """One immutable version of a tenant, tied to one domain version; `about` has scores, curve, request and so on."""

    id: int
    tenant: str
    number: int
    domain_version_id: int
    path: str
    created_s: float
    about: dict[str, Any]


@dataclass(frozen=True)
class TenantRecord:
    """A tenant with what is served of it now."""

    name: str
    base: str
    current: TenantVersion
    domain: str
    domain_number: int


@dataclass(frozen=True)
class Job:
    """Work for a worker; `progress` is 0 to 1, `error` is `{code, message}`, `attempts` counts how often it was begun."""

    id: str
    kind: str
    subject: str
    request: dict[str, Any]
    state: JobState
    step: str
    progress: float
    eta_s: float | None
    worker: str | None
    created_s: float
    started_s: float | None
    ended_s: float | None
    error: dict[str, str] | None
    result: dict[str, Any] | None
    cancel_requested: bool
    attempts: int


@dataclass(frozen=True)
class Upload:
    """A file on its way in: `received` of `bytes` are there."""

    id: str
    bytes: int
    sha256: str
    received: int
    created_s: float
    complete: bool


@dataclass(frozen=True)
class ServedTenant:
    """What serving must know to load a tenant; `version_id` is never used twice in one registry.

    `lineage`: the folders of its domain version and of those above it, filled in by the catalog.
    """

    name: str
    version_id: int
    number: int
    path: str
    domain_version_id: int
    lineage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Changes:
    """What changed up to `generation`; where `full`, `published` is everything there is, and nothing else exists."""

    generation: int
    published: tuple[ServedTenant, ...]
    removed: tuple[str, ...]
    full: bool


class Claim(NamedTuple):
    """Whose a kept tenant version is, and where its files must be."""

    tenant: str
    path: str


@dataclass(frozen=True)
class Snapshot:
    """What the registry says about files, at one moment.

    `domains` and `tenants` are kept versions. The other fields also cover what is retired, deleted or not yet published:
    every path, every upload's id, and `given`: the highest version number handed out, by the subject of every tenant and
    domain. `busy`: subjects of running jobs.
    `unfinished`: ids of jobs that run or wait; `ended`: of the others.
    """

    generation: int
    bases: tuple[BaseRecord, ...]
    domains: tuple[DomainVersion, ...]
    tenants: tuple[Claim, ...]
    paths: frozenset[str]
    uploads: frozenset[str]
    busy: frozenset[str]
    given: Mapping[str, int]
    unfinished: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NewDomain:
    """A domain version to adopt; `parent` is a path, None for a root."""

    base: str
    name: str
    number: int
    path: str
    parent: str | None
    about: dict[str, Any]


@dataclass(frozen=True)
class NewTenant:
    """A tenant version to adopt; `domain` is the path of its domain version."""

    name: str
    number: int
    path: str
    domain: str
    about: dict[str, Any]
