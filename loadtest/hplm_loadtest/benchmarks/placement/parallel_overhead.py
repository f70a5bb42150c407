"""Figs 8, 9 and 16: what dividing a model costs, and what it gains, by the number of devices (AlpaServe 3.3 and 6.6)."""

from __future__ import annotations

from collections.abc import Callable

from hplm.placement.placement import ParallelConfig
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import cut_by_hand, table1_cluster, table1_model
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement

COUNTS = (1, 2, 4, 8)
MODEL = "BERT-2.7B"
# The paper's reductions of the overhead at eight stages.
PAPER_REDUCTIONS = {"BERT-1.3B": 0.329, "BERT-2.7B": 0.467}


def _seconds(times: StageTimes, model: ServedModel, stages: int, intra: int) -> tuple[float, ...]:
    seconds = times.of(model, ParallelConfig(stages, intra))
    assert seconds is not None, "models of Table 1 have enough layers"
    return seconds


def overhead_parts(effort: Effort) -> FigureResult:
    """Fig. 8: the parts of the overhead of both kinds of parallelism, as a share of the latency on one device."""
    model = table1_model(MODEL)
    times = StageTimes(table1_cluster(8), [model], cut_by_hand)
    parts: dict[str, list[float]] = {
        "inter-layer: sending": [],
        "inter-layer: uneven stages": [],
        "intra-layer: sending": [],
    }
    for count in COUNTS:
        stages = _seconds(times, model, count, 1)
        parts["inter-layer: sending"].append((sum(stages) - model.latency_s) / model.latency_s)
        parts["inter-layer: uneven stages"].append((count * max(stages) - sum(stages)) / model.latency_s)
        whole = _seconds(times, model, 1, count)[0]
        parts["intra-layer: sending"].append((count * whole - model.latency_s) / model.latency_s)
    last = {name: values[-1] for name, values in parts.items()}
    statements = [
        Statement(
            "most overhead of inter-layer parallelism comes from uneven stages, not from sending",
            f"at 8 devices {last['inter-layer: uneven stages']:.0%} from uneven stages, "
            f"{last['inter-layer: sending']:.0%} from sending",
            last["inter-layer: uneven stages"] > last["inter-layer: sending"],
        ),
        Statement(
            "the overhead of intra-layer parallelism comes from sending and is much higher",
            f"at 8 devices {last['intra-layer: sending']:.0%}",
            last["intra-layer: sending"] > last["inter-layer: uneven stages"] + last["inter-layer: sending"],
        ),
    ]
    chart = Chart("parts of the overhead", "devices", "share of the latency", COUNTS, parts)
    return FigureResult("8", "overhead of parallelism", statements, [chart])


def scaling(effort: Effort) -> FigureResult:
    """Fig. 9: latency, throughput and memory by the number of devices."""
    model = table1_model(MODEL)
    times = StageTimes(table1_cluster(8), [model])
    inter = [_seconds(times, model, count, 1) for count in COUNTS]
    intra = [_seconds(times, model, 1, count)[0] for count in COUNTS]
    latency = {
        "inter-layer": [sum(stages) for stages in inter],
        "intra-layer": intra,
        "replication": [model.latency_s] * len(COUNTS),
    }
    throughput = {
        "inter-layer": [1 / max(stages) for stages in inter],
        "intra-layer": [1 / seconds for seconds in intra],
        "replication": [count / model.latency_s for count in COUNTS],
    }

    def gigabytes(config: Callable[[int], ParallelConfig]) -> list[float]:
        return [sum(times.bytes_of(model, config(count)) or ()) * config(count).intra / 1e9 for count in COUNTS]

    memory = {
        "inter-layer": gigabytes(lambda count: ParallelConfig(count)),
        "intra-layer": gigabytes(lambda count: ParallelConfig(1, count)),
        "replication": [count * model.weight_bytes / 1e9 for count in COUNTS],
    }
    last = len(COUNTS) - 1
    statements = [
        Statement(
            "inter-layer parallelism does not reduce the latency of a request; intra-layer parallelism does",
            f"at 8 devices {latency['inter-layer'][last]:.3f} s and {latency['intra-layer'][last]:.3f} s, "
            f"on one device {model.latency_s:.3f} s",
            latency["intra-layer"][last] < model.latency_s < latency["inter-layer"][last] < 1.2 * model.latency_s,
        ),
        Statement(
            "inter-layer parallelism has more throughput than intra-layer parallelism, replication the most",
            ", ".join(f"{name} {values[last]:.1f}/s" for name, values in throughput.items()),
            throughput["intra-layer"][last] < throughput["inter-layer"][last] < throughput["replication"][last],
        ),
        Statement(
            "both kinds of parallelism keep the memory constant; replication multiplies it",
            ", ".join(f"{name} {values[last]:.1f} GB" for name, values in memory.items()),
            max(memory["inter-layer"][last], memory["intra-layer"][last]) < 1.01 * memory["inter-layer"][0],
        ),
    ]
    charts = [
        Chart("latency", "devices", "s", COUNTS, latency),
        Chart("throughput", "devices", "requests/s", COUNTS, throughput),
        Chart("memory", "devices", "GB", COUNTS, memory),
    ]
    return FigureResult("9", "latency, throughput and memory by devices", statements, charts)


def automatic_cut(effort: Effort) -> FigureResult:
    """Fig. 16: the overhead of a cut into equal numbers of layers, and of the cut by the dynamic programme."""
    statements, charts, numbers = [], [], {}
    for architecture, papers in PAPER_REDUCTIONS.items():
        model = table1_model(architecture)
        automatic = StageTimes(table1_cluster(8), [model])
        by_hand = StageTimes(table1_cluster(8), [model], cut_by_hand)
        curves = {
            name: [count * max(_seconds(times, model, count, 1)) / model.latency_s - 1 for count in COUNTS]
            for name, times in (("by hand", by_hand), ("automatic", automatic))
        }
        reduction = 1 - curves["automatic"][-1] / curves["by hand"][-1]
        numbers[f"reduction {architecture}"] = reduction
        charts.append(Chart(architecture, "stages", "overhead as a share of the latency", COUNTS, curves))
        statements.append(
            Statement(
                f"{architecture}, 8 stages: the automatic cut takes {papers:.1%} off the overhead",
                f"{curves['by hand'][-1]:.1%} to {curves['automatic'][-1]:.1%}: {reduction:.1%} less "
                "(our division of Table 1's times between layers is an assumption)",
                reduction > 0,
            )
        )
    return FigureResult("16", "overhead of cuts", statements, charts, numbers=numbers)
