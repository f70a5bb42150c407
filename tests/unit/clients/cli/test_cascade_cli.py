"""Lines and drawings that the commands print about a cascade."""

from __future__ import annotations

from typing import Any

from hplm_client.cli.cascade import CHOSEN, HEIGHT, candidate_lines, cascade_lines
from hplm_client.manage.answers import Cascade

PROMISE = {
    "accuracy": 0.9012,
    "right": 935,
    "examples": 1000,
    "latency_ms": 12.34,
    "target_accuracy": 0.9,
    "target_latency_ms": None,
}
PLAN = {
    "levels": [{"base": "small", "number": 3}, {"base": "large", "number": 4}],
    "promise": PROMISE,
    "deterministic": False,
    "on_late": "answer",
}


def candidate(*levels: str, accuracy: float, ms: float, chosen: bool = False) -> dict[str, Any]:
    settings = {"cut_off": 0.85, "slope": 6.0, "alpha": 0.5, "rerouted": 0.25}
    return {
        "levels": list(levels),
        "accuracy": accuracy,
        "latency_ms": ms,
        "p75_ms": 2 * ms,
        "chosen": chosen,
        **settings,
    }


def test_a_cascade_is_told_with_its_promise_and_whether_it_is_in_force() -> None:
    first, promise, dispatch = cascade_lines(Cascade(True, {"small": 3, "large": 4}, plan=PLAN))
    assert first == "cascade: small 3 -> large 4 (in force)"
    assert promise == (
        "promise: accuracy 0.901 (935 of 1,000 examples right), mean latency 12.3 ms expected; asked for: accuracy 0.9"
    )
    assert dispatch == (
        "re-routed: texts up to the cut-off, and a few texts above it; texts for which the next level is late: answered by the "
        "level before"
    )
    # A plan of one level re-routes nothing.
    assert len([*cascade_lines(Cascade(True, {"small": 3}, plan={**PLAN, "levels": PLAN["levels"][:1]}))]) == 2
    first, unused, *_ = cascade_lines(Cascade(False, {"small": 3, "large": 4, "huge": 5}, ("large",), PLAN))
    assert "out of force: its versions over large are no longer served" in first
    assert unused == "trained and not used: huge"
    (line,) = cascade_lines(Cascade(False, {"small": 3, "large": 4}, ("large",)))
    assert line == "cascade: out of force; no version keeps its plan over small, large"


def test_candidates_are_a_table_by_latency_and_a_drawing_with_the_best_at_the_top() -> None:
    rows = [
        candidate("large", accuracy=0.92, ms=20.0),
        candidate("small", "large", accuracy=0.91, ms=9.0, chosen=True),
        candidate("small", accuracy=0.85, ms=4.0),
    ]
    lines = list(candidate_lines(rows))
    drawing = lines.index("accuracy on dev") + 1
    assert [line.split()[0] for line in lines[1:4]] == ["c", CHOSEN, "a"]
    assert lines[3].split() == ["a", "large", "0.920", "20.0", "40.0", "-", "-", "-", "-"]
    assert lines[2].split()[-7:] == ["0.910", "9.0", "18.0", "25%", "0.85", "6", "0.5"]
    drawn = lines[drawing : drawing + HEIGHT]
    assert drawn[0].startswith(" 0.920 |")
    assert drawn[0].endswith("a")
    assert drawn[-1] == " 0.850 |c"
    (chosen,) = [line for line in drawn if CHOSEN in line]
    assert 0 < drawn.index(chosen) < HEIGHT // 2


def test_equal_candidates_share_one_place() -> None:
    rows = [candidate("small", accuracy=0.9, ms=5.0, chosen=True), candidate("large", accuracy=0.9, ms=5.0)]
    lines = list(candidate_lines(rows))
    assert sum(line.endswith(f"|{CHOSEN}") for line in lines) == 1
