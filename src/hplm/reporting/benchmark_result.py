"""One shape for every benchmark and evaluation: what ran, where, the rows, the goals and whether they were met."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from hplm.core.numbers import finite
from hplm.errors import ConfigError

WIDE = 9


@dataclass(frozen=True)
class Goal:
    """What was aimed at: `value` is measured, `met` is computed from it, never written by hand."""

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
    """A result as measured."""

    name: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    goals: Sequence[Goal] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, the same for every benchmark and evaluation."""
        goals = [{**asdict(goal), "met": goal.met} for goal in self.goals]
        for goal in goals:
            del goal["better"]
        return {
            "name": self.name,
            "command": shlex.join(["hplm", *sys.argv[1:]]),
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
            "goals": goals,
        }

    def publish(self, json_file: Path | None) -> None:
        """Show it, and write it to `json_file` where one is given. Raises ConfigError, once shown, where it cannot be."""
        try:
            # First: who reads what is shown may have gone.
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
            console.print(f"{mark}: {goal.text}: {goal.value:.4g} {goal.unit} (goal {goal.goal:g})", highlight=False)

    def _alike(self) -> list[list[Mapping[str, Any]]]:
        """Rows of the same thing that share most of their columns: one table of all would be mostly empty and too wide to read.

        What a row is of is its first column.
        """
        found: list[list[Mapping[str, Any]]] = []
        for row in self.rows:
            for rows in found:
                of_the_same = next(iter(row)) == next(iter(rows[0]))
                if of_the_same and 2 * len(row.keys() & rows[0].keys()) > max(len(row), len(rows[0])):
                    rows.append(row)
                    break
            else:
                found.append([row])
        return found


def writable(json_file: Path | None) -> Path | None:
    """A callback of the option: `json_file`, where it can be written to after what may take hours. Raises ConfigError."""
    if json_file is None:
        return None
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not json_file.exists()
        if not json_file.is_fifo():  # which would wait for who reads it
            with json_file.open("ab", buffering=0) as opened:
                opened.write(b"")  # a full device says so even then
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
    """A line a row; where that is too wide and the rows are few, a line a figure, else without what is no single value."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(columns) > WIDE and len(rows) > WIDE:
        columns = [key for key in columns if not any(isinstance(row.get(key), list | dict) for row in rows)]
    lines = [[_shown(row.get(column, "")) for row in rows] for column in columns]
    if len(columns) <= WIDE or len(rows) > WIDE:
        heads, lines = columns, [list(line) for line in zip(*lines, strict=True)]
    else:
        heads = [columns[0], *lines[0]]
        lines = [[column, *line] for column, line in zip(columns[1:], lines[1:], strict=True)]
    # Narrow, and nothing cut: terminals have 80 columns.
    table = Table(*(Column(escape(head), overflow="fold") for head in heads), title=title, box=SIMPLE_HEAD, padding=0)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        first = cpuinfo.read_text().partition("\n\n")[0]
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        if "model name" in about:
            # Hosts give processors of several generations one name.
            more = ", ".join(f"{key} {about[key]}" for key in ("cpu family", "model") if key in about)
            model = f"{about['model name']} ({more})" if more else about["model name"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": model, "cores": cores, "system": platform.system(), "python": platform.python_version()}
    # Of what has computed with it, which has loaded it.
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
