"""Options that several commands share: the fields of a dataclass, written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


def with_shared(
    shared: type[Any], run: Callable[..., Result], *, like: Callable[..., Any] | None = None
) -> Callable[..., Result]:
    """A command for typer that hands `run` an instance of `shared`, a dataclass of annotated options, and options of its own.

    Those are `run`'s parameters after the first; or, where it takes any, the parameters of `like`, which also names the
    command and helps with it.
    """
    own = like or run

    @functools.wraps(own)
    def command(**options: Any) -> Result:
        return run(shared(**{field.name: options.pop(field.name) for field in fields(shared)}), **options)

    parameters = [*inspect.signature(own).parameters.values()][0 if like else 1 :]
    parameters += inspect.signature(shared).parameters.values()
    hints = get_type_hints(own, include_extras=True) | get_type_hints(shared, include_extras=True)
    command.__annotations__ = {one.name: hints[one.name] for one in parameters} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in parameters]
    )
    return command
