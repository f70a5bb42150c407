"""How many jobs there are, as the metrics page has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hplm.jobs.job_counts import STATES, JobCounts
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.waiting import until

NONE = dict.fromkeys(STATES, 0)


@pytest.fixture
def overdue(store: Store, registry: Registry) -> Store:
    """With a job whose lease has been over for years by the clock."""
    registry.submit_job("tenant.update", "tenant:a", {}, 1.0)
    assert registry.claim_job("w", 1.0, 30.0)
    return store


@pytest.fixture
def counts(overdue: Store, request: pytest.FixtureRequest) -> Iterator[JobCounts]:
    made = JobCounts(overdue, every_s=0.01, watch_s=request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("counts", [60.0], indirect=True)
def test_a_job_whose_lease_is_over_by_the_clock_alone_is_running(counts: JobCounts) -> None:
    until(lambda: bool(counts.read()))
    assert counts.read() == {**NONE, "running": 1}


@pytest.mark.parametrize("counts", [0.1], indirect=True)
def test_one_whose_lease_stays_over_is_lost(counts: JobCounts) -> None:
    until(lambda: counts.read() == {**NONE, "lost": 1})
