"""`python -m tests.unit.hplm.runtime.full_shared_memory DISK` in a mount namespace of its own: counts and quotas, no room."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path

from hplm.metering.recent_counts import DAY, Counts, RecentCounts
from hplm.quotas.limits import Limits, Use
from hplm.quotas.quota_file import QuotaFile
from tests.limits import full, mount

NOW_S = 1_800_000_000.0
ONE_A_SECOND = Limits(requests_per_s=1.0)
# Their records are on many pages.
STRANGERS = [f"stranger-{number}" for number in range(200)]


def main(disk: Path) -> None:
    mount(disk, "size=2m")
    with ExitStack() as stack:
        counts = stack.enter_context(closing(RecentCounts(Path("/a/store"), folder=disk)))
        quotas = stack.enter_context(closing(QuotaFile(disk / "quotas")))
        counts.add({"acme": Counts(ok=1)}, NOW_S)
        quotas.lease("acme", ONE_A_SECOND, Use(1.0), Use(), now_s=1.0, until_s=9.0)
        stack.enter_context(full(disk))
        counts.add({"acme": Counts(ok=1), **dict.fromkeys(STRANGERS, Counts(ok=1))}, NOW_S)
        assert counts.read("acme", NOW_S)[DAY] == Counts(ok=2)
        # The first request of a process looks through the whole file.
        assert [quotas.take("acme", ONE_A_SECOND, 1.0, 1.0) is None for _ in range(2)] == [True, False]
        for name in STRANGERS:
            counts.read(name, NOW_S)
            assert quotas.under_way(name, 1.0) == 0
            assert quotas.take(name, ONE_A_SECOND, 1.0, 1.0) is None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
