"""Every command line that a message, a --help text or a page shows is one that the program takes today."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from hplm_cli import COMMANDS, make_app

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path for folder in ("src", "builder", "clients", "loadtest", "backends") for path in (ROOT / folder).rglob("*.py")
)
# The page of decisions names commands that are gone.
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")} - {ROOT / "docs" / "decisions.md"})
# Expressions in a hint that stand where the name of a command is expected, and a value that they have.
VALUES = {"what": "tenant", "kind": "tenant", "rates": "--rate base=1"}
QUOTED = re.compile(r"`(hplm [^`]+)`")
# A line of a page's code block, or of the examples of --help.
LINE = re.compile(r"^ *(?:\$ )?(?:\S*bin/)?(hplm (?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ENDS = re.compile(r"(?:\s(?:2?>>?|<|&|#)(?:\s|$)|\s{4}).*", re.DOTALL)
# Options of `hplm serve` that go on to Triton begin so.
TRITONS = ("--log-", "--http-", "--grpc-", "--metrics-", "--trace-", "--cache-", "--rate-limit")


class Hint(NamedTuple):
    """A command line, and the file that shows it."""

    where: str
    line: str


def texts_of(source: Path) -> Iterator[str]:
    """Yield each string of a source file. Expressions in an f-string are replaced by a value."""
    tree = ast.parse(source.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VALUES.get(ast.unparse(part.value), "1")
                for part in node.values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def commands_in(text: str) -> Iterator[str]:
    """Yield each command of a line of a shell, without redirections and comments."""
    text = re.sub(r"\s*\\?\n\s*", " ", text)
    for part in re.split(r"\s(?:&&|\|\||\||;)\s", text):
        if part.strip().startswith("hplm "):
            yield ENDS.sub("", part).strip()


def hints() -> Iterator[Hint]:
    for source in SOURCES:
        for text in texts_of(source):
            is_help = "\n" in text
            lines = [*QUOTED.findall(text), *(LINE.findall(text) if is_help and "Example" in text else [])]
            yield from (Hint(source.relative_to(ROOT).as_posix(), each) for line in lines for each in commands_in(line))
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        text = page.read_text()
        lines = [line for block in BLOCK.findall(text) for line in LINE.findall(block)]
        lines += QUOTED.findall(BLOCK.sub("", text))
        yield from (Hint(page.name, each) for line in lines for each in commands_in(line))


@cache
def command_named(name: str) -> Any:
    return get_command(make_app(name)).commands[name]  # type: ignore[attr-defined]


def complaint_about(line: str) -> str:
    """Return why the program does not take a command line, "" if it does. What the line leaves out is no complaint."""
    words = [word for word in shlex.split(line)[1:] if word not in ("...", "[...]")]
    if not words or words[0] in ("--help", "--version", "COMMAND"):
        return ""
    if words[0] not in COMMANDS:
        return f"no command {words[0]}"
    command, rest = command_named(words[0]), words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    # The parser alone: what is missing or has a placeholder as its value is no complaint.
    context = command.context_class(command, info_name=line, ignore_unknown_options=words[0] == "serve")
    # An option may be named without its value.
    rest += ["X"] if rest and rest[-1].startswith("-") and _wants_value(command, rest[-1]) else []
    try:
        _, extra, _ = command.make_parser(context).parse_args(rest)
    except Exception as error:
        return str(error)
    if words[0] == "serve":
        extra = [word for word in extra if word.startswith("-") and not word.startswith(TRITONS)]
    return f"unexpected {extra}" if extra else ""


def _wants_value(command: Any, option: str) -> bool:
    return any(option in each.opts and not each.is_flag for each in command.params if each.param_type_name == "option")


@pytest.mark.usefixtures("restored_signals")
def test_every_hint_is_a_command_line_of_today() -> None:
    found = [*hints()]
    assert len(found) > 300
    assert {hint.where for hint in found} >= {"README.md", "operating.md", "builder/hplm_builder/cli/build.py"}
    wrong = [f"{hint.where}: {hint.line} ({why})" for hint in found if (why := complaint_about(hint.line))]
    assert not wrong, "\n".join(wrong)


def test_a_hint_with_a_mistake_is_found() -> None:
    for line in ("hplm sevre", "hplm build exprot", "hplm build export --bsae x", "hplm serve --modles x"):
        assert complaint_about(line)


def test_no_hint_replaces_a_base_that_is_served() -> None:
    replacing = [
        hint
        for hint in hints()
        if hint.line.startswith("hplm build export") and "--base" in hint.line and "--name" not in hint.line
    ]
    assert replacing == []
