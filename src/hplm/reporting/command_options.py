"""Options that several commands share: the fields of a dataclass, written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


def with_shared(shared: type[Any], run: Callable[..., Result]) -> Callable[..., Result]:
    """A command for typer that hands `run` an instance of `shared`, a dataclass of annotated options, and options of its own:
    `run`'s parameters after the first.
    """

    @functools.wraps(run)
    def command(**options: Any) -> Result:
        return run(shared(**{field.name: options.pop(field.name) for field in fields(shared)}), **options)

    # Not `get_type_hints` of a function: Python 3.10 hides an option behind an Optional where its default is None.
    taken = [*inspect.signature(run, eval_str=True).parameters.values()][1:]
    hints = get_type_hints(shared, include_extras=True)
    taken += [one.replace(annotation=hints[one.name]) for one in inspect.signature(shared).parameters.values()]
    command.__annotations__ = {one.name: one.annotation for one in taken} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in taken]
    )
    return command
