"""The benchmark `hplm bench length-buffer`: Student Parallelism's length-aware buffer beside packed batches (3.3.2, B.4.2).

Batches are timed in-process, packed and padded, in processor time of one thread: other processes on the machine do not count.
With these times the live queue is simulated under a recorded trace. So all variants get exactly the same requests.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.progress import Progress

from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.token_domain import random_features
from hplm.models.device import choose_device, use_threads
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.scheduling.cost import CostModel, Sample
from hplm.scheduling.policy import Batch, Budget, Waiting, tokens_of
from hplm.scheduling.policy_loader import load_policy
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import Outcome, simulate
from hplm.workloads.arrivals import TraceArrivals
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.workloads.lengths import NormalLengths

TEXTS = (1, 2, 4, 8, 16, 32, 64)  # sizes of the batches that are timed
LOADS = (0.3, 0.6, 0.9, 1.5, 3.0)  # offered load, as a share of the rate of full packed batches
TENANTS = 100
DEADLINES_S = (0.25, 1.0)  # deadlines are uniform between these
REQUESTS = 4_000  # simulated requests of a round
BASELINE = "das, packed"


@dataclass(frozen=True)
class Variant:
    """A policy with the most texts of its batch, and how a batch lies in memory."""

    policy: str
    texts: int
    is_padded: bool = False

    @property
    def name(self) -> str:
        of_elements = f" of {self.texts}" if self.policy == "length_aware" else ""
        return f"{self.policy}{of_elements}, {'padded' if self.is_padded else 'packed'}"

    def queue(self, cost: CostModel, capacity: int) -> RequestQueue:
        """Return an empty live queue with this policy."""
        settings = {"element_texts": self.texts} if self.policy == "length_aware" else {}
        budget = Budget(1, 1024, self.texts, self.texts)
        policy = load_policy(self.policy, settings)
        return RequestQueue(policy, budget, cost, capacity=capacity, weights={}, starve_after_s=2.0)


VARIANTS = (
    Variant("das", 64),
    Variant("fcfs", 64),
    Variant("das", 64, is_padded=True),
    Variant("length_aware", 4, is_padded=True),  # as in the paper
    Variant("length_aware", 16, is_padded=True),
    Variant("length_aware", 4),
    Variant("length_aware", 16),
)


@dataclass(frozen=True)
class BatchTimes:
    """Measured seconds of batches as two cost models: of packed texts, and of texts padded to the longest of the batch."""

    packed: CostModel
    padded: CostModel

    def seconds(self, batch: Batch, *, is_padded: bool) -> float:
        """Return the expected seconds of a batch."""
        lengths = [request.tokens for request in batch.requests]
        if is_padded:
            lengths = [max(lengths)] * len(lengths)
        model = self.padded if is_padded else self.packed
        return model.predict(sum(lengths), sum(length**2 for length in lengths))


def length_buffer(models: Path, name: str | None, trace: Path, rounds: int, seed: int = 0) -> Report:
    """Measure the times of batches over the base of a model, and simulate all variants under the trace with them.

    `name`: the model, by default that of the repository's first base. Raises DataError if the trace cannot be read.
    """
    use_threads(1)
    served = read_repository(models, name)
    TraceArrivals(trace, 1.0).times(1.0, np.random.default_rng(seed))
    device = choose_device("cpu")
    tenants = served.load_tenants(max(TEXTS))
    engines = {name: served.engine(tenants, device, batching=name) for name in ("packed", "naive")}
    with progress_bars() as progress:
        samples = time_batches(engines, tenants, rounds, progress)
        times = BatchTimes(CostModel.fit(samples["packed"]), CostModel.fit(samples["naive"]))
        rows = simulated_rows(times, trace, rounds, progress, seed)
    for engine in engines.values():
        engine.close()
    settings = {
        "base": served.base.config.name,
        "layers": served.base.config.upper_layers,
        "rounds": rounds,
        "trace": trace.name,
        "tenants": TENANTS,
        "deadlines_s": DEADLINES_S,
        "capacity_per_s": capacity_per_s(times),
        "batch_ms": {
            f"{count} texts, {name}": 1000 * seconds
            for name, timed in samples.items()
            for count, (_, _, seconds) in zip(TEXTS, timed, strict=True)
        },
    }
    return Report("length-buffer", settings, rows, goals_of(rows))


def time_batches(
    engines: Mapping[str, EncodeEngine], tenants: Sequence[Any], rounds: int, progress: Progress
) -> dict[str, list[Sample]]:
    """Return, for each engine and each number of texts, the tokens that are computed, their squares and the seconds."""
    rng = np.random.default_rng(0)
    samples: dict[str, list[Sample]] = defaultdict(list)
    for count in TEXTS:
        lengths = NormalLengths().draw(count, rng).tolist()
        if count == 1:
            lengths = [round(NormalLengths().drawn_mean)]
        batch = [
            EngineRequest(tenants[i % len(tenants)], random_features(engines["packed"].config, length, rng))
            for i, length in enumerate(lengths)
        ]
        calls: dict[str, Callable[[], object]] = {name: partial(each.run, batch) for name, each in engines.items()}
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in progress.track(range(rounds + 1), description=f"{count} texts"):
            for name, call in calls.items():
                start_s = time.process_time()
                for _ in range(repeats := max(1, 16 // count)):
                    call()
                seconds[name].append((time.process_time() - start_s) / repeats)
        for name, measured in seconds.items():
            widths = lengths if name == "packed" else [max(lengths)] * count
            # The first round warms up.
            samples[name].append((sum(widths), sum(width**2 for width in widths), median(measured[1:])))
    return samples


def capacity_per_s(times: BatchTimes) -> float:
    """Return the texts per second of packed batches of 64 texts of mean length."""
    lengths = NormalLengths()
    mean = lengths.drawn_mean
    return 64 / times.packed.predict(round(64 * mean), round(64 * (mean**2 + lengths.variance)))


def simulated_rows(
    times: BatchTimes,
    trace: Path,
    rounds: int,
    progress: Progress,
    seed: int,
    loads: Sequence[float] = LOADS,
    requests: int = REQUESTS,
) -> list[dict[str, Any]]:
    """Return a row for each load and variant. In each round all variants get the same requests, from one place of the trace."""
    bar = progress.add_task("simulate", total=len(loads) * rounds * len(VARIANTS))
    rows = []
    for load in loads:
        rate_per_s = load * capacity_per_s(times)
        measured: dict[Variant, list[dict[str, float]]] = defaultdict(list)
        for turn in range(rounds):
            arrivals = draw_arrivals(
                trace, rate_per_s, requests, np.random.default_rng([seed, turn, round(100 * load)])
            )
            for variant in VARIANTS:
                measured[variant].append(_row(variant, times, arrivals))
                progress.update(bar, advance=1)
        of_baseline = measured[VARIANTS[0]]
        for variant, found in measured.items():
            ratios = [ours["p99_ms"] / base["p99_ms"] for ours, base in zip(found, of_baseline, strict=True)]
            rows.append(
                {
                    "variant": variant.name,
                    "load": load,
                    "offered_per_s": rate_per_s,
                    **{key: median(row[key] for row in found) for key in found[0]},
                    "p99_over_das": median(ratios),
                    "p99_over_das_spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
                }
            )
    return rows


def draw_arrivals(trace: Path, rate_per_s: float, requests: int, rng: np.random.Generator) -> list[Waiting]:
    """Draw about `requests` requests in the order of arrival: times of the trace at this rate, lengths, tenants, deadlines."""
    at_s = TraceArrivals(trace, rate_per_s).times(requests / rate_per_s, rng)
    lengths = NormalLengths().draw(len(at_s), rng)
    due_s = at_s + rng.uniform(*DEADLINES_S, len(at_s))
    tenants = rng.integers(TENANTS, size=len(at_s))
    columns = (lengths.tolist(), at_s.tolist(), due_s.tolist())
    return [
        Waiting(number, f"t{tenant}", *values)
        for number, (tenant, values) in enumerate(zip(tenants.tolist(), zip(*columns, strict=True), strict=True))
    ]


def _row(variant: Variant, times: BatchTimes, arrivals: Sequence[Waiting]) -> dict[str, float]:
    batches: list[Batch] = []

    def seconds(batch: Batch) -> float:
        batches.append(batch)
        return times.seconds(batch, is_padded=variant.is_padded)

    outcomes = simulate(arrivals, variant.queue(_learnt(variant, times), 4096), seconds)
    return {**outcome_columns(outcomes), "texts_a_batch": fmean(len(batch.requests) for batch in batches)}


def _learnt(variant: Variant, times: BatchTimes) -> CostModel:
    """Return the cost model that the queue begins with. It learns from batches, and knows only tokens without padding."""
    shapes = [(count, round(count * 20.0)) for count in TEXTS if count <= variant.texts]
    model = times.padded if variant.is_padded else times.packed
    return CostModel.fit([(tokens, tokens * 20, model.predict(tokens, tokens * 20)) for _, tokens in shapes])


def outcome_columns(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the columns of a simulated run. Times are those of answered requests."""
    waits_ms = [1000 * (one.ended_s - one.request.arrived_s) for one in outcomes if one.kind == "answered"]
    in_time = [one.request for one in outcomes if one.in_time]
    p95, p99 = np.percentile(waits_ms, [95, 99]).tolist() if waits_ms else (math.inf, math.inf)
    return {
        "in_time": len(in_time) / len(outcomes),
        "tokens_in_time": tokens_of(in_time) / tokens_of(one.request for one in outcomes),
        "mean_ms": fmean(waits_ms) if waits_ms else math.inf,
        "p95_ms": p95,
        "p99_ms": p99,
    }


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals of the paper's buffer against packed batches: a p99 no higher, and as many answers in time."""
    by_key = {(row["variant"], row["load"]): row for row in rows}
    paper = VARIANTS[3].name
    goals = []
    for load in sorted({row["load"] for row in rows}):
        ours, base = by_key[paper, load], by_key[BASELINE, load]
        against = f"of {paper} over {BASELINE}, at {load:g} of the capacity"
        goals.append(Goal(f"buffer-p99-{load:g}", f"p99 {against}", 1.0, ours["p99_over_das"], "x", "lower"))
        share = ours["in_time"] / base["in_time"]
        goals.append(Goal(f"buffer-in-time-{load:g}", f"answers in time {against}", 1.0, share, "x", "higher"))
    return goals
