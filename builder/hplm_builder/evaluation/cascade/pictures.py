"""The pictures of `hplm eval cascade`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hplm.cascade.calibration import Calibration
from hplm.reporting.charts import Numbers, line_charts
from hplm_builder.evaluation.cascade.answered import Row

Series = Mapping[str, tuple[Numbers, Numbers]]


def draw_pictures(
    folder: Path,
    policies: Sequence[Row],
    cut_offs: Sequence[Row],
    alphas: Sequence[Row],
    reliability: Mapping[str, Mapping[str, Calibration]],
) -> None:
    """Draw policies, cut-offs (Fig. 8), degrees of pruning (Fig. 9) and reliability, each by task, as .svg in `folder`.

    `reliability` has a calibration for each task and level.
    """
    line_charts(
        folder / "cascade-policies.svg",
        {(task, "accuracy (%)"): _points(policies, task) for task in _tasks(policies)},
        title="Accuracy by mean latency",
        x_label="mean latency (ms)",
        from_zero=False,
    )
    for name, rows, x, x_label, measures in (
        (
            "cascade-cut-off",
            cut_offs,
            "cut_off",
            "cut-off c",
            (("accuracy", "accuracy (%)"), ("mean_ms", "latency (ms)")),
        ),
        (
            "cascade-alpha",
            alphas,
            "alpha",
            "degree of pruning",
            (("accuracy", "accuracy (%)"), ("large_ms", "latency (ms)")),
        ),
    ):
        if rows:
            line_charts(
                folder / f"{name}.svg",
                {
                    (task, label): {"cascade": _curve(rows, task, x, measure)}
                    for task in _tasks(rows)
                    for measure, label in measures
                },
                title=f"Accuracy and latency by {x_label}",
                x_label=x_label,
                from_zero=False,
            )
    line_charts(
        folder / "cascade-reliability.svg",
        {(task, "share of right answers"): _reliability(levels) for task, levels in reliability.items()},
        title="Reliability: share of right answers by confidence",
        x_label="mean confidence of a bin",
        from_zero=False,
    )


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["task"]) for row in rows))


def _points(rows: Sequence[Row], task: str) -> Series:
    """Return each policy as a series of one point."""
    return {row["policy"]: ([row["mean_ms"]], [row["accuracy"]]) for row in rows if row["task"] == task}


def _curve(rows: Sequence[Row], task: str, x: str, y: str) -> tuple[Numbers, Numbers]:
    of_task = [row for row in rows if row["task"] == task]
    # A setting that only some seeds chose has the mean of other tenants than its neighbours.
    most = max(row["seeds"] for row in of_task)
    points = sorted((row[x], row[y]) for row in of_task if row["seeds"] == most)
    return [x for x, _ in points], [y for _, y in points]


def _reliability(levels: Mapping[str, Calibration]) -> Series:
    series: dict[str, tuple[Numbers, Numbers]] = {
        base: ([one.confidence for one in found.bins], [one.accuracy for one in found.bins])
        for base, found in levels.items()
    }
    least = min(min(x) for x, _ in series.values())
    return {"ideal": ([least, 1.0], [least, 1.0]), **series}
