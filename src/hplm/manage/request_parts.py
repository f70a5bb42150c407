"""The parts of manage requests: sources of files, settings of trainings, checks of names and numbers.

Checks raise ConfigError, to which `hplm.core.settings.parse_settings` adds the place of the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hplm.adapters.students import Form
from hplm.adapters.tenant import Pooling
from hplm.cascade.plan import OnLate
from hplm.core.names import check_name_of
from hplm.core.settings import AdapterWidth
from hplm.errors import ConfigError

# Most students of a tenant. The paper needed at most 6; each one is a text more in every batch.
MOST_STUDENTS = 16
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Source:
    """A file to work on: the id of an `upload`, or a `path` on the server."""

    upload: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.upload is None) == (self.path is None):
            raise ConfigError("expected either an upload or a path")
        if self.upload is not None:
            check_id("upload", self.upload)
        if self.path is not None and not (0 < len(self.path) <= 1000 and self.path.isprintable()):
            raise ConfigError("a path is 1 to 1000 printable characters")


@dataclass(frozen=True)
class DataFiles:
    """A tenant's labelled files, and a file of unlabelled texts. Without `dev`, a part of `train` is split off.

    `proof` are examples that only prove a cascade's accuracy. Without `proof`, a part of dev is set aside.
    """

    train: Source
    dev: Source | None = None
    test: Source | None = None
    unlabelled: Source | None = None
    proof: Source | None = None


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a fine-tuning. A setting that is not given has the builder's default."""

    epochs: int | None = None
    learning_rates: tuple[float, ...] | None = None
    patience: int | None = None
    pooling: Pooling | None = None
    adapter_width: AdapterWidth | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        between("epochs", self.epochs, 1, 1000)
        between("patience", self.patience, 1, 1000)
        between("seed", self.seed, 0, 2**31 - 1)
        if self.learning_rates is not None and not 1 <= len(self.learning_rates) <= 8:
            raise ConfigError("learning_rates must be 1 to 8 numbers")
        for rate in self.learning_rates or ():
            between("learning_rates", rate, 1e-7, 1.0)


@dataclass(frozen=True)
class Target:
    """The target of a tenant's cascade. A value that is None stays as it is, or has its default for a new tenant.

    `accuracy` is a share of right answers, `latency_ms` the mean of requests one at a time, in milliseconds.
    """

    accuracy: float | None = None
    latency_ms: float | None = None
    deterministic: bool | None = None
    on_late: OnLate | None = None

    def __post_init__(self) -> None:
        between("accuracy", self.accuracy, 0.01, 0.9999)
        between("latency_ms", self.latency_ms, 0.01, 60_000.0)


@dataclass(frozen=True)
class StudentOptions:
    """How the students of a tenant are made. An option that is not given has the builder's default; an update keeps it.

    `form`: `shared` for adapters in the trunk's layers, `own` for layers of their own. `teacher`: `auto` for the tenant's best
    model on dev, `full` for full fine-tuning, or the name of a base whose adapter teaches. `most`: at most so many students.
    """

    form: Form | None = None
    teacher: str | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.teacher is not None:
            check_name_of("teacher", self.teacher)
        between("most", self.most, 1, MOST_STUDENTS)


@dataclass(frozen=True)
class PretrainSettings:
    """Settings of a domain's pretraining. A setting that is not given has the builder's default.

    `tokens` is the number of tokens to train on, after `warmup_tokens` that train only the head for masked words. With
    `top_percent` 0 the domain has no table. An update without `top_percent` of a domain without a table makes no table.
    """

    tokens: int | None = None
    warmup_tokens: int | None = None
    learning_rate: float | None = None
    top_percent: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        between("tokens", self.tokens, 1, 10**10)
        between("warmup_tokens", self.warmup_tokens, 1, 10**10)
        between("learning_rate", self.learning_rate, 1e-7, 1.0)
        if self.top_percent != 0:
            between("top_percent (or 0 for no table)", self.top_percent, 1e-3, 100.0)
        between("seed", self.seed, 0, 2**31 - 1)


def given(part: DataFiles | TuneSettings | PretrainSettings | Target | StudentOptions) -> dict[str, Any]:
    """Return the files or settings that the request names."""
    return {key: value for key, value in vars(part).items() if value is not None}


def check_id(key: str, value: str) -> None:
    """Raise ConfigError for a value that cannot be the id of a job or upload."""
    if not _ID.fullmatch(value):
        raise ConfigError(f"{key} must be the id that the server gave")


def between(key: str, value: float | None, least: float, most: float) -> None:
    """Raise ConfigError for a number out of range, and for NaN."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{key} must be {_plain(least)} to {_plain(most)}, got {str(value)[:40]}")


def _plain(number: float) -> str:
    """Return all digits of a number, without an exponent."""
    return f"{number:,}" if isinstance(number, int) else f"{number:.10f}".rstrip("0").rstrip(".")
