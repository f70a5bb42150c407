"""Writing a plan file, and reading tenants' rates."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

from hplm.core.columns import table_rows
from hplm.core.numbers import read_numbers
from hplm.errors import DataError
from hplm.placement.plan import Plan
from hplm.store.artifact import sync

TENANT, RATE = "TENANT", "RATE"


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan. Readers see the old file or the new file, also if this process is killed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_text(plan.to_json())
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_tenant_rates(path: Path) -> dict[str, float]:
    """Read the requests a second of tenants: CSV with the columns TENANT and RATE. Raises DataError with file and line."""
    rows = [*table_rows(path, (TENANT, RATE))]
    column = read_numbers(rate for _, (_, rate) in rows)
    rates: dict[str, float] = {}
    for where, (tenant, written) in rows:
        rate = _number(written if column.also else column.plain.get(written, written))
        if not tenant or tenant in rates:
            raise DataError(f"{where}: one line for each tenant was expected, got {tenant!r:.100}")
        if not 0 <= rate < math.inf:
            raise DataError(f"{where}: requests a second, 0 or more, were expected, got {written!r:.100}")
        rates[tenant] = rate
    return rates


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
