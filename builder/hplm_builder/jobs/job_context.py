"""What the steps of a job work with, and how what they made is published."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hplm.errors import ArtifactError, ManageError
from hplm.manage.uploads import Uploads
from hplm.registry.records import DomainVersion, Job, TenantVersion
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store
from hplm_builder.jobs.job_progress import JobReport

log = logging.getLogger(__name__)

Version = TypeVar("Version", TenantVersion, DomainVersion)


@dataclass(frozen=True)
class Bench:
    """What a job's steps work with."""

    store: Store
    registry: Registry
    uploads: Uploads
    report: JobReport
    clock: Callable[[], float]
    device: str


@contextmanager
def without_paths(store: Store, said: str) -> Iterator[None]:
    """Where a file of the store is at fault, its path is for the log: whoever asked for the job is told what is `said`."""
    try:
        yield
    except ArtifactError as error:
        if str(store.root) not in str(error):
            raise
        log.error("%s: %s", said, error.wire())
        # The worker tells by a disk's refusal whether it may pass.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise type(error)(f"{said}; the worker's log says why") from cause


def made_by(job: Job, versions: Sequence[Version]) -> Version | None:
    """The version that this job published before its worker was lost."""
    return next((version for version in versions if version.about.get("job") == job.id), None)


def publish(
    bench: Bench,
    folder: Path,
    register: Callable[[str], Version],
    made: Callable[[], Version | None],
    *,
    job: Job,
) -> Version:
    """Register the artifact in `folder`, which `job` has made. Where that is refused, it is not left lying there.

    A refusal may mean that this very job has published: from here, though the answer was lost, or from another worker
    that took this one for dead.
    """

    def publish_held() -> Version:
        # Each time: the job may be cancelled, or another's, while the registry cannot be used.
        bench.report.held()
        crash_point("publish.before")
        return register(bench.store.relative(folder))

    try:
        version = bench.report.insist(publish_held)
    except ManageError:
        found = bench.report.insist(made)
        if found is None or bench.store.path(found.path) != folder:
            shutil.rmtree(folder, ignore_errors=True)
        if found is None:
            raise
        version = found
    crash_point("publish.after")
    retire_old(bench, job)
    crash_point("job.retired")
    return version


def retire_old(bench: Bench, job: Job) -> None:
    """Retire what is beyond the versions that are kept, as each job does at its end."""
    keep, base = job.request["keep_versions"], job.request["base"]
    bench.report.insist(lambda: bench.registry.retire(keep, bench.clock(), base=base, by_job=job.id))
