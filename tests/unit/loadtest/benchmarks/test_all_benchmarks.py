"""`hplm bench all` calls each benchmark with options that the benchmark has."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer.main
from hplm_loadtest.benchmarks.all_benchmarks import BENCHMARKS, QUICK, _fill_in
from hplm_loadtest.cli.bench import app
from typer.testing import CliRunner

from hplm.errors import HplmError

NAMES = {"minilm": "m", "bert": "b", "bert_fleet": "bf", "minilm_fleet": "mf", "out": "o"}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("name", "arguments", "draws"), BENCHMARKS, ids=[name for name, _, _ in BENCHMARKS])
def test_its_command_lines_parse(name: str, arguments: str, draws: bool, quick: bool) -> None:
    words = [*shlex.split(arguments.format(**NAMES)), "--json", "x.json"]
    words += ["--picture", "x.svg"] if draws else []
    words += shlex.split(QUICK.get(name, "--quick").format(**NAMES)) if quick else []
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, words)


def test_a_folder_may_have_a_space_in_its_name() -> None:
    assert _fill_in("--perfetto {out}/trace.json --quick", {"out": "my bench"}) == [
        "--perfetto",
        "my bench/trace.json",
        "--quick",
    ]


@pytest.mark.usefixtures("restored_signals")
def test_an_unknown_choice_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["batching", "--policy", "nonsense"], "no policy 'nonsense'; there are fcfs"),
        (["schedulers", "--policy", "das", "--policy", "nonsense"], "no policy 'nonsense'; there are fcfs"),
        (["batching", "--mode", "nonsense"], "no batching mode 'nonsense'"),
        (["tenants", "--system", "hbert", "--system", "guess"], "no system 'guess'; there are hbert"),
        (["response", "--quantization", "int4"], "no quantization 'int4'"),
        (["all", "--quick"], "`make serve` or `hplm build demo` makes it"),
    ):
        with pytest.raises(HplmError, match=words):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not list(tmp_path.iterdir())
