"""Typed answers to manage requests. Times are Unix seconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hplm.core import wire
from hplm.errors import HplmError, InternalError, from_stored

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class JobEvent:
    """A job's state: `progress` is 0 to 1, `eta_s` the estimated seconds left. A job that has ended has `result` or `error`."""

    state: str
    step: str
    progress: float
    eta_s: float | None = None
    error: dict[str, str] | None = None
    result: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has ended, so that no event follows."""
        return self.state not in wire.JOB_UNFINISHED

    @property
    def failure(self) -> HplmError | None:
        """The typed error that a failed job ended with."""
        return None if self.error is None else from_stored(self.error)


@dataclass(frozen=True)
class Job(JobEvent):
    """A job: `kind` is an action such as `tenant.create`, `subject` is `tenant:NAME` or `domain:BASE/NAME`."""

    id: str = ""
    kind: str = ""
    subject: str = ""
    dry_run: bool = False
    attempts: int = 0
    cancel_requested: bool = False
    created_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def event(self) -> JobEvent:
        """The fields of the job that change while it runs."""
        return parse_answer(JobEvent, dataclasses.asdict(self))


@dataclass(frozen=True)
class Version:
    """A version of a tenant or domain. `base` is empty for a domain's version, whose base is the domain's.

    `current`: requests that name this base get this version, and new tenants stand on this version of a domain.
    """

    version: int
    created_s: float
    scores: dict[str, float] = field(default_factory=dict)
    base: str = ""
    current: bool = False


@dataclass(frozen=True)
class Tenant:
    """A tenant as the server serves it over `base`: its version, over one version of a domain.

    texts: 1, or 2 if a request is a pair of texts; None for a version that does not record the number. `bases` has the number
    of the current version over each base of the tenant. A request that names no base gets `default_base`. Each text is
    answered by at least `least_students` students, as far as the tenant has them.
    """

    name: str
    base: str
    domain: str
    domain_version: int
    version: int
    created_s: float
    texts: int | None = None
    default_base: str = ""
    bases: dict[str, int] = field(default_factory=dict)
    least_students: int = 1


@dataclass(frozen=True)
class Cascade:
    """A tenant's newest cascade. It is in force while each of `levels`, numbers by base, is the version that is served.

    `lost` are the bases for which that does not hold. `plan` has the levels with their settings, and the `promise`.
    `candidates` are the rows of the table that the plan was selected from, and `calibration` has a row for each level.
    """

    in_force: bool
    levels: dict[str, int]
    lost: tuple[str, ...] = ()
    plan: dict[str, Any] | None = None
    candidates: tuple[dict[str, Any], ...] = ()
    calibration: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TenantDetails(Tenant):
    """A tenant with its kept versions over all bases and with `about`: scores, confusion, training curve, examples.

    `cascade` is None for a tenant without levels. `recent` has the tenant's texts of the last `hour` and `day` on the server's
    machine by outcome (`ok`, `refused`, `invalid`, `failed`), and their `tokens`. It is empty if the server cannot tell.
    """

    about: dict[str, Any] = field(default_factory=dict)
    versions: tuple[Version, ...] = ()
    cascade: Cascade | None = None
    recent: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Base:
    """A base that a server's repository serves: clients call it by `model`.

    `kind` is hierarchical or whole. `process_bytes` is the memory of each model's processes, without
    models whose processes the server cannot see. `trunk_of` is the base that a trunk was distilled from, None for other bases.
    """

    model: str
    base: str
    kind: str
    tenants: int
    process_bytes: dict[str, int] = field(default_factory=dict)
    trunk_of: str | None = None

    @property
    def memory(self) -> str:
        """The memory of the base's processes, in words."""
        return f"{sum(self.process_bytes.values()) / 1e6:,.0f} MB" if self.process_bytes else "-"


@dataclass(frozen=True)
class Domain:
    """A domain of a base; the root of a base's tree has no parent."""

    name: str
    base: str
    parent: str | None
    version: int | None


@dataclass(frozen=True)
class DomainDetails(Domain):
    """A domain with `about` for its version, and its kept versions."""

    about: dict[str, Any] = field(default_factory=dict)
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True)
class Upload:
    """An uploaded file that is not used up: the server has `received` of its `bytes`, and `jobs` wait for it."""

    id: str
    bytes: int
    received: int
    complete: bool
    created_s: float
    name: str = ""
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class AccessKey:
    """A key without its secret. `tenant` is None for an operator's key; `expires_s` None means never."""

    id: str
    tenant: str | None
    role: str
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None


@dataclass(frozen=True)
class NewKey(AccessKey):
    """A key that was just created. `text` is the whole key, which the server never shows again."""

    text: str = field(default="", repr=False)


@dataclass(frozen=True)
class RevokedKey(AccessKey):
    """A key that was just revoked. All servers refuse it by `refused_by_s`."""

    refused_by_s: float = 0.0


@dataclass(frozen=True)
class AuditEntry:
    """A manage request in the audit log: when, the id of its key and the role, what, and `ok` or the code of an error.

    `times` equal requests are one entry. `details` says what was changed: of a key its id, tenant, role and expiry, of limits
    their values, of a training its job.
    """

    seq: int
    at_s: float
    key: str | None
    role: str | None
    action: str
    subject: str
    outcome: str
    times: int = 1
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The cost of a job, from a dry run; `details` holds the server's whole plan."""

    estimated_s: float
    details: dict[str, Any]


def parse_answer(kind: type[Answer], values: Any) -> Answer:
    """Return a server's JSON object as a `kind`, without keys that only a newer server knows. Raises InternalError."""
    assert dataclasses.is_dataclass(kind)
    try:
        known = {each.name: values[each.name] for each in dataclasses.fields(kind) if each.name in values}
        for key in ("jobs", "lost", "candidates", "calibration"):
            if key in known:
                known[key] = tuple(known[key])
        if "cascade" in known:
            known["cascade"] = parse_answer(Cascade, known["cascade"])
        if "versions" in known:
            known["versions"] = tuple(parse_answer(Version, version) for version in known["versions"])
        return kind(**known)
    except TypeError as error:
        raise InternalError(f"the server's answer is no {kind.__name__}: {error}") from None
