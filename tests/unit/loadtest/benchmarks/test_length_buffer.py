"""The length-aware buffer beside packed batches, in the simulation of `hplm bench length-buffer`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.papers.length_buffer import (
    BASELINE,
    VARIANTS,
    BatchTimes,
    capacity_per_s,
    goals_of,
    simulated_rows,
)
from rich.progress import Progress

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Batch, Waiting

LINEAR = CostModel.fit([(n, 20 * n, 1e-3 + 1e-4 * n) for n in (1, 10, 100, 1000)])
TIMES = BatchTimes(LINEAR, LINEAR)
PAPER = "length_aware of 4, padded"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text("TIMESTAMP\n" + "\n".join(str(i + (i % 7) ** 2 / 40) for i in range(500)) + "\n")
    return path


def test_a_padded_batch_costs_as_much_as_its_longest_text_makes_all_texts() -> None:
    batch = Batch((tuple(Waiting(i, "t", tokens, 0.0, 9.0) for i, tokens in enumerate((10, 20, 40))),))
    assert TIMES.seconds(batch, is_padded=False) == pytest.approx(8e-3, rel=0.05)
    assert TIMES.seconds(batch, is_padded=True) == pytest.approx(13e-3, rel=0.05)


def test_beyond_the_capacity_small_elements_answer_fewer_in_time_than_full_packed_batches(trace: Path) -> None:
    rows = simulated_rows(TIMES, trace, 1, Progress(disable=True), 0, (0.1, 3.0), 600)
    by_key = {(row["variant"], row["load"]): row for row in rows}
    assert len(by_key) == 2 * len(VARIANTS)
    assert all(row["in_time"] == 1.0 for (_, load), row in by_key.items() if load == 0.1)
    assert by_key[PAPER, 3.0]["texts_a_batch"] <= 4 < by_key[BASELINE, 3.0]["texts_a_batch"]
    assert by_key[PAPER, 3.0]["in_time"] < by_key[BASELINE, 3.0]["in_time"]
    assert by_key[BASELINE, 3.0]["offered_per_s"] == pytest.approx(3 * capacity_per_s(TIMES))
    missed = {goal.id for goal in goals_of(rows) if not goal.met}
    assert "buffer-in-time-3" in missed
    assert "buffer-in-time-0.1" not in missed
