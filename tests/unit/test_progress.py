"""Progress where there is no terminal: lines that a log can keep."""

from __future__ import annotations

import io
import re
import time

from rich.console import Console

from hplm.progress import Bars


def lines_of(console: Console, seconds: float) -> str:
    with Bars(console, line_every_s=0.02) as bars:
        slow = bars.add_task("base: convert", total=1000)
        bars.add_task("[not markup] waits", total=None, start=False)
        done = bars.add_task("quick", total=2)
        bars.update(done, completed=2)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            bars.advance(slow)
            time.sleep(0.005)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_a_line_for_what_is_under_way() -> None:
    written = lines_of(Console(file=io.StringIO(), width=40), 0.5)
    under_way = [line for line in written.splitlines() if " after " in line]
    assert len(under_way) > 1
    pattern = r"base: convert \d+/1,000 after \d:\d\d:\d\d(, about \d:\d\d:\d\d left)?"
    assert all(re.fullmatch(pattern, line) for line in under_way), under_way
    assert "left" in under_way[-1]


def test_a_terminal_gets_bars_alone() -> None:
    assert " after " not in lines_of(Console(file=io.StringIO(), force_terminal=True), 0.2)
