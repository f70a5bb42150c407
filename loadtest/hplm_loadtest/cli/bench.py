"""The command `hplm bench`: a command for each benchmark, and one that runs them all."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hplm.errors import StartError
from hplm_loadtest.benchmarks.experiment import Experiment, QuickOption
from hplm_loadtest.benchmarks.experiments import EXPERIMENTS, OPTIONS
from hplm_loadtest.benchmarks.served_repository import DEMO
from hplm_loadtest.scenarios.stop_signals import stop_on_signals

QUICK_TENANTS = 1_000
TENANTS = 10_000
app = typer.Typer(
    callback=lambda: stop_on_signals("bench"),
    no_args_is_help=True,
    help="Measure look-up, upper layers, whole requests and response under load. Variants take turns; medians are shown. "
    "The status is 0 also if goals are missed.",
    epilog="Example: hplm bench request --json request.json",
)
for experiment in EXPERIMENTS:
    app.command(name=experiment.name)(experiment.command(OPTIONS))


@app.command(name="all")
def bench_all(
    out: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = Path("build/bench"),
    quick: QuickOption = False,
) -> None:
    """Run every benchmark, one after another, with results and pictures in a folder; build missing fleets.

    Build the demo before: `make serve` or `hplm build demo`.

    Example: hplm bench all --quick
    """
    if not DEMO.is_dir():
        raise StartError(f"there is no {DEMO}: `make serve` or `hplm build demo` makes it")
    console = Console(stderr=True, highlight=False)
    count = QUICK_TENANTS if quick else TENANTS
    fleets = {shape: Path(f"build/fleet-{shape}-{count}") for shape in ("minilm", "bert-base")}
    for shape, folder in fleets.items():
        build = ("build", "fleet", "--shape", shape, "--tenants", str(count), "--out", str(folder))
        if not (folder / "models").is_dir() and run_hplm(*build):
            raise StartError(f"the fleet {folder} could not be built, see above")
    minilm, bert = fleets["minilm"], fleets["bert-base"]
    names = {
        "minilm": minilm / "models",
        "minilm_fleet": minilm,
        "bert": bert / "models",
        "bert_fleet": bert,
        "out": out,
    }
    failed = []
    chosen = [one for one in EXPERIMENTS if one.in_all is not None]
    for number, one in enumerate(chosen, 1):
        words = ["bench", one.name, *arguments_in_all(one, names, out, quick)]
        console.rule(f"{number} of {len(chosen)}: hplm {shlex.join(words)}")
        start = time.monotonic()
        if run_hplm(*words):
            failed.append(one.name)
        console.print(f"{one.name}: {time.monotonic() - start:.0f} s")
    if failed:
        raise StartError(f"these benchmarks failed, see above: {', '.join(failed)}")


def arguments_in_all(one: Experiment, names: Mapping[str, object], out: Path, quick: bool) -> list[str]:
    """Return the arguments of a benchmark in `hplm bench all`. A folder may have a space in its name."""
    words = shlex.split(one.in_all or "")
    words += ["--json", str(out / f"{one.name}.json")]
    words += ["--picture", str(out / f"{one.name}.svg")] if one.draws else []
    words += shlex.split("--quick" if one.in_quick is None else one.in_quick) if quick else []
    return [word.format(**names) for word in words]


def run_hplm(*arguments: str) -> int:
    """Run `hplm` in a process of its own; return its status."""
    with subprocess.Popen([sys.executable, "-m", "hplm_cli", *arguments]) as running:
        try:
            return running.wait()
        except SystemExit:
            # The benchmark must end its own server.
            running.terminate()
            raise
