"""Reads recorded traces: CSV files with a column of time stamps."""

from __future__ import annotations

import math
import re
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.core.columns import table_rows
from hplm.core.numbers import read_numbers
from hplm.errors import DataError

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


@cache
def read_trace(path: Path) -> Seconds:
    """Return the times of a trace's arrivals, `[k]`, rising from 0. Raises DataError with the file and the line.

    The file is CSV with a column TIMESTAMP, in any case, such as Azure's traces of LLM inference. Time stamps are dates or
    numbers, such as Unix seconds. A date without a time zone is UTC. Numbers may have a decimal comma.
    """
    stamps = [(where, stamp) for where, (stamp,) in table_rows(path, ("TIMESTAMP",))]
    numbers = [stamp for _, stamp in stamps if _DATE.fullmatch(stamp.strip()) is None]
    # Reading a column of numbers takes a second for each 100,000, so only numbers with commas are read so.
    if any("," in number for number in numbers) and not (column := read_numbers(numbers)).also:
        stamps = [(where, column.plain.get(stamp, stamp)) for where, stamp in stamps]
    times_s = np.array([_parse_time_stamp(where, stamp) for where, stamp in stamps])
    if len(times_s) < 2 or times_s.min() == times_s.max():
        raise DataError(f"{path} holds {len(times_s)} arrivals; a trace needs two at different times")
    times_s = np.sort(times_s)
    rising: Seconds = times_s - times_s[0]
    rising.flags.writeable = False
    return rising


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
