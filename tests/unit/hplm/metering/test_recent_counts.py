"""Counts of the last hour and day that processes share."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.metering.recent_counts import DAY, FORGOTTEN_S, HOUR, Counts, RecentCounts, read_recent, sweep

NOW_S = 1_800_000_000.0
STEP_S = st.integers(0, 20_000)
STORE = Path("/a/store")


class ExactCounts:
    """The slow twin: keeps every addition, and adds those whose period is one of the last."""

    def __init__(self) -> None:
        self._added: defaultdict[str, list[tuple[float, Counts]]] = defaultdict(list)

    def add(self, tenant: str, counts: Counts, now_s: float) -> None:
        self._added[tenant].append((now_s, counts))

    def read(self, tenant: str, now_s: float) -> dict[object, Counts]:
        sums = {}
        for ring in (HOUR, DAY):
            recent = Counts()
            for at_s, counts in self._added[tenant]:
                if now_s // ring.period_s - at_s // ring.period_s < ring.slots:
                    recent = recent.plus(counts)
            sums[ring] = recent
        return sums


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(STEP_S, st.sampled_from("abc"), st.integers(0, 5)), max_size=25))
def test_they_are_the_sums_of_the_last_periods(steps: list[tuple[int, str, int]], tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("shm")  # type: ignore[attr-defined]
    exact, now_s = ExactCounts(), NOW_S
    with closing(RecentCounts(STORE, folder=folder)) as recent:
        for step_s, tenant, count in steps:
            now_s += step_s
            added = Counts(ok=count, refused=1, tokens=7 * count)
            recent.add({tenant: added}, now_s)
            exact.add(tenant, added, now_s)
            for name in "abc":
                assert recent.read(name, now_s) == exact.read(name, now_s)


def add_many(folder: Path, times: int) -> None:
    with closing(RecentCounts(STORE, folder=folder)) as recent:
        for _ in range(times):
            recent.add({"acme": Counts(ok=1), "other": Counts(failed=2)}, NOW_S)


def test_processes_add_to_the_same_counts(tmp_path: Path) -> None:
    adders = [multiprocessing.get_context("fork").Process(target=add_many, args=(tmp_path, 200)) for _ in range(4)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    with closing(RecentCounts(STORE, folder=tmp_path)) as recent:
        assert recent.read("acme", NOW_S)[DAY] == Counts(ok=800)
        assert recent.read("other", NOW_S)[HOUR] == Counts(failed=1600)


def test_counts_outlive_their_process(tmp_path: Path) -> None:
    with closing(RecentCounts(STORE, folder=tmp_path)) as recent:
        recent.add({"acme": Counts(ok=3)}, time.time())
    assert read_recent(STORE, "", "acme", folder=tmp_path)[DAY] == Counts(ok=3)


def test_stores_are_counted_apart(tmp_path: Path) -> None:
    with closing(RecentCounts(STORE, folder=tmp_path)) as recent:
        recent.add({"acme": Counts(ok=3)}, time.time())
    assert read_recent(Path("/another"), "", "acme", folder=tmp_path)[DAY] == Counts()


def test_files_that_nothing_has_touched_for_two_days_are_removed(tmp_path: Path) -> None:
    for name in ("old", "new"):
        RecentCounts(Path(name), folder=tmp_path).close()
    old = next(iter(tmp_path.iterdir()))
    before_s = time.time() - FORGOTTEN_S - 1
    os.utime(old, (before_s, before_s))
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert not old.exists()
