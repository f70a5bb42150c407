"""The burst of `hplm bench students`: rate, number of students, latency and accuracy, second by second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from hplm.core import wire
from hplm.reporting.charts import line_charts
from hplm.workloads.arrivals import PoissonArrivals
from hplm_loadtest.scenarios.grpc_load import open_loop_with_answers
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.workloads.labelled_requests import LabelledRequest, as_load
from hplm_loadtest.workloads.load_plan import LoadPlan

# The load before and after the burst, as a share of the throughput with all students, and in the burst, as a share of that
# with one student.
QUIET_SHARE, BURST_SHARE = 0.3, 0.8


@dataclass(frozen=True)
class BurstPlan:
    """A quiet time, a burst, and a quiet time twice as long, so that the number of students can rise again."""

    quiet_per_s: float
    burst_per_s: float
    part_s: float

    @classmethod
    def of(cls, one_per_s: float, students: int, part_s: float) -> BurstPlan:
        """Return the plan for a throughput with one student; with all students it is about that many times less."""
        return cls(QUIET_SHARE * one_per_s / students, BURST_SHARE * one_per_s, part_s)

    @property
    def duration_s(self) -> float:
        """Return the duration of all parts."""
        return 4 * self.part_s

    def times(self, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draw the arrival times `[k]` of all parts."""
        parts = ((self.quiet_per_s, 1), (self.burst_per_s, 1), (self.quiet_per_s, 2))
        drawn, start_s = [], 0.0
        for rate_per_s, count in parts:
            drawn.append(start_s + PoissonArrivals(rate_per_s).times(count * self.part_s, rng))
            start_s += count * self.part_s
        return np.concatenate(drawn)


@dataclass(frozen=True)
class Burst:
    """A run of the burst. `students` and `right` `[k]` are of its requests, NaN where there is no answer."""

    plan: BurstPlan
    run: Run
    students: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]

    def draw(self, picture: Path) -> None:
        """Draw rate, number of students, p99 and agreement with the labels by second.

        The labels of a made-up fleet are what all its students answer, so the agreement says nothing about right answers.
        """
        rows = burst_rows(self)

        def series(*keys: str) -> dict[str, tuple[list[float], list[float]]]:
            shown = {}
            for key in keys:
                points = [(row["second"], row[key]) for row in rows if math.isfinite(row[key])]
                shown[key] = [x for x, _ in points], [y for _, y in points]
            return shown

        charts = {
            ("Rate", "requests (1/s)"): series("offered", "answered"),
            ("Students", "mean number a request"): series("k"),
            ("Latency", "p99 (ms)"): series("p99_ms"),
            ("Agreement", "answers equal to the labels (%)"): series("agreement"),
        }
        line_charts(picture, charts, title="A burst: students are left out, requests are not", x_label="time (s)")


def draw_burst(plan: BurstPlan, times_s: npt.NDArray[np.float64], requests: Sequence[LabelledRequest]) -> LoadPlan:
    """Return the load of a burst."""
    return LoadPlan(times_s, as_load(requests), plan.duration_s)


def run_burst(url: str, model: str, load: LoadPlan, requests: Sequence[LabelledRequest], plan: BurstPlan) -> Burst:
    """Send a burst to the trunk's model, and read how many students have answered each request."""
    run, answers = open_loop_with_answers(url, load, [wire.STUDENTS], model=model)
    students, right = np.full((2, len(requests)), np.nan)
    for index, (answer, request) in enumerate(zip(answers, requests, strict=True)):
        if answer is not None:
            label, students[index] = read_answer(answer)
            right[index] = label == request.label
    return Burst(plan, run, students, right)


def read_answer(message: bytes) -> tuple[str, int]:
    """Return the label and the number of students of a serialised answer."""
    response = service_pb2.ModelInferResponse.FromString(message)
    raw: Mapping[str, bytes] = {
        output.name: content for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    label = raw[wire.LABEL]
    length = int.from_bytes(label[:4], "little")
    return label[4 : 4 + length].decode(), int.from_bytes(raw[wire.STUDENTS][:4], "little")


def burst_rows(burst: Burst) -> list[dict[str, Any]]:
    """Return a row for each second of the plan, by the planned times of its requests."""
    rows = []
    for second in range(math.ceil(burst.plan.duration_s)):
        chosen = (burst.run.planned_s >= second) & (burst.run.planned_s < second + 1)
        part = burst.run.between(second, second + 1)
        kinds = part.kinds
        known = chosen & np.isfinite(burst.students)
        rows.append(
            {
                "second": second,
                "offered": len(part),
                "answered": kinds["answered"],
                "refused": kinds["refused"],
                "lost": kinds["lost"] + kinds["failed"],
                "k": fmean(burst.students[known]) if known.any() else math.nan,
                "p99_ms": part.percentile_ms(99),
                "agreement": 100 * fmean(burst.right[known]) if known.any() else math.nan,
            }
        )
    return rows
