"""Measures how many requests a saturated server answers per second, without the time in which it fills and empties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hplm.errors import UnreachableError
from hplm.reporting.benchmark_result import plain
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.workloads.load_plan import Requests

# A gap between two answers ends a batch if it is longer than this many median gaps.
PAUSE = 10
# A closed loop has at least this many times the requests under way, so that its start and its end are a small part.
MIN_WAVES = 6


def saturate(url: str, draw: Callable[[int], Requests], in_flight: int, *, warm_up: Run, seconds: float = 0.0) -> Run:
    """Send requests in a closed loop for about `seconds`, and at least `MIN_WAVES` waves of `in_flight` requests.

    warm_up: a closed loop on the same server, which tells the server's rate. Raises UnreachableError if it has no answer.
    """
    if not (answers := warm_up.kinds["answered"]):
        raise UnreachableError(f"answers to the warm-up were expected, got {dict(Counter(warm_up.codes))} from {url}")
    count = max(MIN_WAVES * in_flight, enough_requests(answers / warm_up.span_s, seconds, in_flight))
    return closed_loop(url, draw(count), in_flight)


def enough_requests(rate_per_s: float, duration_s: float, in_flight: int) -> int:
    """Return how many requests a closed loop needs so that `steady_rate` counts about `duration_s` of them.

    `steady_rate` leaves out the first and the last `in_flight` requests. A third `in_flight` is for batches of up to half of
    them that are cut at both ends.
    """
    return int(rate_per_s * duration_s) + 3 * in_flight


def rate_columns(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the columns of closed loops of several rounds: see `steady_rate`."""
    rates, left_out = zip(*map(steady_rate, runs), strict=True)
    return {
        "requests_per_s": median(rates),
        "spread": f"{plain(min(rates))}-{plain(max(rates))}",
        "start_left_out": all(left_out),
    }


def steady_rate(run: Run) -> tuple[float, bool]:
    """Return the answers per second of a closed loop while all its requests were under way, and `start_left_out`.

    The measured time ends with the last whole batch that was answered before the last request was sent. Answers come a batch
    at a time, and the last request is sent in the middle of a batch.

    The measured time starts after the answers to the requests that an empty server was sent. Meanwhile the second of two
    stages waits for the first. `start_left_out` is False if the run was too short for that.

    Otherwise a system with few large batches, or with stages, would look slower by one batch or more.
    """
    done_s = np.sort(run.done_s[run.answered])
    if not len(done_s):
        return 0.0, False
    until_s = float(np.nanmax(run.sent_s))
    first = int((run.sent_s < done_s[0]).sum()) - 1
    last = int(np.searchsorted(done_s, until_s, side="right")) - 1
    pauses = np.diff(done_s)
    ends = np.flatnonzero(pauses[: last + 1] > PAUSE * np.median(pauses)) if len(pauses) else np.zeros(0, np.int64)
    if 2 * pauses[ends].sum() < done_s[last] - done_s[0]:
        # The server does not answer in batches: the time between batches would be most of the time.
        ends = ends[:0]
    if len(ends):
        steady = ends[ends >= first]
        if len(steady) > 1:
            return float((steady[-1] - steady[0]) / (done_s[steady[-1]] - done_s[steady[0]])), True
        return float((ends[-1] + 1) / done_s[ends[-1]]), False
    if last > first >= 0 and until_s > done_s[first]:
        return float((last - first) / (until_s - done_s[first])), True
    return float((last + 1) / until_s), False
