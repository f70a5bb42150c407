"""Plain values that the registry returns. Times are unix seconds; paths are relative to the store's root."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from hplm.cascade.plan import CascadePlan

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
UNFINISHED: tuple[JobState, ...] = ("queued", "running")
# Put before the subject of a dry run, so that dry runs do not queue behind the jobs of that subject.
PLAN = "plan:"


@dataclass(frozen=True)
class BaseRecord:
    name: str
    fingerprint: str
    path: str


@dataclass(frozen=True)
class DomainRecord:
    """A domain and its current version, which stands below domain `parent`; None for a root (a PLOT)."""

    base: str
    name: str
    parent: str | None
    current: DomainVersion


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
    """One immutable version of a tenant, tied to one domain version of `base`.

    `number` counts the tenant's versions over all bases. `about` says how it was made: scores, curve and so on. A level of a
    cascade has `levels`: the numbers by base, its own among them, that came into force with it. The last level of the plan
    has the `plan`.
    """

    id: int
    tenant: str
    base: str
    number: int
    domain_version_id: int
    path: str
    created_s: float
    about: dict[str, Any]
    levels: Mapping[str, int] = field(default_factory=dict)
    plan: CascadePlan | None = None


@dataclass(frozen=True)
class NewLevel:
    """A tenant version to publish as a level of a cascade. `expected` see `Tenants.publish_tenant`."""

    domain_version_id: int
    path: str
    about: dict[str, Any]
    number: int
    expected: int | None


@dataclass(frozen=True)
class CascadeRecord:
    """A tenant's newest cascade, as its current versions tell of it.

    `levels` are the numbers by base that must be current for the cascade to be in force; `lost` are the bases that now serve
    another version, or none. `plan` is None if the version that kept the plan was replaced or deleted.
    """

    plan: CascadePlan | None
    levels: Mapping[str, int]
    lost: tuple[str, ...]

    @property
    def is_in_force(self) -> bool:
        return self.plan is not None and not self.lost


@dataclass(frozen=True)
class TenantRecord:
    """A tenant and its current version over `base`, which is served there.

    `bases` has the number of the current version over each base of the tenant, sorted by base. `default_base` is one of them.
    `least_students` answer each text at least.
    """

    name: str
    base: str
    current: TenantVersion
    domain: str
    domain_number: int
    default_base: str
    bases: Mapping[str, int]
    least_students: int = 1


@dataclass(frozen=True)
class Job:
    """A training that a worker process does, or for a `local` job the command that inserted it.

    `progress` is 0 to 1, `error` is `{code, message}`, and `attempts` counts how often the job was begun.
    """

    id: str
    kind: str
    subject: str
    request: dict[str, Any]
    state: JobState
    step: str
    progress: float
    eta_s: float | None
    worker: str | None
    lease_until_s: float | None
    local: bool
    created_s: float
    started_s: float | None
    ended_s: float | None
    error: dict[str, str] | None
    result: dict[str, Any] | None
    cancel_requested: bool
    attempts: int


@dataclass(frozen=True)
class Upload:
    """A file that a client sends: `received` of its `bytes` have arrived."""

    id: str
    bytes: int
    sha256: str
    received: int
    created_s: float
    complete: bool


@dataclass(frozen=True)
class ServedTenant:
    """A tenant version with all that serving needs to load it. A `version_id` is never used twice in one registry.

    `is_default`: `base` is the tenant's default. `least_students`: so many students answer each text at least, as far as the
    version has them. Neither makes another version, so they do not count in comparisons.
    `lineage`: the folders of its domain version and of the versions above; the catalog fills it in.
    """

    name: str
    version_id: int
    number: int
    path: str
    domain_version_id: int
    base: str
    is_default: bool = field(default=True, compare=False)
    least_students: int = field(default=1, compare=False)
    lineage: tuple[str, ...] = ()


@dataclass(frozen=True)
class WithdrawnTenant:
    """A tenant that is no longer served over a base."""

    name: str
    base: str


@dataclass(frozen=True)
class Changes:
    """The changes up to `generation`. If `full`, `published` is everything that exists.

    If a tenant changed over one base, `published` has all its bases. `plans` has the plans in force of tenants that changed.
    """

    generation: int
    published: tuple[ServedTenant, ...]
    withdrawn: tuple[WithdrawnTenant, ...]
    full: bool
    plans: Mapping[str, CascadePlan] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Everything that the registry says about files, at one moment.

    `domains` are kept versions, and `tenants` the names of the kept tenant versions by path. `paths`, `uploads` and
    `last_numbers` also cover retired, deleted and not yet published versions. `last_numbers` has the highest number
    given, by the subject of every tenant and domain. `busy_subjects` are the subjects of running jobs. `unfinished` are
    the ids of jobs that run or wait, `ended` the ids of other jobs.
    """

    generation: int
    bases: tuple[BaseRecord, ...]
    domains: tuple[DomainVersion, ...]
    tenants: Mapping[str, Set[str]]
    paths: frozenset[str]
    uploads: frozenset[str]
    busy_subjects: frozenset[str]
    last_numbers: Mapping[str, int]
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
