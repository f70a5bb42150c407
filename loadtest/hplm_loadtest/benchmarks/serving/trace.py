"""The benchmark `hplm bench trace`: what each thread of both stages does, as a picture and as a trace (HMI Fig. 17)."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Report
from hplm.reporting.charts import COLOURS, check_picture, save
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, benchmark_server
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.serving.open_load import Traffic
from hplm_loadtest.scenarios.grpc_load import closed_loop

Span = dict[str, Any]
SHOWN_MS = 400.0  # milliseconds of the trace that the picture shows
IN_FLIGHT = 64


def trace(models: Path, count: int, slots: int, perfetto: Path | None, picture: Path | None) -> Report:
    """Record the spans of both stages while `count` requests are answered; return each span's share of the time.

    With fewer adapter slots than tenants, adapters are swapped. `perfetto`: a file to write for chrome://tracing or
    ui.perfetto.dev.
    """
    check_picture(picture)
    traffic = Traffic.read(models, "pool")
    with tempfile.TemporaryDirectory(prefix="hplm-trace-") as folder, progress_bars() as progress:
        bar = progress.add_task("requests", total=2)
        paths = [Path(folder) / name for name in ("plot.jsonl", "upper.jsonl")]
        plot, upper = ({"trace": str(path)} for path in paths)
        with benchmark_server(models, StageSettings(plot, {**upper, "num_slots": slots})) as server:
            for _ in range(2):
                # The first pass warms up. The stages and this process read the same clock.
                start_us = time.monotonic_ns() / 1000
                closed_loop(server.ports.grpc_url, traffic.mix().draw(count, traffic.rng), IN_FLIGHT)
                progress.update(bar, advance=1)
        spans = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    spans = [span for span in spans if span["start_us"] >= start_us]
    if not spans:
        raise ConfigError("the stages wrote no spans")
    if perfetto is not None:
        perfetto.parent.mkdir(parents=True, exist_ok=True)
        perfetto.write_text(json.dumps({"traceEvents": chrome_events(spans), "displayTimeUnit": "ms"}))
    if picture is not None:
        draw(picture, spans)
    whole_us = max(s["start_us"] + s["duration_us"] for s in spans) - min(s["start_us"] for s in spans)
    durations_us: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        durations_us[span["process"], span["name"]].append(span["duration_us"])
    rows = [
        {
            "stage": stage,
            "span": name,
            "count": len(values),
            "median_ms": median(values) / 1000,
            "share_of_time": sum(values) / whole_us,
        }
        for (stage, name), values in sorted(durations_us.items())
    ]
    settings = {
        "base": read_repository(models).base.config.name,
        "requests": count,
        "tenants": len(traffic.names),
        "slots": slots,
        "in_flight": IN_FLIGHT,
    }
    return Report("trace", settings, rows)


def chrome_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans as complete events of the Trace Event Format; times start at 0."""
    first = min(s["start_us"] for s in spans)
    threads = {key: number for number, key in enumerate(sorted({(s["pid"], s["thread"]) for s in spans}), 1)}
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": s["name"],
            "pid": s["pid"],
            "tid": threads[s["pid"], s["thread"]],
            "ts": s["start_us"] - first,
            "dur": s["duration_us"],
            "args": s["about"],
        }
        for s in spans
    ]
    for pid, process in sorted({(s["pid"], s["process"]) for s in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"hbert_{process}"}})
    for (pid, thread), number in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": thread}})
    return events


def draw(path: Path, spans: Sequence[Span]) -> None:
    """Draw the first `SHOWN_MS` of the spans, one line per thread."""
    first = min(s["start_us"] for s in spans)
    shown = [s for s in spans if s["start_us"] - first < SHOWN_MS * 1000]
    lanes = sorted({(s["process"], s["thread"]) for s in shown})
    # A layer runs inside a batch: layers are drawn last, and narrower than batches.
    kinds = sorted({s["name"] for s in shown}, key=lambda kind: (kind == "layer", kind))
    figure = Figure(figsize=(9.0, 1.2 + 0.35 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for kind, colour in zip(kinds, COLOURS, strict=False):
        for lane, key in enumerate(lanes):
            bars = [
                ((s["start_us"] - first) / 1000, s["duration_us"] / 1000)
                for s in shown
                if s["name"] == kind and (s["process"], s["thread"]) == key
            ]
            height = 0.4 if kind == "layer" else 0.8
            axes.broken_barh(
                bars, (lane - height / 2, height), color=colour, edgecolor="white", linewidth=0.3, label=kind
            )
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, ncols=len(handles), loc="upper right")
    axes.set_yticks(range(len(lanes)), [f"{process}: {thread}" for process, thread in lanes], fontsize=8)
    axes.set_xlim(0, SHOWN_MS)
    axes.set_ylim(-0.6, len(lanes) + 0.4)
    axes.set_xlabel("time (ms)")
    axes.set_title("What each thread of the two stages does", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    save(path, figure)
