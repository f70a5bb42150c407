"""Output of the operator's commands: JSON lines for programs, tables and progress bars for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hplm.errors import HplmError
from hplm.reporting.terminal_text import say, visible


def console() -> Console:
    """Return the console for messages to people: standard error, so that standard output holds results only."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def progress_bars() -> Progress:
    """Return progress bars that end with each task's field `remaining`. Nothing is drawn outside a terminal."""
    terminal = console()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[remaining]}", markup=False),
        console=terminal,
        disable=not terminal.is_terminal,
        # Otherwise text on standard output would be printed to standard error while bars are drawn.
        redirect_stdout=False,
    )


def remaining_time(eta_s: float | None) -> str:
    """Return an estimate in words, empty if there is no estimate."""
    if eta_s is None:
        return ""
    if eta_s < 90:
        return f"about {eta_s:.0f} s left"
    return f"about {eta_s / 60:.0f} min left" if eta_s < 5400 else f"about {eta_s / 3600:.1f} h left"


def print_json(record: Any) -> None:
    """Print a dataclass or a dictionary as one line of JSON."""
    say(json.dumps(record if isinstance(record, dict) else dataclasses.asdict(record), ensure_ascii=False))


def print_outcome(record: Any, line: str, as_json: bool) -> None:
    """Print the outcome of a command: `record` as JSON if `as_json`, else `line`."""
    if as_json:
        print_json(record)
    else:
        say(line)


def print_error(error: HplmError, **context: str) -> None:
    """Print an error as one line of JSON, with keys such as the job's id before it."""
    print_json({**context, "error": {"code": error.code, "message": str(error)}})


@contextmanager
def printing_errors(as_json: bool) -> Iterator[None]:
    """Print an error of the block as JSON if `as_json`, and raise it again."""
    try:
        yield
    except HplmError as error:
        if as_json:
            print_error(error)
        raise


def print_records(records: Sequence[Any], columns: Sequence[str], as_json: bool) -> None:
    """Print records as JSON lines, or as a table of `columns`. Cells are never cut, because other programs read the table."""
    if as_json:
        for record in records:
            print_json(record)
        return
    rows = [[name.removesuffix("_s") for name in columns]]
    rows += [
        [visible(format_value(name, getattr(record, name)), is_line=True) for name in columns] for record in records
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def format_value(name: str, value: Any) -> str:
    """Return the value of the field `name` for people. Times are those of this machine's clock."""
    if value is None:
        return "-"
    if isinstance(value, HplmError):
        return value.code
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("eta_s", "estimated_s"):
        return remaining_time(value).removesuffix(" left")
    if name.endswith("_s"):
        try:
            return datetime.fromtimestamp(value).isoformat(sep=" ", timespec="seconds")
        except (OverflowError, ValueError, OSError):
            # A clock that is set wrong may give a time that does not exist.
            return str(value)
    if name == "progress":
        # A job that is not done never shows 100%.
        return f"{100 if value == 1 else min(99, round(100 * value))}%"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_item(key, item)}" for key, item in value.items())
    return str(value)


def _format_item(key: str, item: Any) -> str:
    """Return a value of a mapping for people: scores with three digits, rates without trailing zeros."""
    if key == "expires_s" or isinstance(item, Mapping | bool) or item is None:
        return format_value(key, item)
    if isinstance(item, float):
        return f"{item:,g}" if key.endswith("_per_s") else f"{item:.3f}"
    return str(item)


def result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show a plan or a job's result to people, warnings last."""
    for name, value in result.items():
        if name != "warnings":
            yield f"{name.removesuffix('_s')}: {format_value(name, value)}"
    yield from warning_lines(result)


def warning_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each warning of a plan or a job's result about the data."""
    for warning in result.get("warnings", ()):
        yield f"warning: {warning}"
