"""Options that several commands share, as fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


def with_shared(shared: type[Any], run: Callable[..., Result]) -> Callable[..., Result]:
    """Make a typer command that calls `run` with an instance of `shared`, a dataclass of annotated options.

    The parameters of `run` after the first are options of the command too.
    """

    @functools.wraps(run)
    def command(**options: Any) -> Result:
        return run(shared(**{field.name: options.pop(field.name) for field in fields(shared)}), **options)

    # `get_type_hints` of a function is no use: Python 3.10 wraps an option with default None in an Optional.
    parameters = [*inspect.signature(run, eval_str=True).parameters.values()][1:]
    hints = get_type_hints(shared, include_extras=True)
    parameters += [
        option.replace(annotation=hints[option.name]) for option in inspect.signature(shared).parameters.values()
    ]
    # Required options stand first in the help.
    parameters.sort(key=lambda option: option.default is not inspect.Parameter.empty)
    command.__annotations__ = {option.name: option.annotation for option in parameters} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in parameters]
    )
    return command
