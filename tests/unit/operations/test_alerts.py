"""The alert rules and the dashboard for operators name events that the stages count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hplm import errors

ROOT = Path(__file__).parents[3]


def counted_events() -> set[str]:
    """Return the names of events: answers, error codes, and other names in `add("NAME")` and `Counter(NAME=...)`."""
    folders = (ROOT / "src/hplm/serving", ROOT / "src/hplm/triton")
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    work = {
        name for pair in re.findall(r'\badd\("([a-z_]+)"|\b([a-z_]+)=self|\bCounter\(([a-z_]+)=', code) for name in pair
    }
    return {"ok"} | {kind.code.lower() for kind in errors.leaves()} | work


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_every_event_that_is_asked_for_is_one_that_a_stage_counts(file: str) -> None:
    text = (ROOT / "examples/production" / file).read_text().replace('\\"', '"')
    named = {event for events in re.findall(r'event=~?"([^"]+)"', text) for event in events.split("|")}
    assert {"queue_full", "failed_batches"} & {event for name in named for event in matching(name)}
    assert [name for name in named if not matching(name)] == []


def matching(pattern: str) -> set[str]:
    return {event for event in counted_events() if re.fullmatch(pattern, event)}
