"""What a saturated server answers a second, without how it fills and empties."""

from __future__ import annotations

import numpy as np

from hplm_loadtest.scenarios.run import Run

# Between two batches' answers, over the median between two answers.
PAUSE = 10
# A closed loop has so many times the requests that are under way: the start and the end are a small part of it.
LEAST_WAVES = 6


def enough_requests(rate_per_s: float, duration_s: float, in_flight: int) -> int:
    """How many a closed loop is to send for `duration_s` of them to count in `steady_rate`, of a server that does `rate_per_s`.

    The first and the last that are under way do not; the third time is for batches of up to half of them, cut at both ends.
    """
    return int(rate_per_s * duration_s) + 3 * in_flight


def steady_rate(run: Run) -> tuple[float, bool]:
    """Answers a second while all of a closed loop's requests were under way: until the last was sent. And `start_left_out`.

    Answers come a batch at a time, and the last request is sent in the midst of one, whose other answers are computed too:
    what counts is until the end of the last whole batch. Nor is what an empty server was sent at first, a batch of it in the
    first of two stages while the second waits: where the run goes on for long enough, what counts is after that. Without both a
    system with few and large batches, or with stages, looked slower by a batch or more in all that it answered.
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
        # Of batches the time between them is most of it; of answers that come one by one a pause is a hiccup.
        ends = ends[:0]
    if len(ends):
        steady = ends[ends >= first]
        if len(steady) > 1:
            return float((steady[-1] - steady[0]) / (done_s[steady[-1]] - done_s[steady[0]])), True
        return float((ends[-1] + 1) / done_s[ends[-1]]), False
    if last > first >= 0 and until_s > done_s[first]:
        return float((last - first) / (until_s - done_s[first])), True
    return float((last + 1) / until_s), False
