"""Records the outcome of every request of a load run. Latency counts from the planned time, so a late generator shows."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hplm.errors import UnreachableError, leaves

Seconds = npt.NDArray[np.float64]
Kind = Literal["answered", "refused", "failed", "lost"]
Side = Literal["generator", "server"]

ANSWERED = "OK"
NO_ANSWER = "NO_ANSWER"  # the run ended before the answer came
NOT_SENT = "NOT_SENT"  # too many other requests were under way
LATE_S = 0.020  # a request sent later than this after its planned time is late
KEPT_UP_SHARE = 0.99  # share of requests that must not be late, or the generator fell behind
SLOW_S = 1.0  # a server that takes longer for half of its answers has a backlog: an answer takes milliseconds
BUSY_SHARE = 0.9  # share of one core from which the generator, with one running thread, has no time left
TIMES = ("planned_s", "sent_s", "done_s")  # the columns of a run in seconds from its start
_STATUS = {leaf.code: leaf.status for leaf in leaves()}


def kind_of(code: str) -> Kind:
    """Return the kind of an outcome.

    refused: the server answered that it cannot take the request now. failed: any other error. lost: no answer.
    """
    if code == ANSWERED:
        return "answered"
    if code in (NO_ANSWER, NOT_SENT, UnreachableError.code):
        return "lost"
    return "refused" if _STATUS.get(code) == "UNAVAILABLE" else "failed"


@dataclass(frozen=True)
class Run:
    """The outcomes of a load's `k` requests as columns.

    planned_s, sent_s, done_s: `[k]`, seconds from the start, NaN if it never happened.
    codes: the code of each answer. deadlines_s: `[k]`, NaN for a request without a deadline.
    generator_s: processor time of the process that sent the requests.
    """

    duration_s: float
    planned_s: Seconds
    sent_s: Seconds
    done_s: Seconds
    codes: Sequence[str]
    deadlines_s: Seconds
    generator_s: float = 0.0

    def __len__(self) -> int:
        return len(self.codes)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Run:
        """Return the requests where `chosen` `[k]` is true."""
        columns = {name: getattr(self, name)[chosen] for name in (*TIMES, "deadlines_s")}
        return Run(self.duration_s, codes=list(compress(self.codes, chosen)), **columns)

    def between(self, start_s: float, end_s: float) -> Run:
        """Return the requests planned between two times, as a run of that time alone."""
        part = self.select((self.planned_s >= start_s) & (self.planned_s < end_s))
        times = {name: getattr(part, name) - start_s for name in TIMES}
        return replace(part, duration_s=end_s - start_s, **times)

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Return which requests were answered: `[k]`."""
        return np.array([code == ANSWERED for code in self.codes], dtype=np.bool_)

    @property
    def latency_s(self) -> Seconds:
        """Return the time from plan to answer of each answered request."""
        return (self.done_s - self.planned_s)[self.answered]

    @property
    def waits_s(self) -> Seconds:
        """Return `latency_s`, then infinity for each lost or failed request. Refused requests are left out.

        Without the infinities a server would look faster for each slow request that it loses.
        """
        kinds = self.kinds
        return np.append(self.latency_s, np.full(kinds["lost"] + kinds["failed"], np.inf))

    @property
    def lag_s(self) -> Seconds:
        """Return how much later than planned each request was sent; infinity if a request was never sent.

        Requests of the code NOT_SENT are left out: the server was slow, not the generator.
        """
        lag_s = np.where(np.isnan(self.sent_s), np.inf, self.sent_s - self.planned_s)
        return lag_s[[code != NOT_SENT for code in self.codes]]

    def sent_within(self, lag_s: float) -> float:
        """Return the share of requests, see `lag_s`, that were sent at most `lag_s` seconds after their planned time."""
        lags_s = self.lag_s
        return float(np.mean(lags_s <= lag_s)) if lags_s.size else 1.0

    @property
    def kept_up(self) -> bool:
        """Return whether the generator followed its plan: 99 % of the requests sent within 20 ms."""
        return self.sent_within(LATE_S) >= KEPT_UP_SHARE

    @property
    def answer_s(self) -> Seconds:
        """Return the time from sending to the answer of each answered request."""
        return (self.done_s - self.sent_s)[self.answered]

    @property
    def is_server_slow(self) -> bool:
        """Return whether half of the answers took longer than `SLOW_S` after the request was sent."""
        answer_s = self.answer_s
        return bool(answer_s.size and np.median(answer_s) > SLOW_S)

    @property
    def is_server_overloaded(self) -> bool:
        """Return whether the server left out more than 1 % of the requests.

        Left out are refused requests, requests not sent because 768 were under way, and requests lost later than `SLOW_S`. A
        request that is lost sooner found no server.
        """
        is_unreachable = np.array([code == UnreachableError.code for code in self.codes])
        timed_out = np.count_nonzero(is_unreachable & (self.done_s - self.sent_s > SLOW_S))
        left_out = self.kinds["refused"] + self.codes.count(NOT_SENT) + timed_out
        return bool(left_out > (1 - KEPT_UP_SHARE) * len(self))

    @property
    def generator_share(self) -> float:
        """Return the processor time of the generator, as a share of one core until the last answer."""
        return self.generator_s / max(self.duration_s, float(np.nanmax(self.done_s, initial=0.0)))

    @property
    def fell_behind(self) -> Side | None:
        """Return the side that fell behind: the generator sent late, or the server left requests out.

        If both happened, or answers were slow too, the generator is at fault only if it used a whole core: such a generator
        also reads answers late. Otherwise the server is the slower side.
        """
        if self.kept_up:
            return "server" if self.is_server_overloaded else None
        is_server_behind = self.is_server_overloaded or self.is_server_slow
        return "server" if is_server_behind and self.generator_share < BUSY_SHARE else "generator"

    @property
    def kinds(self) -> Counter[Kind]:
        """Return how many requests had each kind of outcome."""
        return Counter(kind_of(code) for code in self.codes)

    @property
    def in_time(self) -> int:
        """Return how many requests were answered by their deadline. An answer without a deadline is always in time."""
        return int(np.count_nonzero(self.answered_within(self.deadlines_s)))

    def answered_within(self, limit_s: Seconds | float) -> npt.NDArray[np.bool_]:
        """Return which requests were answered at most `limit_s` after their planned time: `[k]`. NaN is no limit."""
        return self.answered & ~(self.done_s - self.planned_s > limit_s)

    def utility_per_s(self, lengths: npt.NDArray[np.int64], limit_s: Seconds | float) -> float:
        """Return the sum of 1 / length over the requests answered within `limit_s`, per second of the plan (TCB eq. 9)."""
        return float((self.answered_within(limit_s) / lengths).sum() / self.duration_s)

    @property
    def span_s(self) -> float:
        """Return the planned duration, or the time until the last answer if that is longer."""
        return max(self.duration_s, float(np.max(self.done_s, initial=0.0, where=self.answered)))

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of `waits_s`; infinity if nothing was answered."""
        ordered = np.sort(self.waits_s)
        position = (len(ordered) - 1) * percent / 100
        # Values after the position are cut off: `np.percentile` returns NaN if it meets an infinity.
        head = ordered[: math.ceil(position) + 1]
        if not head.size or np.isinf(head[-1]):
            return np.inf
        return 1000 * float(np.interp(position, np.arange(len(head)), head))

    def row(self) -> dict[str, Any]:
        """Return the run as one row of a benchmark result.

        Times are those of `waits_s`. The column `kept_up` is the share of requests sent within 20 ms of plan.
        """
        kinds, lag_s, waits_s = self.kinds, self.lag_s, self.waits_s
        return {
            "requests": len(self),
            "offered_per_s": len(self) / self.duration_s,
            "goodput_per_s": self.in_time / self.span_s,
            "in_time": self.in_time / len(self),
            "mean_ms": 1000 * float(waits_s.mean()) if waits_s.size else np.inf,
            **{f"p{percent}_ms": self.percentile_ms(percent) for percent in (50, 95, 99)},
            **{kind: kinds[kind] for kind in ("refused", "failed", "lost")},
            "errors": dict(Counter(code for code in self.codes if code != ANSWERED)),
            "kept_up": self.sent_within(LATE_S),
            "lag_p99_ms": 1000 * float(np.percentile(lag_s, 99, method="higher")) if lag_s.size else 0.0,
        }


class Recorder:
    """The writer of a Run while the load is sent. `clock` returns seconds."""

    def __init__(
        self,
        planned_s: Seconds,
        deadlines_s: Seconds,
        duration_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._planned_s, self._deadlines_s, self._duration_s = planned_s, deadlines_s, duration_s
        self._sent_s, self._done_s = np.full((2, len(planned_s)), np.nan)
        self._codes = [NO_ANSWER] * len(planned_s)
        self._clock = clock
        # Comparable between processes, because all processes share the clock of `perf_counter`.
        self.started_s = clock()
        self._processor_start_s = time.process_time()

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self.started_s

    def sent(self, index: int) -> None:
        """Record that a request is sent now."""
        self._sent_s[index] = self.elapsed_s()

    def done(self, index: int, code: str) -> None:
        """Record that a request ends now, with the code of its outcome."""
        self._done_s[index] = self.elapsed_s()
        self._codes[index] = code

    def latency_s(self, index: int) -> float:
        """Return the time from plan to answer of a request that is done."""
        return float(self._done_s[index] - self._planned_s[index])

    def run(self, count: int, ended_s: float | None = None) -> Run:
        """Return the first `count` requests as a run. A request without an answer by now is lost.

        If the run was cut short, its duration ends `ended_s` after the start, or now.
        """
        cut_s = self.elapsed_s() if ended_s is None else ended_s
        return Run(
            self._duration_s if count == len(self._codes) else cut_s,
            self._planned_s[:count],
            self._sent_s[:count],
            self._done_s[:count],
            tuple(self._codes[:count]),
            self._deadlines_s[:count],
            time.process_time() - self._processor_start_s,
        )


def joined(parts: Sequence[tuple[float, Run]]) -> Run:
    """Join the runs of generators that sent at the same time into one run. Each run comes with its Recorder's `started_s`."""
    first_s = min(started_s for started_s, _ in parts)
    offsets_s = [started_s - first_s for started_s, _ in parts]
    runs = [run for _, run in parts]
    times = {
        column: np.concatenate([getattr(run, column) + offset_s for offset_s, run in zip(offsets_s, runs, strict=True)])
        for column in TIMES
    }
    return Run(
        max(offset_s + run.duration_s for offset_s, run in zip(offsets_s, runs, strict=True)),
        **times,
        codes=[code for run in runs for code in run.codes],
        deadlines_s=np.concatenate([run.deadlines_s for run in runs]),
        generator_s=sum(run.generator_s for run in runs),
    )
