"""The one form of all benchmark results: command, machine, settings, rows, and goals with their verdicts."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from hplm.core.numbers import finite
from hplm.errors import ConfigError
from hplm.runtime.processor import processor_name

# A table with more columns is too wide for a terminal.
WIDE = 9
# Larger numbers are written with an exponent, because their digits are hard to count.
MOST_WRITTEN_OUT = 1e15


@dataclass(frozen=True)
class Goal:
    """A goal of a benchmark. `value` is measured, and `met` is computed from it."""

    id: str
    text: str
    goal: float
    value: float
    unit: str
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool:
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


@dataclass(frozen=True)
class Report:
    """A measured benchmark result."""

    name: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    goals: Sequence[Goal] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, which is the same for every benchmark and evaluation."""
        shown = ("id", "text", "goal", "value", "unit", "met")
        goals = [{key: getattr(goal, key) for key in shown} for goal in self.goals]
        return {
            "name": self.name,
            "command": shlex.join(["hplm", *sys.argv[1:]]),
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
            "goals": goals,
        }

    def publish(self, json_file: Path | None) -> None:
        """Show the result, and write it to `json_file` if there is one. If that fails, raises ConfigError after showing it."""
        try:
            # The file comes first, because the reader of standard output may be gone.
            if json_file is not None:
                self._write(json_file)
        finally:
            self._show()

    def _write(self, json_file: Path) -> None:
        written = json.dumps(finite(self.as_dict()), indent=2, allow_nan=False) + "\n"
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(written)
        except OSError as error:
            raise _unwritable(json_file, error) from None

    def _show(self) -> None:
        console = Console()
        for rows in self._alike():
            console.print(_table(self.name, rows))
        for goal in self.goals:
            mark = "met" if goal.met else "MISSED"
            console.print(
                f"{mark}: {goal.text}: {plain(goal.value)} {goal.unit} (goal {plain(goal.goal)})", highlight=False
            )

    def _alike(self) -> list[list[Mapping[str, Any]]]:
        """Group rows with the same first column name and mostly equal columns, one table for each group.

        One table of all rows would be too wide to read and mostly empty.
        """
        tables: list[list[Mapping[str, Any]]] = []
        for row in self.rows:
            for rows in tables:
                is_same_kind = next(iter(row)) == next(iter(rows[0]))
                if is_same_kind and 2 * len(row.keys() & rows[0].keys()) > max(len(row), len(rows[0])):
                    rows.append(row)
                    break
            else:
                tables.append([row])
        return tables


def writable(json_file: Path | None) -> Path | None:
    """Check before hours of measuring that `json_file` can be written, and return it. Raises ConfigError."""
    if json_file is None:
        return None
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not json_file.exists()
        if not json_file.is_fifo():  # opening a pipe would wait for its reader
            with json_file.open("ab", buffering=0) as opened:
                opened.write(b"")  # a full device refuses even an empty write
        if is_new:
            json_file.resolve().unlink()
    except OSError as error:
        raise _unwritable(json_file, error) from None
    return json_file


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Also write the report to this file.")
]


def _unwritable(json_file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--json: {json_file} cannot be written: {error.strerror}")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with a line for each row.

    A table that is too wide has a line for each column instead; if it also has many rows, it omits lists and objects.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(columns) > WIDE and len(rows) > WIDE:
        columns = [key for key in columns if not any(isinstance(row.get(key), list | dict) for row in rows)]
    lines = [[_shown(row.get(column, "")) for row in rows] for column in columns]
    if len(columns) <= WIDE or len(rows) > WIDE:
        headings, lines = columns, [list(line) for line in zip(*lines, strict=True)]
    else:
        headings = [columns[0], *lines[0]]
        lines = [[column, *line] for column, line in zip(columns[1:], lines[1:], strict=True)]
    # The table is narrow and cuts nothing, because terminals have 80 columns.
    table = Table(
        *(Column(escape(head), overflow="fold") for head in headings), title=title, box=SIMPLE_HEAD, padding=0
    )
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def plain(value: float, digits: int = 4) -> str:
    """Return a number in readable form: thousands separators, no exponent below 1e15, at least `digits` significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if not 0 < abs(value) < MOST_WRITTEN_OUT:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    written = f"{value:,.{decimals}f}"
    return written.rstrip("0").rstrip(".") if decimals else written


def machine() -> dict[str, Any]:
    """Return the machine on which this process measures."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = {
        "cpu": processor_name(),
        "cores": cores,
        "system": platform.system(),
        "python": platform.python_version(),
    }
    # A process that has not loaded torch has not computed with torch.
    if (torch := sys.modules.get("torch")) is not None:
        described["torch"] = torch.__version__
        if torch.cuda.is_available():
            described["gpu"] = torch.cuda.get_device_name()
    return described


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return plain(value)
