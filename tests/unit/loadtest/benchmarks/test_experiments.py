"""The commands of `hplm bench` are generated from the benchmarks' declarations."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import typer.main
from hplm_loadtest.benchmarks.access.flood import FloodLoad
from hplm_loadtest.benchmarks.experiment import Experiment
from hplm_loadtest.benchmarks.experiments import EXPERIMENTS
from hplm_loadtest.cli.bench import app, arguments_in_all
from typer.testing import CliRunner

from hplm.errors import HplmError
from hplm.reporting.benchmark_result import Report

NAMES = {"minilm": "m m", "bert": "b", "bert_fleet": "bf", "minilm_fleet": "mf", "out": "o"}
IN_ALL = [one for one in EXPERIMENTS if one.in_all is not None]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("one", IN_ALL, ids=lambda one: one.name)
def test_the_command_lines_of_all_parse(tmp_path: Path, one: Experiment, quick: bool) -> None:
    group = typer.main.get_command(app)
    command = group.commands[one.name]  # type: ignore[attr-defined]
    command.make_context(one.name, arguments_in_all(one, NAMES, tmp_path / "my bench", quick))


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_a_command_has_help_and_each_option_says_what_it_is(one: Experiment) -> None:
    shown = CliRunner().invoke(app, [one.name, "--help"])
    assert shown.exit_code == 0
    group = typer.main.get_command(app)
    for option in group.commands[one.name].params:  # type: ignore[attr-defined]
        assert option.name == "help" or option.help, (one.name, option.name)


@pytest.mark.usefixtures("restored_signals")
def test_a_command_gives_its_options_to_the_measurement_and_a_quick_look_takes_less(tmp_path: Path) -> None:
    given = {}

    def measure(
        models: Path, load: FloodLoad, sizes: list[int], pairs: int, picture: Path | None, more: int = 7
    ) -> Report:
        given.update(models=models, load=load, sizes=sizes, pairs=pairs, picture=picture, more=more)
        return Report("tried", {}, [{"a": 1}])

    tried = typer.Typer()
    one = Experiment(
        "tried", measure, "Try.", "x", {"models": tmp_path, "sizes": [3, 1, 2], "pairs": 9}, {"sizes": 2, "pairs": 1}
    )
    tried.command()(one.command({}))
    picture = tmp_path / "a.svg"
    done = CliRunner().invoke(tried, ["--quota", "3", "--picture", str(picture)], catch_exceptions=False)
    assert done.exit_code == 0
    load = FloodLoad(quota=3.0)
    assert given == {"models": tmp_path, "load": load, "sizes": [3, 1, 2], "pairs": 9, "picture": picture, "more": 7}
    CliRunner().invoke(tried, ["--quick"], catch_exceptions=False)
    assert (given["sizes"], given["pairs"], given["load"]) == ([1, 2], 1, FloodLoad())


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_every_required_parameter_of_a_measurement_is_an_option(one: Experiment) -> None:
    parameters = inspect.signature(one.measure).parameters
    needed = {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}
    assert needed - set(one.options) <= {"picture", "load", "limits", "traffic", "effort"}
    assert set(one.quick) <= {*parameters, *inspect.signature(one.command({})).parameters}


@pytest.mark.usefixtures("restored_signals")
def test_an_unknown_choice_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["batching", "--policy", "nonsense"], "no policy 'nonsense'; there are fcfs"),
        (["schedulers", "--policy", "das", "--policy", "nonsense"], "no policy 'nonsense'; there are fcfs"),
        (["batching", "--mode", "nonsense"], "no mode 'nonsense'"),
        (["tenants", "--system", "hbert", "--system", "guess"], "no system 'guess'; there are hbert"),
        (["response", "--quantization", "int4"], "no quantization 'int4'"),
        (["placement", "--value", "1", "--axis", "time"], "no axis 'time'; there are rate"),
        (["all", "--quick"], "`make serve` or `hplm build demo` makes it"),
    ):
        with pytest.raises(HplmError, match=words):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not list(tmp_path.iterdir())
