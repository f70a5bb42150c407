"""The answers of levels and policies to the same texts, and their figures in Tabi's Table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm_builder.evaluation.search.summary import mean_and_spread

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
Row = dict[str, Any]


@dataclass(frozen=True)
class LevelAnswers:
    """The answers of the level over `base` to N texts: calibrated `probabilities` `[N, labels]`.

    `gold` `[N]` are the right labels. `latency_ms` `[N]` is each text's time from the level's profile, one request at a time.
    """

    base: str
    probabilities: Floats
    gold: Integers
    latency_ms: Floats

    @cached_property
    def answers(self) -> Integers:
        """The most probable label of each text."""
        return self.probabilities.argmax(1)

    @property
    def right(self) -> Booleans:
        """Whether each answer is right."""
        return self.answers == self.gold

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return float(self.right.mean())


@dataclass(frozen=True)
class Answered:
    """How a policy answered N texts.

    `work_ms` has, for each base, the milliseconds `[N]` that the base computed for each text, also beside another base.
    `chosen` says in words which configuration the policy chose. `shares` is the share of texts that each level answered last.
    """

    policy: str
    chosen: str
    right: Booleans
    latency_ms: Floats
    work_ms: Mapping[str, Floats]
    shares: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return float(self.right.mean())

    def cost(self, packing: Mapping[str, float]) -> float:
        """Return the cost of a text (Tabi, 7.1): the sum over bases of the mean milliseconds, divided by the packing factor.

        `packing` has the number of copies of each base that the machine runs at once without slowing them.
        """
        return float(sum(work.mean() / packing[base] for base, work in self.work_ms.items()))


def policy_row(task: str, seeds: Sequence[Answered], packing: Mapping[str, float]) -> Row:
    """Return a policy's row for a task: accuracy in percent with its spread over seeds, and means of the other figures."""
    accuracies = mean_and_spread("accuracy", [100 * seed.accuracy for seed in seeds])
    latencies = np.array([latency_figures(seed.latency_ms) for seed in seeds]).mean(0).tolist()
    row: Row = {"task": task, "policy": seeds[0].policy, **accuracies}
    row |= dict(zip(("mean_ms", "p50_ms", "p75_ms", "p99_ms"), latencies, strict=True))
    row |= {"cost": fmean(seed.cost(packing) for seed in seeds), "chosen": [seed.chosen for seed in seeds]}
    if seeds[0].shares:
        row["answered_by_level"] = [shown_shares(seed.shares) for seed in seeds]
    return row


def latency_figures(latency_ms: Floats) -> tuple[float, float, float, float]:
    """Return the mean, the median, the 75th and the 99th percentile."""
    p50, p75, p99 = np.percentile(latency_ms, [50, 75, 99]).tolist()
    return float(latency_ms.mean()), p50, p75, p99


def shown_shares(shares: Sequence[float]) -> str:
    """Return shares in percent, as in Tabi's Table 5."""
    return "/".join(f"{100 * share:.1f}" for share in shares) + " %"


def averaged(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return a row for each combination of `keys`, with the means of the numbers, and `seeds`, the number of rows.

    A truth value becomes the share of rows where it is true. Texts are those of the first row.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            name: fmean(member[name] for member in members) if _is_mean(name, value, keys) else value
            for name, value in members[0].items()
        }
        | {"seeds": len(members)}
        for members in groups.values()
    ]


def _is_mean(name: str, value: Any, keys: Sequence[str]) -> bool:
    return name not in keys and isinstance(value, bool | int | float)
