"""`hplm bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hplm_loadtest.lookup import plot_lookup
from hplm_loadtest.request import whole_requests
from hplm_loadtest.upper import upper_layers

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure look-up, upper layers and whole requests; variants run in turn, medians are shown.",
    epilog="Example: hplm bench request --json request.json",
)
MODELS = Path("build/demo/models")
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")]
ModelsOption = Annotated[Path, typer.Option("--models", help="Triton model repository.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds that count.")]


@app.command(name="plot-lookup")
def bench_lookup(models: ModelsOption = MODELS, rounds: RoundsOption = 9, json_file: JsonOption = None) -> None:
    """Time of a 128-token look-up from memory, and which level answers how many windows of unseen text.

    Example: hplm bench plot-lookup --json plot-lookup.json
    """
    plot_lookup(models, rounds).publish(json_file)


@app.command(name="upper")
def bench_upper(
    models: ModelsOption = MODELS,
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Tokens per second of the upper layers, packed against padded, and the share of the machine's matrix peak.

    Example: hplm bench upper --threads 2
    """
    upper_layers(models, rounds, threads, device).publish(json_file)


@app.command(name="request")
def bench_request(
    models: ModelsOption = MODELS,
    rounds: RoundsOption = 5,
    count: Annotated[int, typer.Option(min=8, help="Requests a round.")] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at saturation.")] = 64,
    json_file: JsonOption = None,
) -> None:
    """Latency of one request at a time, throughput of many, over gRPC and HTTP, on a real server started for it.

    Example: hplm bench request --concurrency 128
    """
    whole_requests(models, rounds, count, concurrency).publish(json_file)
