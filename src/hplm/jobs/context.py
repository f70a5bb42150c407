"""The context of a job handler, and the steps that publish its version."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hplm.errors import ArtifactError, ManageError
from hplm.jobs.lease import JobLease
from hplm.registry.records import DomainVersion, Job, TenantVersion
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store

log = logging.getLogger(__name__)

Version = TypeVar("Version", TenantVersion, DomainVersion)


@dataclass(frozen=True)
class JobContext:
    """Everything that a handler works with. `scratch` is the folder for what an interrupted job continues from."""

    store: Store
    registry: Registry
    lease: JobLease
    clock: Callable[[], float]
    device: str
    scratch: Path


@contextmanager
def hide_store_paths(store: Store, message: str) -> Iterator[None]:
    """Replace an ArtifactError that names a path of the store by one that says `message`; log the original.

    The path is for the log only: a client that asked for the job must not learn it.
    """
    try:
        yield
    except ArtifactError as error:
        if str(store.root) not in str(error):
            raise
        log.error("%s: %s", message, error.wire())
        # The worker process decides by the OSError whether a retry can help.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise type(error)(f"{message}; the worker's log says why") from cause


def versions_of_job(job: Job, versions: Sequence[Version]) -> list[Version]:
    """Return the versions that this job published before its worker process was lost."""
    return [version for version in versions if version.about.get("job") == job.id]


def version_of_job(job: Job, versions: Sequence[Version]) -> Version | None:
    """Return the version that this job published before its worker process was lost; None if there is none."""
    return next(iter(versions_of_job(job, versions)), None)


def publish(
    context: JobContext,
    folder: Path,
    register: Callable[[str], Version],
    find_published: Callable[[], Version | None],
    *,
    job: Job,
) -> Version:
    """Register the artifact in `folder` that `job` has made; remove the folder if the registry refuses it.

    A refusal may mean that this very job has published already: from here, if the answer was lost, or from another
    worker process that took the job when this one looked dead. `find_published` returns that version.
    """

    def find() -> list[Version]:
        version = find_published()
        return [] if version is None else [version]

    (version,) = publish_all(context, [folder], lambda: [register(context.store.relative(folder))], find, job=job)
    return version


def publish_all(
    context: JobContext,
    folders: Sequence[Path],
    register: Callable[[], list[Version]],
    find_published: Callable[[], list[Version]],
    *,
    job: Job,
) -> list[Version]:
    """Register in one transaction the artifacts in `folders` that `job` has made, as `publish` does with one."""

    def register_held() -> list[Version]:
        # Checked at every attempt: the job may be cancelled or taken over while the registry cannot be used.
        context.lease.renew()
        crash_point("publish.before")
        return register()

    try:
        versions = context.lease.retry(register_held)
    except ManageError:
        published = context.lease.retry(find_published)
        for folder in set(folders) - {context.store.path(version.path) for version in published}:
            shutil.rmtree(folder, ignore_errors=True)
        if not published:
            raise
        versions = published
    crash_point("publish.after")
    retire_old(context, job)
    crash_point("job.retired")
    return versions


def retire_old(context: JobContext, job: Job) -> None:
    """Retire versions beyond the `keep_versions` of the job's request over all its bases; nothing if that is None."""
    keep = job.request["keep_versions"]
    for base in bases_of(job.request) if keep is not None else ():
        context.lease.retry(partial(context.registry.retire, keep, context.clock(), base=base, by_job=job.id))


def bases_of(request: Mapping[str, Any]) -> list[str]:
    """Return the bases of a job's request: those of all levels, or the only one."""
    return list(request.get("levels") or [request["base"]])
