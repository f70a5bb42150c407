"""Options that several commands share, as fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import typer

Result = TypeVar("Result")
Run = TypeVar("Run", bound=Callable[..., Any])


class CommandGroup(typer.Typer):
    """A group of commands whose functions may take dataclasses of options, see `with_shared`."""

    def command(self, *arguments: Any, **settings: Any) -> Callable[[Run], Run]:
        """Return the decorator that makes a function a command of the group. Arguments are those of `typer.Typer.command`."""
        register = super().command(*arguments, **settings)

        def add(run: Run) -> Run:
            register(with_shared(run))
            return run

        return add


def with_shared(run: Callable[..., Result]) -> Callable[..., Result]:
    """Make a typer command that calls `run`. Each parameter of `run` that is a dataclass stands for its annotated options.

    The command's options are the other parameters of `run`, and behind these the fields of the dataclasses.
    """
    # `get_type_hints` of a function is no use: Python 3.10 wraps an option with default None in an Optional.
    own = inspect.signature(run, eval_str=True).parameters.values()
    shared: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}

    @functools.wraps(run)
    def command(**options: Any) -> Result:
        for name, kind in shared.items():
            options[name] = kind(**{field.name: options.pop(field.name) for field in fields(kind)})
        return run(**options)

    parameters = [parameter for parameter in own if parameter.name not in shared]
    for kind in shared.values():
        hints = get_type_hints(kind, include_extras=True)
        options = inspect.signature(kind).parameters.values()
        parameters += [option.replace(annotation=hints[option.name]) for option in options]
    # Required options stand first in the help.
    parameters.sort(key=lambda option: option.default is not inspect.Parameter.empty)
    command.__annotations__ = {option.name: option.annotation for option in parameters} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in parameters]
    )
    return command
