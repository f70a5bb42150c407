"""Figs 2 and 10: two models on two devices, each on its own device or both as a pipeline of two stages (AlpaServe 3.1, 3.4)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.queueing import (
    largest_communication_overhead,
    largest_uneven_overhead,
    pipeline_latency_s,
    simple_latency_s,
)
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import table1_cluster, table1_model
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement

NAMES = ("model-1", "model-2")
SIMPLE = Placement((Group((0,), ParallelConfig()), Group((1,), ParallelConfig())), (NAMES[:1], NAMES[1:]))
PIPELINE = Placement((Group((0, 1), ParallelConfig(2)),), (NAMES,))
RATE_PER_S = 1.5
SKEWED = {"model-1": 0.2 * 2 * RATE_PER_S, "model-2": 0.8 * 2 * RATE_PER_S}
# Subfigure, requests a second of each model, cv, and the paper's ratio of mean latencies.
CASES = (
    ("a: Poisson", dict.fromkeys(NAMES, RATE_PER_S), 1.0, 1.3),
    ("b: Gamma cv 3", dict.fromkeys(NAMES, RATE_PER_S), 3.0, 1.9),
    ("c: Poisson, 20 % and 80 %", SKEWED, 1.0, 6.6),
)
SECONDS = 200_000.0
# Utilisations of one device, the rate times D, of Fig. 10; and those at which the simulator is compared with the formulas.
UTILISATIONS = (0.1, 0.3, 0.6, 1.0, 1.4, 1.8)
COMPARED = (0.2, 0.6, 1.0, 1.4)
# Requests of a comparison. The mean of fewer differs more from its expectation than the 1 % that are allowed.
COMPARED_REQUESTS = 8_000_000
MOST_DIFFERENCE = 0.01
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# Of Fig. 2d, seconds: the workload that is looked at, a bin of utilisation, and the drawn part around the largest burst.
OBSERVED_S, BIN_S, DRAWN_S = 2_000.0, 0.5, 30.0


def two_models(effort: Effort) -> FigureResult:
    """Simulate both placements. A request has no deadline."""
    models = [table1_model("BERT-6.7B", name) for name in NAMES]
    times = StageTimes(table1_cluster(2), models)
    statements, charts, rows, numbers = [], [], [], {}
    for number, (case, rates, cv, papers) in enumerate(CASES):
        requests = gamma_requests(rates, cv, dict.fromkeys(NAMES, math.inf), effort.scale * SECONDS, effort.rng(number))
        outcomes = {"simple": simulate(SIMPLE, times, requests), "pipeline": simulate(PIPELINE, times, requests)}
        means = {name: float(each.latencies_s.mean()) for name, each in outcomes.items()}
        ratio = means["simple"] / means["pipeline"]
        charts.append(
            Chart(
                case,
                "share of requests",
                "latency (s)",
                SHARES,
                {name: np.quantile(each.latencies_s, SHARES).tolist() for name, each in outcomes.items()},
            )
        )
        rows.append(
            {"case": case, "requests": len(requests), **{f"mean {name} (s)": mean for name, mean in means.items()}}
        )
        statements.append(
            Statement(
                f"{case}: model parallelism reduces the mean latency {papers} times",
                f"{means['simple']:.2f} s to {means['pipeline']:.2f} s: {ratio:.2f} times",
                ratio > 1,
            )
        )
        numbers[f"speed-up {case}"] = ratio
        if cv > 1:
            bursty = _bursts(times, outcomes)
    of_model = _means_by_model(outcomes["pipeline"])
    statements.append(
        Statement(
            "c: with the pipeline, requests to both models have the same latency",
            f"means of {of_model[0]:.3f} s and {of_model[1]:.3f} s",
            abs(of_model[0] / of_model[1] - 1) < 0.05,
        )
    )
    charts.append(bursty[0])
    statements.append(bursty[1])
    speed_ups = list(numbers.values())
    statements.append(
        Statement(
            "the gain grows with burstiness and with skew",
            ", ".join(f"{each:.2f}" for each in speed_ups),
            speed_ups == sorted(speed_ups),
        )
    )
    return FigureResult("2", "latency of two models on two devices", statements, charts, rows, numbers)


def queueing_theory(effort: Effort) -> FigureResult:
    """Fig. 10: the largest overheads that a pipeline may have. Also compare the simulator with the formulas of M/D/1 queues."""
    alphas = [largest_communication_overhead(each) for each in UTILISATIONS]
    betas = [largest_uneven_overhead(each) for each in UTILISATIONS]
    # D is a second on one device; stages of half a second have no overhead.
    models = [ServedModel(name, (0.5, 0.5), (1, 1)) for name in NAMES]
    times = StageTimes(table1_cluster(2), models)
    rows, worst = [], 0.0
    for number, utilisation in enumerate(COMPARED):
        rates = dict.fromkeys(NAMES, utilisation / 2)
        requests = gamma_requests(
            rates,
            1.0,
            dict.fromkeys(NAMES, math.inf),
            effort.scale * COMPARED_REQUESTS / utilisation,
            effort.rng(number),
        )
        for name, placement, expected_s in (
            ("simple", SIMPLE, simple_latency_s(utilisation, 1.0)),
            ("pipeline", PIPELINE, pipeline_latency_s(utilisation, 1.0, 0.5)),
        ):
            simulated_s = float(simulate(placement, times, requests).latencies_s.mean())
            difference = abs(simulated_s / expected_s - 1)
            worst = max(worst, difference)
            rows.append(
                {
                    "placement": name,
                    "utilisation": utilisation,
                    "simulated mean (s)": simulated_s,
                    "M/D/1 (s)": expected_s,
                    "difference": difference,
                }
            )
    statements = [
        Statement(
            "the simulator equals the M/D/1 formulas within 1 % (our goal)",
            f"differs by {worst:.2%} at most",
            worst <= MOST_DIFFERENCE,
        ),
        Statement(
            "at high utilisation both overheads have to be low",
            f"at a rate of {UTILISATIONS[-1]:g} / D: alpha {alphas[-1]:.3f}, beta {betas[-1]:.3f}",
            alphas[-1] < max(alphas) and betas == sorted(betas, reverse=True),
        ),
        Statement(
            "at very low utilisation the communication overhead has to be low",
            f"at a rate of {UTILISATIONS[0]:g} / D: alpha {alphas[0]:.3f}; the largest is {max(alphas):.3f}",
            alphas[0] < max(alphas),
        ),
    ]
    chart = Chart("largest overhead", "rate times D", "factor", UTILISATIONS, {"alpha": alphas, "beta": betas})
    title = "largest overheads of a pipeline"
    return FigureResult("10", title, statements, [chart], rows, {"queueing_error": worst})


def busy_devices(
    placement: Placement,
    times: StageTimes,
    groups: npt.NDArray[np.int32],
    ended_s: npt.NDArray[np.float64],
    edges: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the mean number of computing devices in each bin, `[bins]`, for groups whose stages all take equally long.

    `groups` and `ended_s` are those of `Outcomes`, `edges` are seconds, `[bins + 1]`. With equal stages a request waits
    before the first stage only.
    """
    busy_s = np.zeros(len(edges))
    for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True)):
        left_s = ended_s[groups == number]
        for seconds in reversed(times.of(names[0], group.config) or ()):
            entered_s = left_s - seconds
            # Of each request, how much of this stage was done by each edge.
            busy_s += np.clip(edges[:, None] - entered_s, 0, seconds).sum(axis=1)
            left_s = entered_s
    return np.diff(busy_s) / np.diff(edges)


