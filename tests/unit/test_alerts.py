"""The alert rules that operators are given name events that the stages count."""

from __future__ import annotations

import re
from pathlib import Path

from hplm import errors

ROOT = Path(__file__).parents[2]


def test_every_event_of_the_rules_is_one_that_a_stage_counts() -> None:
    rules = (ROOT / "examples/production/alerts.yml").read_text()
    named = {event for events in re.findall(r'event=~?"([^"]+)"', rules) for event in events.split("|")}
    refusals = {kind.code.lower() for kind in errors.leaves()}
    # What is no answer's outcome is counted by its name: `add("NAME")`, `Counter(NAME=...)`.
    folders = (ROOT / "src/hplm/serving", ROOT / "src/hplm/triton")
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    counted = {name for pair in re.findall(r'\badd\("([a-z_]+)"|\b([a-z_]+)=self', code) for name in pair}
    assert "queue_full" in named & refusals
    assert "failed_batches" in named & counted
    assert named <= refusals | counted
