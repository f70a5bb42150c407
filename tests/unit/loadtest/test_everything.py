"""`hplm bench all` calls each benchmark in a way that it understands."""

from __future__ import annotations

import shlex

import pytest
import typer.main
from hplm_loadtest.cli import app
from hplm_loadtest.everything import BENCHMARKS, QUICK

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
