"""The benchmark `hplm bench limit`: the upper layers' share of the matrix peak, and the share of that left by Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from hplm.models.device import choose_device, choose_dtype, choose_threads, use_threads
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import bar_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, benchmark_server
from hplm_loadtest.benchmarks.engine.upper import peak_product, product_flop_of
from hplm_loadtest.benchmarks.saturating_batch import BATCH, IN_FLIGHT, batches_for, saturating_batch
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.timing import time_interleaved
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import unanswered_goal
from hplm_loadtest.scenarios.steady_rate import rate_columns

PEAK_GOAL = 0.8
SERVED_GOAL = 0.9


def limit(models: Path, rounds: int, seconds: float, device_name: str, picture: Path | None) -> Report:
    """Measure the saturated engine in-process as a share of the matrix peak of its cores.

    Then measure the same texts through Triton, as a share of the engine in-process.
    """
    check_picture(picture)
    threads = choose_threads(0)
    use_threads(threads)
    served = read_repository(models)
    config = served.base.config
    device = choose_device(device_name)
    dtype = choose_dtype("auto", device)
    load = saturating_batch(models, served)
    engine = served.engine(load.tenants, device)
    work = product_flop_of(config, load.requests)
    product, product_flop = peak_product(dtype, device)
    variants: dict[str, Callable[[], object]] = {"engine": lambda: engine.run(load.requests), "matrix product": product}
    runs: list[Run] = []
    inside: list[float] = []
    shares: list[float] = []
    peaks: list[float] = []
    # The server computes on the device of the engine in-process.
    settings = StageSettings({"device": device.type}, {"num_slots": BATCH + 1, "device": device.type})
    with progress_bars() as progress, benchmark_server(models, settings) as server:
        bar = progress.add_task("limit", total=rounds)
        closed_loop(server.ports.grpc_url, load.repeat(2), IN_FLIGHT)
        for _ in range(rounds):
            timed = time_interleaved(variants, 3, 2, progress, "in-process")
            peak = product_flop / timed["matrix product"].median_s
            peaks.append(peak)
            shares.append(work / timed["engine"].median_s / peak)
            inside.append(BATCH / timed["engine"].median_s)
            requests = load.repeat(batches_for(inside[-1], seconds))
            runs.append(closed_loop(server.ports.grpc_url, requests, IN_FLIGHT))
            progress.update(bar, advance=1)
    engine.close()
    through_triton = rate_columns(runs)
    served_share = through_triton["requests_per_s"] / median(inside)
    rows = [
        {
            "what": "engine in-process",
            "requests_per_s": median(inside),
            "tokens_per_s": median(inside) * load.tokens / BATCH,
            "share": median(shares),
            "of": f"matrix peak ({median(peaks) / 1e9:.0f} GFLOP/s)",
            "spread": f"{min(shares):.2f}-{max(shares):.2f}",
        },
        {
            "what": "through Triton, gRPC",
            **through_triton,
            "tokens_per_s": through_triton["requests_per_s"] * load.tokens / BATCH,
            "share": served_share,
            "of": "engine in-process",
        },
    ]
    goals = [
        Goal("matrix-peak", "engine's share of the matrix peak", PEAK_GOAL, median(shares), "", "higher"),
        Goal("served", "served throughput over the engine's in-process", SERVED_GOAL, served_share, "", "higher"),
        unanswered_goal("limit", runs),
    ]
    if picture is not None:
        bar_chart(
            picture,
            ["matrix product", "engine in-process", "through Triton, gRPC"],
            {"share of peak": [1.0, median(shares), median(shares) * served_share]},
            title=f"Share of the matrix peak: upper layers of {config.name}, {BATCH} texts a batch",
            x_label="what computes",
            y_label="share of the measured matrix peak",
        )
    result_settings = {
        "base": config.name,
        "threads": threads,
        "dtype": str(dtype),
        "device": device.type,
        "batch": BATCH,
        "mean_tokens": round(load.tokens / BATCH, 1),
        "rounds": rounds,
    }
    return Report("limit", result_settings, rows, goals)
