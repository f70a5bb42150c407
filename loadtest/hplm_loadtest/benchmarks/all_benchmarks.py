"""The benchmark `hplm bench all`: runs every benchmark, one after another."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from hplm.errors import StartError
from hplm_loadtest.benchmarks.served_repository import DEMO

QUICK_TENANTS = 1_000
TENANTS = 10_000
# Name, arguments, whether the benchmark draws a picture. {minilm} and {bert} stand for the fleets' models. `int8` is left out,
# because not every processor can run it.
BENCHMARKS: tuple[tuple[str, str, bool], ...] = (
    ("plot-lookup", "", False),
    ("upper", "", False),
    ("adapters", "", False),
    ("importance", "", False),
    ("request", "", False),
    ("route", "--models {minilm} --texts pool", False),
    ("limit", "--models {bert}", True),
    ("pipeline", "--models {minilm}", True),
    ("batching", "--models {bert}", True),
    ("schedulers", "--models {bert}", True),
    ("trace", "--models {bert} --perfetto {out}/trace-perfetto.json", True),
    ("memory", "--fleet {minilm_fleet}", True),
    ("tenants", "--shape bert-base --fleet {bert_fleet}", True),
    ("response", "--models {minilm} --texts pool", True),
    ("burst", "--models {minilm} --texts pool", True),
    ("waves", "--models {minilm} --texts pool", True),
    ("overload", "--models {minilm}", True),
    ("stages", "--models {minilm}", False),
    ("placement", "--models {bert}", False),
)
# Arguments of a quick look, which takes ten minutes in all on two cores. Batching and schedulers start many servers, so they
# get the small base.
QUICK = {
    "adapters": "--rounds 2",
    "importance": "--rounds 2",
    "plot-lookup": "--rounds 2",
    "upper": "--rounds 2",
    "request": "--rounds 1 --count 400",
    "trace": "--count 128",
    "pipeline": "--quick --seconds 2",
    "batching": "--quick --models {minilm} --mode packed --mode turbo --mode naive --mode naive-100",
    "schedulers": "--quick --models {minilm}",
    # The other figures take minutes.
    "placement": "--quick --figure 2 --figure 7 --figure 10 --figure 16",
    # No response times: a load of a few seconds would give meaningless ones.
    "tenants": "--quick --popularity uniform --in-flight 32 --tenants 1 --tenants 16 --response-seconds 0 --disk-mb 2000 "
    "--system hbert --system dedicated --system shared --system adapter --system onnxruntime",
}


def run_all(out: Path, quick: bool) -> None:
    """Run each benchmark in a process of its own, also after a benchmark that fails.

    Raises StartError if benchmarks failed, with their names, or if there is no demo: some benchmarks look up in its tables.
    """
    if not DEMO.is_dir():
        raise StartError(f"there is no {DEMO}: `make serve` or `hplm build demo` makes it")
    console = Console(stderr=True, highlight=False)
    count = QUICK_TENANTS if quick else TENANTS
    fleets = {shape: Path(f"build/fleet-{shape}-{count}") for shape in ("minilm", "bert-base")}
    for shape, folder in fleets.items():
        build = ("build", "fleet", "--shape", shape, "--tenants", str(count), "--out", str(folder))
        if not (folder / "models").is_dir() and _hplm(*build):
            raise StartError(f"the fleet {folder} could not be built, see above")
    names = {
        "minilm": fleets["minilm"] / "models",
        "bert": fleets["bert-base"] / "models",
        "bert_fleet": fleets["bert-base"],
        "minilm_fleet": fleets["minilm"],
        "out": out,
    }
    failed = []
    for number, (name, arguments, draws) in enumerate(BENCHMARKS, 1):
        command = ["bench", name, *_fill_in(arguments, names), "--json", str(out / f"{name}.json")]
        if draws:
            command += ["--picture", str(out / f"{name}.svg")]
        if quick:
            command += _fill_in(QUICK.get(name, "--quick"), names)
        console.rule(f"{number} of {len(BENCHMARKS)}: hplm {shlex.join(command)}")
        start = time.monotonic()
        if _hplm(*command):
            failed.append(name)
        console.print(f"{name}: {time.monotonic() - start:.0f} s")
    if failed:
        raise StartError(f"these benchmarks failed, see above: {', '.join(failed)}")


def _fill_in(arguments: str, names: Mapping[str, object]) -> list[str]:
    """Split arguments, then put names into them: a folder may have a space in its name."""
    return [argument.format(**names) for argument in shlex.split(arguments)]


def _hplm(*arguments: str) -> int:
    with subprocess.Popen([sys.executable, "-m", "hplm_cli", *arguments]) as running:
        try:
            return running.wait()
        except SystemExit:
            # The benchmark must end its own server.
            running.terminate()
            raise
