"""Reads recorded traces: CSV files with a column of time stamps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.core.columns import table_rows
from hplm.core.numbers import read_numbers
from hplm.errors import DataError
from hplm.reporting.benchmark_result import plain

Seconds = npt.NDArray[np.float64]

# Date, fraction of a second, and time zone as sign, hours and minutes. Azure's traces have seven digits of a second, and
# newer traces have a time zone. Python 3.10 reads neither.
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)((?<=:\d\d:\d\d)[.,]\d+)?(?:Z|([+-])([01]\d|2[0-3]):?([0-5]\d)?)?",
    re.ASCII,
)
# Largest number accepted as a time stamp. Nanoseconds since 1970 are below the limit; gaps of larger numbers could sum to
# infinity.
MAX_TIME_STAMP = 1e20
# Units of numbers, by the least number that must be of the unit: no date has so many seconds, and the year 1978 has more
# milliseconds. Smaller numbers are read as seconds.
_UNITS = ((2.6e17, "Unix nanoseconds", 1e9), (2.6e14, "Unix microseconds", 1e6), (2.6e11, "Unix milliseconds", 1e3))
# Seconds since 1970 of a date after 1973. Smaller numbers count from another time, so their unit is a guess.
_LEAST_UNIX_S = 1e8
# A gap that is this many times the usual gap gets a warning, and so does a rate outside of these requests a second.
STRAY_GAP = 1000
USUAL_RATES = (0.001, 100_000.0)


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded trace: the times of its arrivals, `[k]`, in seconds rising from 0, and what its time stamps were read as."""

    path: Path
    times_s: Seconds
    unit: str
    in_order: bool
    in_whole_numbers: bool

    @property
    def rate_per_s(self) -> float:
        """The mean rate from the first to the last arrival."""
        return (len(self.times_s) - 1) / float(self.times_s[-1])

    @property
    def largest_gap_s(self) -> float:
        return float(np.diff(self.times_s).max())

    @property
    def usual_gap_s(self) -> float:
        """The median of the gaps above 0."""
        gaps = np.diff(self.times_s)
        return float(np.median(gaps[gaps > 0]))

    @property
    def is_stretched(self) -> bool:
        """Whether one gap, far longer than the usual gap, is 90 % of the trace: then the mean rate says nothing."""
        return self.largest_gap_s > max(STRAY_GAP * self.usual_gap_s, 0.9 * float(self.times_s[-1]))

    def lines(self) -> Iterator[str]:
        """Yield what was read, and what looks like a mistake, in words."""
        order = "" if self.in_order else "; its lines were out of order and were sorted"
        yield (
            f"{self.path.name}: {len(self.times_s):,} arrivals in {plain(float(self.times_s[-1]))} s, "
            f"{plain(self.rate_per_s)} requests/s; the usual gap is {plain(self.usual_gap_s)} s, the largest "
            f"{plain(self.largest_gap_s)} s; time stamps were read as {self.unit}{order}"
        )
        if self.largest_gap_s > STRAY_GAP * self.usual_gap_s:
            number = int(np.argmax(np.diff(self.times_s))) + 1
            yield (
                f"warning: the gap after arrival {number:,} is {plain(self.largest_gap_s / self.usual_gap_s)} times the "
                f"usual gap and {self.largest_gap_s / float(self.times_s[-1]):.0%} of the trace: remove a stray time stamp, "
                "or cut the trace at the gap"
            )
        if self.in_whole_numbers and self.unit == "seconds" and self.rate_per_s < 1:
            yield (
                f"warning: the trace has {plain(1e3 * self.rate_per_s)} requests/s if its time stamps are milliseconds, and "
                f"{plain(1e6 * self.rate_per_s)} if they are microseconds: then divide them by 1000 or 1,000,000"
            )
        elif not (USUAL_RATES[0] <= self.rate_per_s <= USUAL_RATES[1] or self.is_stretched):
            yield f"warning: {plain(self.rate_per_s)} requests/s is unlikely: check the unit of the time stamps"


def read_trace(path: Path) -> Seconds:
    """Return the times of a trace's arrivals, `[k]`, rising from 0. Raises as `load_trace` does."""
    return load_trace(path).times_s


@cache
def load_trace(path: Path) -> Trace:
    """Read a trace. Raises DataError with the file and the line.

    The file is CSV with a column TIMESTAMP, in any case, such as Azure's traces of LLM inference. Time stamps are dates or
    numbers. A date without a time zone is UTC. Numbers may have a decimal comma. They are Unix seconds, milliseconds,
    microseconds or nanoseconds, as their size says, or else seconds from any time on.
    """
    stamps = [(where, stamp) for where, (stamp,) in table_rows(path, ("TIMESTAMP",))]
    numbers = [stamp for _, stamp in stamps if _DATE.fullmatch(stamp.strip()) is None]
    # Reading a column of numbers takes a second for each 100,000, so only numbers with commas are read so.
    if any("," in number for number in numbers) and not (column := read_numbers(numbers)).also:
        stamps = [(where, column.plain.get(stamp, stamp)) for where, stamp in stamps]
    times_s = np.array([_parse_time_stamp(where, stamp) for where, stamp in stamps])
    if len(times_s) < 2 or times_s.min() == times_s.max():
        raise DataError(f"{path} holds {len(times_s)} arrivals; a trace needs two at different times")
    # The median, because one stray time stamp must not choose the unit.
    usual = float(np.median(np.abs(times_s)))
    unit, each_second = next(
        ((unit, each_second) for least, unit, each_second in _UNITS if usual >= least),
        ("dates or Unix seconds" if usual >= _LEAST_UNIX_S else "seconds", 1.0),
    )
    in_order, in_whole_numbers = bool((np.diff(times_s) >= 0).all()), bool((times_s == np.floor(times_s)).all())
    times_s = np.sort(times_s)
    rising: Seconds = (times_s - times_s[0]) / each_second
    rising.flags.writeable = False
    return Trace(path, rising, unit, in_order, in_whole_numbers)


def _parse_time_stamp(where: str, stamp: str) -> float:
    """Return a date as seconds since 1970, and a number unchanged: only gaps matter. Raises DataError."""
    try:
        date = _DATE.fullmatch(stamp.strip())
        time_stamp = float(stamp) if date is None else _since_1970_s(*date.groups(default="0"))
    except ValueError:
        time_stamp = math.nan
    if not abs(time_stamp) <= MAX_TIME_STAMP:
        raise DataError(f"{where}: {stamp!r:.100} is no time; write Unix seconds or YYYY-MM-DD HH:MM:SS")
    return time_stamp


def _since_1970_s(date: str, fraction: str, sign: str, hours: str, minutes: str) -> float:
    """Return a date as seconds since 1970; a date without a time zone is UTC. Raises ValueError."""
    zone_s = 3600 * int(hours) + 60 * int(minutes)
    whole_s = (datetime.fromisoformat(date) - datetime(1970, 1, 1)).total_seconds()
    return whole_s + float(fraction.replace(",", ".")) + (zone_s if sign == "-" else -zone_s)
