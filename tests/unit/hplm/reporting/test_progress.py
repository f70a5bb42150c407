"""Progress without a terminal is written as lines of a log."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from hplm.reporting.progress import Bars, bar_report, shared_out


def lines_of(console: Console, is_enough: Callable[[list[str]], bool]) -> str:
    """Return the output as soon as it is enough, or after a minute."""
    file = console.file
    assert isinstance(file, io.StringIO)
    with Bars(console, line_every_s=0.02) as bars:
        slow = bars.add_task("base: convert", total=10_000)
        bars.add_task("[not markup] waits", total=None, start=False)
        done = bars.add_task("quick", total=2)
        bars.update(done, completed=2)
        until_s = time.monotonic() + 60
        while not is_enough(under_way(file.getvalue())) and time.monotonic() < until_s:
            bars.advance(slow)
            time.sleep(0.005)
    return file.getvalue()


def under_way(written: str) -> list[str]:
    return [line for line in written.splitlines() if " after " in line]


def test_a_log_gets_a_line_for_what_is_under_way() -> None:
    written = lines_of(
        Console(file=io.StringIO(), width=40), lambda lines: len(lines) > 1 and lines[-1].endswith("left")
    )
    lines = under_way(written)
    assert len(lines) > 1
    pattern = r"base: convert [\d,]+/10,000 after \d:\d\d:\d\d(, about \d:\d\d:\d\d left)?"
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert "left" in lines[-1]


def test_a_terminal_gets_bars_alone() -> None:
    end_s = time.monotonic() + 0.2
    written = lines_of(Console(file=io.StringIO(), force_terminal=True), lambda _: time.monotonic() > end_s)
    assert not under_way(written)


def test_a_bar_that_begins_anew_is_not_taken_for_one_that_is_full() -> None:
    now_s = 0.0
    with Bars(Console(file=io.StringIO())) as bars:
        bars.get_time = lambda: now_s
        report = bar_report(bars, "fleet")
        for done in (0.5, 1.0):
            report("features", done)
        (task,) = bars.tasks
        assert task.finished
        now_s = 60.0
        report("features", 0.0)
        assert not task.finished
        now_s = 70.0
        report("features", 0.25)
        now_s = 80.0
        report("features", 0.5)
        assert (task.elapsed, task.finished) == (20.0, False)
        assert task.time_remaining is not None
        assert task.time_remaining > 0


def test_steps_that_are_shares_of_a_whole_have_one_bar() -> None:
    with Bars(Console(file=io.StringIO())) as bars:
        report = bar_report(bars, "medical", of_all=True)
        for step, done in (("read the corpus", 0.03), ("further pretrain", 0.9), ("compute the branch", 1.0)):
            report(step, done)
            (task,) = bars.tasks
            assert (task.description, task.completed) == (f"medical: {step}", 100 * done)
        assert task.finished


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    with Bars(Console(file=(file := io.StringIO()), width=100)) as bars:
        bar_report(bars, "reviews [small]")("features", 1.0)
    assert "reviews [small]: features" in file.getvalue()


def test_steps_share_out_what_is_left_by_their_weights() -> None:
    told: list[tuple[str, float]] = []
    report = shared_out(lambda step, progress: told.append((step, progress)), {"a": 1, "b": 3}, begin=0.2)
    for step, progress in (("a", 0.0), ("a", 1.0), ("b", 0.5), ("b", 1.0)):
        report(step, progress)
    assert told == [("a", 0.2), ("a", pytest.approx(0.4)), ("b", pytest.approx(0.7)), ("b", pytest.approx(1.0))]
