"""Crashes on purpose: a test names a point, and the process ends there as if it had been killed."""

from __future__ import annotations

import os
import signal
from collections import Counter

CRASH_AT = "HPLM_CRASH_AT"
STOP_AT = "HPLM_STOP_AT"

# Points where work is half done, in the order in which a job passes them.
CRASH_POINTS = (
    "upload.written",  # a chunk is on disk, the registry does not count it
    "job.submitted",
    "job.claimed",
    "job.reported",  # at every progress callback of a job
    "job.trained",
    "artifact.written",  # its files are written, not its manifest
    "artifact.durable",  # all files are on disk, beside their final place
    "artifact.placed",
    "publish.before",
    "publish.committing",  # inside the transaction
    "publish.after",
    "job.retired",  # older versions are retired; the job is not done yet
    "job.finished",  # the job's inputs still exist
    "job.consumed",
    "rollback.before",
    "rollback.after",
    "delete.before",
    "delete.after",
    "collect.removed",  # files of a version that the registry still lists as retired
    "collect.forgotten",
)

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """End this process with status 137 and without cleaning up if HPLM_CRASH_AT is `name`, or `name:n` at the n-th time."""
    wanted = os.environ.get(CRASH_AT)
    if wanted is None:
        return
    assert name in CRASH_POINTS, name
    point, _, number = wanted.partition(":")
    if point == name:
        _passed[name] += 1
        if _passed[name] == int(number or 1):
            os._exit(137)


def stop_point() -> None:
    """Send SIGTERM to this process if HPLM_STOP_AT is n, at the n-th step of trainings that keep checkpoints."""
    if (number := os.environ.get(STOP_AT)) is not None:
        _passed[STOP_AT] += 1
        if _passed[STOP_AT] == int(number):
            signal.raise_signal(signal.SIGTERM)
