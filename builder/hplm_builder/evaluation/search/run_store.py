"""Finished runs of an evaluation, a file each, in a folder that several processes share."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hplm.errors import ConfigError, DataError


@dataclass(frozen=True)
class RunKey:
    """One training: a variant on a task, with a seed, at a learning rate."""

    task: str
    variant: str
    seed: int
    rate: float

    def __str__(self) -> str:
        return f"{self.task}, {self.variant}, seed {self.seed}, rate {self.rate:g}"

    @property
    def path(self) -> str:
        """Where its result lies in the folder, without an ending."""
        return f"{self.task}/{self.variant}/seed-{self.seed}-rate-{self.rate:g}"


@dataclass(frozen=True)
class RunResult:
    """What came of a training. A run that diverged has no scores. `more`: what the evaluation measured besides."""

    dev: float | None = None
    test: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    best_epoch: int = 0
    epochs: int = 0
    trained_parameters: int = 0
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)


class BusyError(Exception):
    """Another process is making what this run needs: there may be other runs to do meanwhile."""


class RunStore:
    """The folder. A run belongs to the process that holds its lock file, and the system lets go of a killed one's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: RunKey, about: Mapping[str, Any]) -> RunResult | None:
        """A finished run, None where there is none yet.

        `about` holds everything that it depends on, in JSON values. Raises DataError for a file that is damaged, or where it
        was run with something else.
        """
        path = self.folder / f"{key.path}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            there, run = found["about"], RunResult(**found["run"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a result ({error!r}): remove it") from None
        wanted = json.loads(json.dumps(about))
        if odd := sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name)):
            name = odd[0]
            raise DataError(
                f"{path} is of a run with {name} {there.get(name)!r}, here it is {wanted.get(name)!r}: "
                "give --resume another folder"
            )
        return run

    def write(self, key: RunKey, about: Mapping[str, Any], run: RunResult) -> None:
        """Keep a finished run, all of it or nothing. Raises ConfigError where the folder cannot be written."""
        path = self._made(f"{key.path}.json")
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
    def claim(self, name: str) -> Iterator[bool]:
        """Whether what is called `name` is this process's to do, while the context lasts.

        Raises ConfigError where the folder cannot be written.
        """
        path = self._made(f"{name}.lock")
        try:
            # Not emptied yet: it may be another's.
            file = path.open("a")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # For whoever wonders who is at it.
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield True

    def _made(self, name: str) -> Path:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path.parent} cannot be made: {error.strerror}") from None
        return path
