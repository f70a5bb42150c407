"""Fleets of fine-tuned tenants as in HMI: larger tasks have more tenants, each on a bootstrap sample (equations 4, 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.adapters import bank_file
from hplm.adapters.tenant import Tenant
from hplm.core.names import check_name
from hplm.core.settings import REDUCTION_FACTOR
from hplm.engine.open_domain import Domain
from hplm.errors import ConfigError, DataError, TenantNameError
from hplm.models.base import Base
from hplm.reporting.progress import Report
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.prepared import prepare_all
from hplm_builder.tenants.tenant_build import tune
from hplm_builder.tenants.trained_layers import trained_layers

# Examples of dev and of test that tenants are scored on. All tenants of a task share them, so that scores can be compared.
MOST_JUDGED = 500
DATA = "data_sha256"  # the key of a task's checksum in `FineTunedFleet.about`


@dataclass(frozen=True)
class FleetTask:
    """A task with `tenants` tenants called NAME-00000 and so on, each trained on a sample of `samples` examples."""

    name: str
    data: LabelledData
    tenants: int
    samples: int


@dataclass(frozen=True)
class FineTunedFleet:
    """The tenants to fine-tune: the tasks, with how many tenants each, and the settings of training."""

    tasks: tuple[FleetTask, ...]
    settings: TrainSettings

    @classmethod
    def read(cls, folders: Sequence[Path], count: int, most_samples: int, settings: TrainSettings) -> FineTunedFleet:
        """Read the tasks in `folders` and divide `count` tenants among them. Tenants are named after the folders.

        A sample is as large as the task's train data (equation 5), or at most `most_samples` if that is not 0.
        Raises DataError, TenantNameError or ConfigError.
        """
        names = [folder.resolve().name.lower() for folder in folders]
        for folder, name in zip(folders, names, strict=True):
            try:
                check_name(f"{name}-00000")
            except TenantNameError as error:
                raise TenantNameError(
                    f"{folder}: tenants cannot be named after this folder ({name}-00000): {error}"
                ) from None
        named_data = [(name, read_folder(folder)) for name, folder in zip(names, folders, strict=True)]
        if len({name for name, _ in named_data}) < len(named_data):
            raise DataError(
                "two of the tasks' folders have the same name: rename one, because tenants are named after them"
            )
        sizes = [len(data.train) for _, data in named_data]
        tasks = (
            FleetTask(name, data, tenants, min(size, most_samples or size))
            for (name, data), size, tenants in zip(named_data, sizes, proportional_counts(sizes, count), strict=True)
        )
        return cls(tuple(tasks), settings)

    @property
    def about(self) -> dict[str, Any]:
        """The properties that tell one fleet from another, in JSON values."""
        tasks = [
            {"name": task.name, "tenants": task.tenants, "samples": task.samples, DATA: task.data.sha256}
            | ({"word_window": window} if (window := task_named(task.data.task).new_word_window) > 1 else {})
            for task in self.tasks
        ]
        settings = {**asdict(self.settings), "learning_rates": [*self.settings.learning_rates]}
        if self.settings.reduction_factor == REDUCTION_FACTOR:
            del settings["reduction_factor"]  # fleets from before there was a choice do not name it
        return {"tasks": tasks, "settings": settings}


def proportional_counts(sizes: Sequence[int], count: int) -> list[int]:
    """Divide `count` tenants among tasks in proportion to their `sizes`, at least one each (equation 4).

    Raises ConfigError for fewer tenants than tasks.
    """
    if count < len(sizes):
        raise ConfigError(f"{count} tenants for {len(sizes)} tasks: each task needs at least one tenant")
    shares = np.array(sizes) * count / sum(sizes)
    tenants = np.maximum(1, shares.astype(np.int64))
    while missing := count - tenants.sum():
        behind = shares - tenants
        if missing > 0:
            tenants[behind.argmax()] += 1
        else:
            tenants[np.where(tenants > 1, behind, np.inf).argmin()] -= 1
    return tenants.tolist()


def fine_tune_fleet(store: Store, base: Base, lookup: Domain, bank: str, fleet: FineTunedFleet, report: Report) -> int:
    """Write a bank of fine-tuned tenants `TASK-00000`, ... and return how many. Each takes as long as any fine-tuning."""
    done, total = 0, sum(task.tenants for task in fleet.tasks)
    encoder, settings = base.load_text_encoder(), fleet.settings
    upper, featurise, _ = trained_layers(base, lookup)

    def members() -> Iterator[Tenant]:
        nonlocal done
        for task in fleet.tasks:
            data, draws = _drawn(task, np.random.default_rng((settings.seed, done)))
            train, dev, test = prepare_all(data, encoder, featurise, report)
            for number, drawn in enumerate(draws):
                report("tenants", done / total)
                sample = [train[i] for i in drawn], dev, test
                tenant, _ = tune(base, upper, f"{task.name}-{number:05d}", data, sample, settings)
                yield tenant
                done += 1
        report("tenants", 1.0)

    return bank_file.write(store.bank(bank), base.fingerprint, members())


def _drawn(task: FleetTask, rng: np.random.Generator) -> tuple[LabelledData, npt.NDArray[np.int64]]:
    """Return the task with the drawn train examples only, and the positions of each tenant's: `[tenants, samples]`.

    A class that a tenant did not draw stays one of its labels.
    """
    data = task.data
    drawn = rng.integers(0, len(data.train), (task.tenants, task.samples))
    used, places = np.unique(drawn, return_inverse=True)
    dev, test = (
        [part[i] for i in rng.permutation(len(part))[:MOST_JUDGED]] if len(part) > MOST_JUDGED else part
        for part in (data.dev, data.test)
    )
    return replace(data, train=[data.train[i] for i in used], dev=dev, test=test), places.reshape(drawn.shape)
