"""Typed answers to manage requests. Times are unix seconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hplm.core import wire
from hplm.errors import HplmError, InternalError, from_stored

Record = TypeVar("Record")


@dataclass(frozen=True)
class JobEvent:
    """How far a job is: `progress` 0 to 1, `eta_s` what is left by estimate, `result` or `error` of one that has ended."""

    state: str
    step: str
    progress: float
    eta_s: float | None = None
    error: dict[str, str] | None = None
    result: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self.state not in wire.JOB_UNFINISHED

    @property
    def failure(self) -> HplmError | None:
        """The error that a failed job ended with, typed."""
        return None if self.error is None else from_stored(self.error)


@dataclass(frozen=True)
class Job(JobEvent):
    """A job with what it is about: `kind` is `tenant.create` and so on, `subject` `tenant:NAME` or `domain:BASE/NAME`."""

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
        """The part of it that changes."""
        return record(JobEvent, dataclasses.asdict(self))


@dataclass(frozen=True)
class Version:
    """One line of a tenant's or domain's history."""

    version: int
    created_s: float
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tenant:
    """A tenant as it is served: its version, over one version of a domain of a base.

    texts: 1, or 2 if a request is a pair of texts; None for a version that does not record the number.
    """

    name: str
    base: str
    domain: str
    domain_version: int
    version: int
    created_s: float
    texts: int | None = None


@dataclass(frozen=True)
class TenantDetails(Tenant):
    """With `about` (scores, confusion, training curve, number of examples) of its version, and the versions to go back to."""

    about: dict[str, Any] = field(default_factory=dict)
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True)
class Domain:
    """A domain of a base; the root of a base's tree has no parent."""

    name: str
    base: str
    parent: str | None
    version: int | None


@dataclass(frozen=True)
class DomainDetails(Domain):
    """With `about` of its version, and all versions that are kept."""

    about: dict[str, Any] = field(default_factory=dict)
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True)
class Upload:
    """A file that was sent and is not used up: `received` of its `bytes` have come, `jobs` wait for it."""

    id: str
    bytes: int
    received: int
    complete: bool
    created_s: float
    name: str = ""
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a job would cost, from a dry run; `details` has all that the server said."""

    estimated_s: float
    details: dict[str, Any]


def record(kind: type[Record], values: Any) -> Record:
    """An answer as a `kind`; keys of a newer server are left out. Raises InternalError where it lacks one."""
    assert dataclasses.is_dataclass(kind)
    try:
        known = {each.name: values[each.name] for each in dataclasses.fields(kind) if each.name in values}
        if "jobs" in known:
            known["jobs"] = tuple(known["jobs"])
        if "versions" in known:
            known["versions"] = tuple(record(Version, one) for one in known["versions"])
        return kind(**known)
    except TypeError as error:
        raise InternalError(f"the server's answer is no {kind.__name__}: {error}") from None
