"""Tenants in the paper's way: of each task in proportion to its size, each on a bootstrap sample (HMI equations 4, 5)."""

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
from hplm.engine.open_domain import OpenDomain
from hplm.errors import ConfigError, DataError, TenantNameError
from hplm.models.base import Base
from hplm.reporting.progress import Report
from hplm.store.layout import Store
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.tenants.finetune import WORD_WINDOW, TrainSettings
from hplm_builder.tenants.prepared import prepare_all
from hplm_builder.tenants.tenant_build import plot_features, tune

# Dev and test are the same for every tenant of a task, so that scores compare; a seeded part of them is enough.
MOST_JUDGED = 500
DATA = "data_sha256"


@dataclass(frozen=True)
class FleetTask:
    """A task of a fleet; `name` begins the names of its `tenants` tenants, each of which has a sample of `samples` examples."""

    name: str
    data: LabelledData
    tenants: int
    samples: int


@dataclass(frozen=True)
class FineTunedFleet:
    """Tenants to fine-tune: which tasks, how many of each, how."""

    tasks: tuple[FleetTask, ...]
    settings: TrainSettings

    @classmethod
    def read(cls, folders: Sequence[Path], count: int, most_samples: int, settings: TrainSettings) -> FineTunedFleet:
        """`count` tenants over the tasks of folders, named after them.

        Equation 5: samples of one task are equally large, as its train data, or `most_samples` where that is less and not 0.
        Raises DataError, TenantNameError or ConfigError.
        """
        names = [folder.resolve().name.lower() for folder in folders]
        for folder, name in zip(folders, names, strict=True):
            try:
                check_name(f"{name}-00000")
            except TenantNameError as error:
                raise TenantNameError(f"{folder}: tenants cannot be called after it ({name}-00000): {error}") from None
        found = [(name, read_folder(folder)) for name, folder in zip(names, folders, strict=True)]
        if len({name for name, _ in found}) < len(found):
            raise DataError("two of the tasks' folders have the same name")
        sizes = [len(data.train) for _, data in found]
        tasks = (
            FleetTask(name, data, tenants, min(size, most_samples or size))
            for (name, data), size, tenants in zip(found, sizes, proportional_counts(sizes, count), strict=True)
        )
        return cls(tuple(tasks), settings)

    @property
    def about(self) -> dict[str, Any]:
        """JSON values that tell one fleet from another."""
        tasks = [
            {"name": task.name, "tenants": task.tenants, "samples": task.samples, DATA: task.data.sha256}
            | ({"word_window": WORD_WINDOW} if task.data.task == "tagging" else {})
            for task in self.tasks
        ]
        settings = {**asdict(self.settings), "learning_rates": [*self.settings.learning_rates]}
        if self.settings.reduction_factor == REDUCTION_FACTOR:
            del settings["reduction_factor"]  # fleets from before it was a choice do not say
        return {"tasks": tasks, "settings": settings}


def proportional_counts(sizes: Sequence[int], count: int) -> list[int]:
    """Equation 4: `count` tenants over tasks of `sizes` train examples, to the nearest whole, one at least.

    Raises ConfigError for fewer tenants than tasks.
    """
    if count < len(sizes):
        raise ConfigError(f"{count} tenants for {len(sizes)} tasks: each task needs one at least")
    shares = np.array(sizes) * count / sum(sizes)
    tenants = np.maximum(1, shares.astype(np.int64))
    while left := count - tenants.sum():
        behind = shares - tenants
        if left > 0:
            tenants[behind.argmax()] += 1
        else:
            tenants[np.where(tenants > 1, behind, np.inf).argmin()] -= 1
    return tenants.tolist()


def fine_tune_fleet(
    store: Store, base: Base, lookup: OpenDomain, bank: str, fleet: FineTunedFleet, report: Report
) -> int:
    """Publish a bank of fine-tuned tenants `TASK-00000`, ...; returns how many. Each takes as long as any fine-tune does."""
    done, total = 0, sum(task.tenants for task in fleet.tasks)
    encoder, settings = base.load_text_encoder(), fleet.settings

    def members() -> Iterator[Tenant]:
        nonlocal done
        for task in fleet.tasks:
            data, draws = _drawn(task, np.random.default_rng((settings.seed, done)))
            train, dev, test = prepare_all(data, encoder, plot_features(lookup), report)
            for number, drawn in enumerate(draws):
                report("tenants", done / total)
                sample = [train[i] for i in drawn], dev, test
                yield tune(base, f"{task.name}-{number:05d}", data, sample, settings)
                done += 1
        report("tenants", 1.0)

    return bank_file.write(store.bank(bank), base.fingerprint, members())


def _drawn(task: FleetTask, rng: np.random.Generator) -> tuple[LabelledData, npt.NDArray[np.int64]]:
    """The task with those train examples that some tenant has, and which of them each tenant has `[tenants, samples]`.

    A class that a tenant has not drawn stays a label that it hardly gives.
    """
    data = task.data
    drawn = rng.integers(0, len(data.train), (task.tenants, task.samples))
    used, places = np.unique(drawn, return_inverse=True)
    dev, test = (
        [part[i] for i in rng.permutation(len(part))[:MOST_JUDGED]] if len(part) > MOST_JUDGED else part
        for part in (data.dev, data.test)
    )
    return replace(data, train=[data.train[i] for i in used], dev=dev, test=test), places.reshape(drawn.shape)
