"""The tasks that an evaluation is over."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hplm.errors import ConfigError, DataError
from hplm_builder.data.data_warnings import uninformative_test_data
from hplm_builder.data.labelled import LabelledData, LabelledText
from hplm_builder.data.labelled_files import read_folder, with_unlabelled
from hplm_builder.data.splits import stratified_sample
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.tenants.scores import METRICS


@dataclass(frozen=True)
class EvalTask:
    """A task by the name of its folder, all of it."""

    name: str
    data: LabelledData

    @property
    def metric(self) -> str:
        """What it is judged by: a key of its scores."""
        return METRICS[self.data.task]

    @cached_property
    def digest(self) -> str:
        """16 hex digits over all examples."""
        digest = hashlib.sha256(repr(self.data.labels).encode())
        for part in (self.data.train, self.data.dev, self.data.test):
            digest.update(b"part")
            for example in part:
                digest.update(repr(example).encode())
        return digest.hexdigest()[:16]

    def sample(self, budget: Budget, seed: int, *, unlabelled: bool = False) -> LabelledData:
        """As much of it as a budget takes. A part that fits is the very same list; another is drawn by `seed`.

        Test examples are the same for every seed. The labels stay those of the whole task. With `unlabelled`, as many texts
        as train examples, if there are, of what the budget leaves of the train part. Raises DataError where that is none.
        """
        data = self.data
        taken = replace(
            data,
            train=_drawn(data.train, budget.most_train, seed),
            dev=_drawn(data.dev, budget.most_dev, seed),
            test=_drawn(data.test, budget.most_test, 0),
        )
        if not unlabelled:
            return taken
        try:
            rest = with_unlabelled(taken, [LabelledText(one.text, pair=one.pair) for one in data.train]).unlabelled
        except DataError:
            raise DataError(
                f"{self.name}: the budget takes all train examples, no text is left without a label: give --examples"
            ) from None
        chosen = np.random.default_rng(seed).permutation(len(rest))[: len(taken.train)]
        return replace(taken, unlabelled=[rest[i] for i in sorted(chosen)])


def _drawn(part: list[LabelledText], most: int | None, seed: int) -> list[LabelledText]:
    if most is None or len(part) <= most:
        return part
    return [part[i] for i in stratified_sample([stratum_of(example) for example in part], most, seed)]


def stratum_of(example: LabelledText) -> tuple[Any, ...]:
    """What a stratified sample keeps the shares of: classes, values in order, or which entity types a text has."""
    if example.label is None:
        return tuple(sorted({entity.label for entity in example.entities}))
    try:
        value = example.value
    except ValueError:
        value = math.nan
    # Nothing can be sorted by NaN, as a class may be called too.
    return (1, 0.0, example.label) if math.isnan(value) else (0, value, example.label)


def read_tasks(folders: Sequence[Path], root: Path | None) -> list[EvalTask]:
    """The tasks of `folders` and of every folder below `root`, in the order of their names below it.

    Raises DataError naming the folder that is at fault, ConfigError where there is nothing to read.
    """
    found = list(folders)
    if root is not None:
        if not root.is_dir():
            raise ConfigError(f"--root {root} is not a folder")
        found += sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise ConfigError("no task: give --data FOLDER, repeatable, or --root FOLDER with a folder a task")
    tasks = [_read_task(folder) for folder in found]
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two folders are called {twice[0]!r}: results go by the name")
    return tasks


def _read_task(folder: Path) -> EvalTask:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    try:
        data = read_folder(folder)
    except DataError as error:
        # Some say only what is wrong with the data: with several folders it matters whose.
        raise DataError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    if not data.test:
        raise DataError(f"{folder} has no test data: there is nothing to report")
    for words in uninformative_test_data(data):
        raise DataError(f"{folder}: {words}")
    return EvalTask(folder.resolve().name, data)
