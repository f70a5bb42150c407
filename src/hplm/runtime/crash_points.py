"""Dying on purpose: a test names a point, and the process ends there as if it had been killed."""

from __future__ import annotations

import os
from collections import Counter

CRASH_AT = "HPLM_CRASH_AT"

# Wherever something is half done, in the order in which it is met.
CRASH_POINTS = (
    "upload.written",  # a chunk is on disk, the registry does not count it
    "job.submitted",
    "job.claimed",
    "job.reported",  # whenever a job's work tells how far it is
    "job.trained",
    "artifact.written",  # its files, not its manifest
    "artifact.durable",  # all of it, beside its place
    "artifact.placed",
    "publish.before",
    "publish.committing",  # inside the transaction
    "publish.after",
    "job.retired",  # older versions are; the job is not yet done
    "job.finished",  # its inputs are still there
    "job.consumed",
    "rollback.before",
    "rollback.after",
    "delete.before",
    "delete.after",
    "collect.removed",  # files of a version that the registry still lists as retired
    "collect.forgotten",
)

_met: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """End this process with status 137 and clean nothing up, where HPLM_CRASH_AT is `name`, or `name:n` at the n-th time."""
    wanted = os.environ.get(CRASH_AT)
    if wanted is None:
        return
    assert name in CRASH_POINTS, name
    point, _, number = wanted.partition(":")
    if point == name:
        _met[name] += 1
        if _met[name] == int(number or 1):
            os._exit(137)
