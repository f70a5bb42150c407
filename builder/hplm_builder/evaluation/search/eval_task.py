"""The tasks of an evaluation: reading them, and sampling them within a budget."""

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
from hplm.tasks.examples import LabelledText
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_files import read_folder, with_unlabelled
from hplm_builder.data.splits import stratified_sample
from hplm_builder.evaluation.search.budget import Budget


@dataclass(frozen=True)
class EvalTask:
    """A whole task, named after its folder."""

    name: str
    data: LabelledData

    @property
    def metric(self) -> str:
        """The key of the score that the task is judged by."""
        return task_named(self.data.task).metric

    @cached_property
    def digest(self) -> str:
        """A checksum over all examples: 16 hex digits."""
        digest = hashlib.sha256(repr(self.data.labels).encode())
        for part in (self.data.train, self.data.dev, self.data.test):
            digest.update(b"part")
            for example in part:
                digest.update(repr(example).encode())
        return digest.hexdigest()[:16]

    def sample(self, budget: Budget, seed: int, *, unlabelled: bool = False) -> LabelledData:
        """Return as many examples as a budget takes. A part within the budget is the same list, another is drawn by `seed`.

        Test examples are the same for every seed. The labels stay those of the whole task. With `unlabelled`, up to as many
        other texts of the train part are added without their labels. Raises DataError if the budget leaves no such text.
        """
        data = self.data
        sampled = replace(
            data,
            train=_drawn(data.train, budget.most_train, seed),
            dev=_drawn(data.dev, budget.most_dev, seed),
            test=_drawn(data.test, budget.most_test, 0),
        )
        if not unlabelled:
            return sampled
        try:
            texts = [LabelledText(example.text, pair=example.pair) for example in data.train]
            rest = with_unlabelled(sampled, texts).unlabelled
        except DataError:
            raise DataError(
                f"{self.name}: the budget takes all train examples, so no unlabelled text remains: give --examples"
            ) from None
        chosen = np.random.default_rng(seed).permutation(len(rest))[: len(sampled.train)]
        return replace(sampled, unlabelled=[rest[i] for i in sorted(chosen)])


def _drawn(part: list[LabelledText], most: int | None, seed: int) -> list[LabelledText]:
    if most is None or len(part) <= most:
        return part
    return [part[i] for i in stratified_sample([stratum_of(example) for example in part], most, seed)]


def stratum_of(example: LabelledText) -> tuple[Any, ...]:
    """Return the stratum for sampling: the class, the value, or the entity types of the text."""
    if example.label is None:
        return tuple(sorted({entity.label for entity in example.entities}))
    try:
        value = example.value
    except ValueError:
        value = math.nan
    # NaN has no place in an order, and a class may be called `nan`.
    return (1, 0.0, example.label) if math.isnan(value) else (0, value, example.label)


def read_tasks(folders: Sequence[Path], root: Path | None) -> list[EvalTask]:
    """Read the tasks in `folders`, then in the folders inside `root` by name.

    Raises DataError that names the faulty folder, and ConfigError if there is no folder to read.
    """
    all_folders = list(folders)
    if root is not None:
        if not root.is_dir():
            raise ConfigError(f"--root {root} is not a folder")
        all_folders += sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not all_folders:
        raise ConfigError("no task: give --data FOLDER, repeatable, or --root FOLDER with one folder for each task")
    tasks = [_read_task(folder) for folder in all_folders]
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two folders are called {twice[0]!r}: rename one, because results are kept by name")
    return tasks


def _read_task(folder: Path) -> EvalTask:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    try:
        data = read_folder(folder)
    except DataError as error:
        # Some errors do not name the folder.
        raise DataError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    if not data.test:
        raise DataError(f"{folder} has no test data, which the evaluation reports on: add test.*")
    for problem in task_named(data.task).test_warnings(data.test):
        raise DataError(f"{folder}: {problem}")
    return EvalTask(folder.resolve().name, data)
