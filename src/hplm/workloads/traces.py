"""Reads recorded traces: CSV files with a column of time stamps."""

from __future__ import annotations

import csv
import math
import re
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.errors import DataError

Seconds = npt.NDArray[np.float64]

# Date, fraction of a second, and time zone as sign, hours and minutes. Azure's traces have seven digits of a second, and
# newer traces have a time zone. Python 3.10 reads neither.
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)((?<=:\d\d:\d\d)\.\d+)?(?:Z|([+-])([01]\d|2[0-3]):?([0-5]\d)?)?",
    re.ASCII,
)
# Largest number accepted as a time stamp. Nanoseconds since 1970 are below the limit; gaps of larger numbers could sum to
# infinity.
MAX_TIME_STAMP = 1e20


@cache
def read_trace(path: Path) -> Seconds:
    """Return the times of a trace's arrivals, `[k]`, rising from 0. Raises DataError with the file and the line.

    The file is CSV with a column TIMESTAMP, such as Azure's traces of LLM inference. Time stamps are dates or numbers, such as
    Unix seconds. A date without a time zone is UTC.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            times_s = np.array([_parse_time_stamp(path, rows.line_num, row["TIMESTAMP"] or "") for row in rows])
    except KeyError:
        raise DataError(f"{path} has no column TIMESTAMP") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a trace: {error}") from None
    if len(times_s) < 2 or times_s.min() == times_s.max():
        raise DataError(f"{path} holds {len(times_s)} arrivals; a trace needs two at different times")
    times_s = np.sort(times_s)
    rising: Seconds = times_s - times_s[0]
    rising.flags.writeable = False
    return rising


def _parse_time_stamp(path: Path, line: int, stamp: str) -> float:
    """Return a date as seconds since 1970, and a number unchanged: only gaps matter. Raises DataError."""
    try:
        date = _DATE.fullmatch(stamp.strip())
        time_stamp = float(stamp) if date is None else _since_1970_s(*date.groups(default="0"))
    except ValueError:
        time_stamp = math.nan
    if not abs(time_stamp) <= MAX_TIME_STAMP:
        raise DataError(f"{path}, line {line}: {stamp!r:.100} is no time; write Unix seconds or YYYY-MM-DD HH:MM:SS")
    return time_stamp


def _since_1970_s(date: str, fraction: str, sign: str, hours: str, minutes: str) -> float:
    """Return a date as seconds since 1970; a date without a time zone is UTC. Raises ValueError."""
    zone_s = 3600 * int(hours) + 60 * int(minutes)
    whole_s = (datetime.fromisoformat(date) - datetime(1970, 1, 1)).total_seconds()
    return whole_s + float(fraction) + (zone_s if sign == "-" else -zone_s)
