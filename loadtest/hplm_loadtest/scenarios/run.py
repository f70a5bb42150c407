"""What became of a run's requests. Latency counts from the planned time, so a late generator hides nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hplm.errors import UnreachableError, leaves
from hplm.reporting.benchmark_result import Goal

Seconds = npt.NDArray[np.float64]
Kind = Literal["answered", "refused", "failed", "lost"]

ANSWERED = "OK"
NO_ANSWER = "NO_ANSWER"  # the run ended first
NOT_SENT = "NOT_SENT"  # too many others were under way
LATE_S = 0.020
KEPT_UP_SHARE = 0.99
_STATUS = {leaf.code: leaf.status for leaf in leaves()}


def kind_of(code: str) -> Kind:
    """`refused`: the server said clearly that it cannot now; `failed`: any other error; `lost`: no word from it."""
    if code == ANSWERED:
        return "answered"
    if code in (NO_ANSWER, NOT_SENT, UnreachableError.code):
        return "lost"
    return "refused" if _STATUS.get(code) == "UNAVAILABLE" else "failed"


@dataclass(frozen=True)
class Run:
    """`k` requests as columns: seconds from the start (NaN: never), code of the answer, deadline (NaN: none).

    `generator_s` is the processor time of the process that sent them.
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
        """The requests where `chosen` `[k]` is true."""
        codes = [code for code, wanted in zip(self.codes, chosen, strict=True) if wanted]
        planned_s, sent_s, done_s = (column[chosen] for column in (self.planned_s, self.sent_s, self.done_s))
        return Run(self.duration_s, planned_s, sent_s, done_s, codes, self.deadlines_s[chosen])

    def between(self, start_s: float, end_s: float) -> Run:
        """The requests planned then, as a run of that time alone."""
        part = self.select((self.planned_s >= start_s) & (self.planned_s < end_s))
        times = {column: getattr(part, column) - start_s for column in ("planned_s", "sent_s", "done_s")}
        return replace(part, duration_s=end_s - start_s, **times)

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which of the requests were."""
        return np.array([code == ANSWERED for code in self.codes], dtype=np.bool_)

    @property
    def latency_s(self) -> Seconds:
        """Planned time to answer, of the answered requests only."""
        return (self.done_s - self.planned_s)[self.answered]

    @property
    def waits_s(self) -> Seconds:
        """`latency_s`, and for each request that was lost or failed an infinite one, at the end; what was refused is left out.

        Else a server would look faster for each slow request that it loses.
        """
        kinds = self.kinds
        return np.append(self.latency_s, np.full(kinds["lost"] + kinds["failed"], np.inf))

    @property
    def lag_s(self) -> Seconds:
        """How much later than planned each was sent; infinite for one never sent.

        Without those for which the server left no place: they are lost, and no fault of the generator's.
        """
        lag_s = np.where(np.isnan(self.sent_s), np.inf, self.sent_s - self.planned_s)
        return lag_s[[code != NOT_SENT for code in self.codes]]

    def sent_within(self, lag_s: float) -> float:
        """Share of the requests sent at most `lag_s` after their planned time, of those that there was a place for."""
        lags_s = self.lag_s
        return float(np.mean(lags_s <= lag_s)) if lags_s.size else 1.0

    @property
    def kept_up(self) -> bool:
        """Whether the generator did what was planned: 99 % sent within 20 ms. If not, the run measured the generator."""
        return self.sent_within(LATE_S) >= KEPT_UP_SHARE

    @property
    def kinds(self) -> Counter[Kind]:
        return Counter(kind_of(code) for code in self.codes)

    @property
    def in_time(self) -> int:
        """How many requests were answered by their deadline; those without one all were, once answered."""
        return int(np.count_nonzero(self.answered_within(self.deadlines_s)))

    def answered_within(self, limit_s: Seconds | float) -> npt.NDArray[np.bool_]:
        """Which were answered so many seconds after their planned time at most; NaN is no limit."""
        late = self.done_s - self.planned_s > limit_s
        return self.answered & ~late

    def utility_per_s(self, lengths: npt.NDArray[np.int64], limit_s: Seconds | float) -> float:
        """Sum of 1 / length over those answered within `limit_s`, a second of the plan (TCB eq. 9)."""
        return float((self.answered_within(limit_s) / lengths).sum() / self.duration_s)

    @property
    def span_s(self) -> float:
        """The planned duration, or until the last answer where that came later."""
        return max(self.duration_s, float(np.max(self.done_s, initial=0.0, where=self.answered)))

    def percentile_ms(self, percent: float) -> float:
        """Of `waits_s`; infinite where nothing was answered."""
        ordered = np.sort(self.waits_s)
        place = (len(ordered) - 1) * percent / 100
        # Without what is behind it: numpy's own would meet an infinity there and find no number.
        until = ordered[: math.ceil(place) + 1]
        if not until.size or np.isinf(until[-1]):
            return np.inf
        return 1000 * float(np.interp(place, np.arange(len(until)), until))

    def row(self) -> dict[str, Any]:
        """One row of a report; times are of `waits_s`; `kept_up` is there the share sent within 20 ms of plan."""
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
    """Fills the columns of a Run while it goes on; `clock` gives seconds."""

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
        # By the clock: `perf_counter` is one of all processes.
        self.started_s = clock()
        self._processor_start_s = time.process_time()

    def elapsed_s(self) -> float:
        """Since the start."""
        return self._clock() - self.started_s

    def sent(self, index: int) -> None:
        self._sent_s[index] = self.elapsed_s()

    def done(self, index: int, code: str) -> None:
        self._done_s[index] = self.elapsed_s()
        self._codes[index] = code

    def latency_s(self, index: int) -> float:
        """Of a request that is done, from its planned time."""
        return float(self._done_s[index] - self._planned_s[index])

    def run(self, count: int, ended_s: float | None = None) -> Run:
        """The first `count` requests; one without an answer by now is lost.

        Of a run cut short, the duration is until it was, `ended_s` after the start, or until now.
        """
        until_s = self.elapsed_s() if ended_s is None else ended_s
        return Run(
            self._duration_s if count == len(self._codes) else until_s,
            self._planned_s[:count],
            self._sent_s[:count],
            self._done_s[:count],
            tuple(self._codes[:count]),
            self._deadlines_s[:count],
            time.process_time() - self._processor_start_s,
        )


def joined(parts: Sequence[tuple[float, Run]]) -> Run:
    """What several generators did at the same time as one run; each with `started_s` of its Recorder."""
    first_s = min(started_s for started_s, _ in parts)
    late_s = [started_s - first_s for started_s, _ in parts]
    runs = [run for _, run in parts]
    times = {
        column: np.concatenate([getattr(run, column) + late for late, run in zip(late_s, runs, strict=True)])
        for column in ("planned_s", "sent_s", "done_s")
    }
    return Run(
        max(late + run.duration_s for late, run in zip(late_s, runs, strict=True)),
        **times,
        codes=[code for run in runs for code in run.codes],
        deadlines_s=np.concatenate([run.deadlines_s for run in runs]),
        generator_s=sum(run.generator_s for run in runs),
    )


def goals_of(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """What every load must fulfil for its figures to mean anything: nothing lost or failed, and a generator that kept up."""
    bad = sum(row["lost"] + row.get("failed", 0) for row in rows)
    return [Goal(f"{name}-lost", "requests lost or failed", 0, bad, "requests", "lower"), kept_up(name, rows)]


def kept_up(name: str, rows: Sequence[Mapping[str, Any]]) -> Goal:
    """Whether the generator was in time in every one of the rows' loads."""
    within = min(row["kept_up"] for row in rows)
    return Goal(f"{name}-kept-up", "share sent within 20 ms of plan", KEPT_UP_SHARE, within, "", "higher")


def across(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over a load's rounds; of `lost` the sum, and of `kept_up` the worst: one round in which that happened counts."""
    kinds: dict[str, Callable[[Iterable[float]], float]] = {"kept_up": min, "lost": sum}
    return {key: kinds.get(key, median)(one[key] for one in rounds) for key in rounds[0]}


def unanswered(name: str, runs: Sequence[Run]) -> Goal:
    """Of closed loops, in which each request is to be answered."""
    bad = sum(len(run) - run.kinds["answered"] for run in runs)
    return Goal(f"{name}-lost", "requests lost or failed", 0, bad, "requests", "lower")