def _bursts(times: StageTimes, outcomes: dict[str, Outcomes]) -> tuple[Chart, Statement]:
    """Fig. 2d: the utilisation of both devices around the largest burst, and whenever a request waits."""
    simple = outcomes["simple"]
    edges = np.arange(0.0, min(OBSERVED_S, simple.requests.duration_s), BIN_S)
    arrived, _ = np.histogram(simple.requests.times_s, edges)
    in_view = int(DRAWN_S / BIN_S)
    first = max(0, int(np.convolve(arrived, np.ones(in_view // 6), "same").argmax()) - in_view // 3)
    drawn = slice(first, first + in_view)
    curves, while_waiting = {}, {}
    for name, placement in (("simple", SIMPLE), ("pipeline", PIPELINE)):
        found = outcomes[name]
        kept = found.requests.times_s < edges[-1]
        came_s, ended_s = found.requests.times_s[kept], found.ended_s[kept]
        shares = busy_devices(placement, times, found.groups[kept], ended_s, edges) / 2
        curves[name] = shares[drawn].tolist()
        started_s = ended_s - sum(times.of(NAMES[0], placement.groups[0].config) or ())
        # Bins during which at least one request waits from the first to the last moment.
        waiting = np.searchsorted(came_s, edges[:-1], "right") > np.searchsorted(np.sort(started_s), edges[1:], "left")
        while_waiting[name] = float(shares[waiting].mean())
    chart = Chart("d: Gamma cv 3, a burst", "time (s)", "utilisation of both devices", edges[drawn].tolist(), curves)
    statement = Statement(
        "d: while requests wait, model parallelism uses the whole cluster, the simple placement only a part (half)",
        ", ".join(f"{name} {share:.0%}" for name, share in while_waiting.items()),
        while_waiting["pipeline"] > 0.95 and while_waiting["simple"] < 0.8,
    )
    return chart, statement


def _means_by_model(outcomes: Outcomes) -> list[float]:
    models = outcomes.requests.models
    return [float(outcomes.latencies_s[models == number].mean()) for number in range(len(outcomes.requests.names))]
