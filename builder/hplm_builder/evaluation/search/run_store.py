"""Finished runs of an evaluation: one file per run, in a folder that several processes may share."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hplm.errors import ConfigError, DataError
from hplm_builder.convert.checkpoint import checkpoints_in


@dataclass(frozen=True)
class RunKey:
    """Identifies one run: a variant trained on a task, with a seed and a learning rate."""

    task: str
    variant: str
    seed: int
    rate: float

    def __str__(self) -> str:
        return f"{self.task}, {self.variant}, seed {self.seed}, rate {self.rate:g}"

    @property
    def path(self) -> str:
        """The path of the run's file inside the folder, without its ending."""
        return f"{self.task}/{self.variant}/seed-{self.seed}-rate-{self.rate:g}"


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as it is stored. A run that diverged has no scores.

    `dev_without` are the dev scores of `DevScore.without`, which results from before there was a choice of widths lack. `more`
    holds a study's further measurements.
    """

    dev: float | None = None
    test: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    best_epoch: int = 0
    epochs: int = 0
    trained_parameters: int = 0
    seconds: float = 0.0
    dev_without: list[float] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class BusyError(Exception):
    """Another process is building what this run needs. Other runs can be done meanwhile."""


class RunStore:
    """A folder of results. The process that locks a run's lock file does the run; the system frees a killed process's locks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: RunKey, about: Mapping[str, Any]) -> RunResult | None:
        """Return a finished run, None if it is not finished.

        `about` holds everything that the result depends on, in JSON values. Raises DataError if the file is damaged, or if
        the stored run depended on something else.
        """
        path = self.folder / f"{key.path}.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            stored_about, run = stored["about"], RunResult(**stored["run"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not the result of a run ({error!r}): remove the file") from None
        wanted = json.loads(json.dumps(about))
        names = stored_about.keys() | wanted.keys()
        if different := sorted(name for name in names if stored_about.get(name) != wanted.get(name)):
            name = different[0]
            raise DataError(
                f"{path} is of a run with {name} {stored_about.get(name)!r}, here it is {wanted.get(name)!r}: "
                "give --resume another folder"
            )
        return run

    def write(self, key: RunKey, about: Mapping[str, Any], run: RunResult) -> None:
        """Store a finished run atomically. Raises ConfigError if the folder cannot be written."""
        path = self._path_in_folder(f"{key.path}.json")
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump({"about": dict(about), "run": asdict(run)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    @contextmanager
    def training(self, key: RunKey) -> Iterator[None]:
        """Keep the checkpoints of a run in this folder until the block, which does and writes the run, has ended well."""
        folder = self._path_in_folder(f"{key.path}.training")
        with checkpoints_in(folder):
            yield
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Lock `name` for this process while the context lasts; yield False if another process holds the lock.

        Raises ConfigError if the folder cannot be written.
        """
        path = self._path_in_folder(f"{name}.lock")
        try:
            # Open without emptying the file, because another process may hold it.
            file = path.open("a")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # The process id is for people who look into the folder.
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield True

    def _path_in_folder(self, name: str) -> Path:
        """Return the path of `name`, whose parent folders are made. Raises ConfigError."""
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {path.parent} cannot be made: {error.strerror}") from None
        return path
