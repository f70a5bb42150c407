"""Tasks by name: those of hplm, and third parties' through the entry point group `hplm.tasks`."""

from __future__ import annotations

import reprlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from hplm.errors import ConfigError
from hplm.tasks.classification import Classification
from hplm.tasks.regression import Regression
from hplm.tasks.tagging import Tagging
from hplm.tasks.task import Task

GROUP = "hplm.tasks"
# In the order in which data that name no task are tried: whole numbers may be classes, so classification comes last.
TASKS: dict[str, Task] = {task.name: task for task in (Tagging(), Regression(), Classification())}


def task_names() -> list[str]:
    """Return the names of all tasks there are."""
    return sorted({*TASKS, *_plug_ins()})


@cache
def task_named(name: str) -> Task:
    """Return a task. Raises ConfigError, which lists the tasks there are, or says why a third party's cannot be used."""
    if name in TASKS:
        return TASKS[name]
    if (point := _plug_ins().get(name)) is None:
        raise ConfigError(f"there is no task {reprlib.repr(name)}; there are {', '.join(task_names())}")
    try:
        task = point.load()()
    except Exception as error:
        raise ConfigError(f"task {name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task) or task.name != name:
        raise ConfigError(f"task {name!r} ({point.value}) must be a class of hplm.tasks.task.Task with that name")
    return task


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
