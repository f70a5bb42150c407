"""A benchmark as data, and the command that is generated from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import JsonOption, Report
from hplm.reporting.charts import check_picture

REQUIRED = inspect.Parameter.empty
QuickOption = Annotated[bool, typer.Option("--quick", help="Take seconds or minutes: one round, less load.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="Also draw the result: a .svg or .png file.")]


@dataclass(frozen=True)
class Option:
    """An option of a benchmark. `flag` is by default the parameter's name. `read` returns what the parameter gets."""

    default: Any = REQUIRED
    help: str = ""
    flag: str = ""
    least: float | None = None
    most: float | None = None
    choices: Collection[str] = ()
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Experiment:
    """A benchmark: the function that measures variants and returns a result, its options, and what a quick look changes.

    options: by parameter of `measure`, or by field of a parameter that is a dataclass. A bare value is the default of an
    option of OPTIONS. Fields of a dataclass have their own defaults. A parameter `picture` gets the option --picture.
    quick: the most that a quick look takes: of numbers the value, of lists the number of items, else the value itself.
    in_all: the arguments in `hplm bench all`, where {minilm} and {bert} stand for fleets; None leaves the benchmark out.
    in_quick: further arguments of `hplm bench all --quick`.
    """

    name: str
    measure: Callable[..., Report]
    help: str
    example: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    in_all: str | None = None
    in_quick: str | None = None

    @property
    def draws(self) -> bool:
        return "picture" in inspect.signature(self.measure).parameters

    def command(self, shared: Mapping[str, Option]) -> Callable[..., None]:
        """Return the function of a typer command. `shared` has options that several benchmarks have."""
        hints = get_type_hints(self.measure)
        groups = {name: hints[name] for name in hints if name != "return" and is_dataclass(hints[name])}
        kinds: dict[str, tuple[Any, Any]] = {
            name: (hints[name], REQUIRED) for name in inspect.signature(self.measure).parameters
        }
        for kind in groups.values():
            of_kind = get_type_hints(kind)
            kinds |= {
                one.name: (of_kind[one.name], REQUIRED if one.default is MISSING else one.default)
                for one in fields(kind)
            }
        chosen: dict[str, tuple[Option, Any]] = {}
        for name, given in self._given(groups, shared).items():
            kind, default = kinds[name]
            option = given if isinstance(given, Option) else shared.get(name, Option())
            value = given if not isinstance(given, Option) else given.default
            chosen[name] = option, (kind, default if value is REQUIRED else value)
        parameters = [_parameter(name, option, *of_kind) for name, (option, of_kind) in chosen.items()]
        further = {"quick": (QuickOption, False), "picture": (PictureOption, None), "json_file": (JsonOption, None)}
        if not self.quick and "quick" not in kinds:
            del further["quick"]
        if not self.draws:
            del further["picture"]
        parameters += [_typed(name, kind, default) for name, (kind, default) in further.items()]

        def command(**values: Any) -> None:
            json_file, is_quick = values.pop("json_file"), values.pop("quick", False)
            picture = values.pop("picture", None)
            check_picture(picture)
            for name, (option, _) in chosen.items():
                values[name] = _read(name, option, values[name])
            if is_quick:
                values |= {name: _limited(values.get(name), most) for name, most in self.quick.items()}
            if "quick" in kinds:
                values["quick"] = is_quick
            for parameter, kind in groups.items():
                names = [one.name for one in fields(kind) if one.name in values]
                values[parameter] = kind(**{name: values.pop(name) for name in names})
            if self.draws:
                values["picture"] = picture
            self.measure(**values).publish(json_file)

        # Required options stand first in the help.
        parameters.sort(key=lambda one: one.default is not REQUIRED)
        command.__name__ = f"bench_{self.name}"
        command.__doc__ = f"{self.help}\n\nExample: {self.example}"
        command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    def _given(self, groups: Mapping[str, type[Any]], shared: Mapping[str, Option]) -> dict[str, Any]:
        """Return the options by parameter or field: those that the experiment names, then other fields of its dataclasses."""
        given = dict(self.options)
        for kind in groups.values():
            for one in fields(kind):
                if one.name != "quick":
                    given.setdefault(one.name, shared.get(one.name, Option()))
        return given


def _parameter(name: str, option: Option, kind: Any, default: Any) -> inspect.Parameter:
    origin, inner = get_origin(kind), get_args(kind)
    if option.read is not None or option.choices:
        kind = list[str] if isinstance(default, list | tuple) or default is REQUIRED else str
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        kind = list[inner[0]]  # type: ignore[valid-type]
    elif origin is Literal:
        kind = str
    flag = f"--{option.flag or name.replace('_', '-')}"
    numbers: dict[str, Any] = {"min": option.least, "max": option.most}
    if origin in (Union, UnionType) and not any(one in (int, float) for one in inner):
        numbers = {}
    made = typer.Option(flag, help=option.help, **{key: value for key, value in numbers.items() if value is not None})
    return _typed(name, Annotated[kind, made], list(default) if isinstance(default, tuple) else default)


def _typed(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _read(name: str, option: Option, value: Any) -> Any:
    """Return the value of a parameter. Raises ConfigError for a value that is no choice."""
    if option.choices:
        named = list(value) if isinstance(value, list) else [value]
        if unknown := sorted(set(named) - set(option.choices)):
            what = (option.flag or name).replace("-", " ")
            raise ConfigError(f"no {what} {unknown[0]!r}; there are {', '.join(option.choices)}")
        value = [one for one in option.choices if one in named] if isinstance(value, list) else value
    return value if option.read is None else option.read(value)


def _limited(value: Any, most: Any) -> Any:
    """Return the value that a quick look takes."""
    if isinstance(value, list) and isinstance(most, int):
        return sorted(value)[:most]
    if isinstance(value, int | float) and isinstance(most, int | float):
        return min(value, most)
    return most
