"""A machine's clock that jumps back a day, at any time: nothing is lost, nothing waits for the day to pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from hplm_builder.jobs.handlers import load_handlers

from hplm.core.settings import ManagerSettings
from hplm.housekeeping import garbage_collection
from hplm.jobs.worker_loop import Worker
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.manage.making import (
    QUICK,
    SETTINGS,
    ask,
    colours,
    create_domain,
    create_tenant,
    files_below,
    update,
    upload,
)

DAY_S, LONG_S = 86_400.0, 200_000.0


class Clock:
    """The time of day, `ahead_s` off."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class JumpingBack(Clock):
    """Jumps back a day after it was asked so many times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.asked, self._after = 0, after

    def __call__(self) -> float:
        self.asked += 1
        self.ahead_s = -DAY_S if self.asked > self._after else 0.0
        return super().__call__()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def managed(store: Store, clock: Clock) -> Iterator[ManageService]:
    with closing(ManageService(store, partial(ManagerSettings, **SETTINGS), clock=clock)) as opened:
        yield opened


def work(store: Store, clock: Clock) -> None:
    Worker(store, "w", load_handlers, clock=clock).run(until_idle=True)


def test_what_was_published_retired_or_begun_before_the_jump_is_gone_on_with(
    managed: ManageService, store: Store, registry: Registry, clock: Clock
) -> None:
    create_domain(managed, "law")
    work(store, clock)
    create_tenant(managed, "acme", domain="law")
    create_tenant(managed, "gone")
    work(store, clock)
    ask(managed, "tenant.delete", tenant="gone")
    begun = upload(managed, colours(), "kept.csv")
    waiting = create_tenant(managed, "late")
    clock.ahead_s = -DAY_S
    # A job from before the jump is taken, and one of after; the upload serves.
    source = {"train": {"upload": begun}}
    after = ask(managed, "tenant.create", tenant="early", data=source, settings=QUICK)["job"]
    work(store, clock)
    update(managed, "acme", colours(seed=1))
    work(store, clock)
    for job in (waiting, after):
        assert (registry.job(job).state, registry.job(job).error) == ("done", None)
    assert registry.tenant("acme").current.number == 2
    assert ask(managed, "tenant.rollback", tenant="acme")["version"] == 1
    assert [one["name"] for one in ask(managed, "tenant.list")["tenants"]] == ["acme", "early", "late"]
    assert garbage_collection.verify(store, registry, clock()).problems == ()
    # What was retired before the jump waits no longer than its time once the clock is right again.
    clock.ahead_s = LONG_S
    work(store, clock)
    verdict = garbage_collection.verify(store, registry, clock())
    assert (verdict.problems, verdict.loose) == ((), ())
    assert not [path for path in files_below(store) if path.startswith(("tenants/gone/", "uploads/", "jobs/"))]


@pytest.mark.parametrize("after", range(1, 8))
def test_a_jump_while_a_worker_is_at_a_job_costs_neither_the_job_nor_a_version(
    managed: ManageService, store: Store, registry: Registry, after: int
) -> None:
    create_tenant(managed, "acme")
    work(store, Clock())
    job, jumping = update(managed, "acme", colours(seed=1)), JumpingBack(after)
    work(store, jumping)
    assert jumping.asked > after
    assert (registry.job(job).state, registry.job(job).error) == ("done", None)
    assert registry.tenant("acme").current.number == 2
    assert garbage_collection.verify(store, registry, time.time()).problems == ()
