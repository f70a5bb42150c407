"""One run of a row: the students of a task and a seed are trained by Algorithms 1 and 2, and each prefix is scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import Domain, OpenDomain
from hplm.engine.token_domain import TokenDomain
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.models.layers import UpperLayers
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.run_store import RunResult
from hplm_builder.evaluation.search.served_domain import OVERLAY_WINDOWS
from hplm_builder.evaluation.students.taught_task import TaughtTask
from hplm_builder.students.joint_prefixes import Pruned, head_over_students, train_prefixes
from hplm_builder.students.stacking import Stage, Texts, train_students
from hplm_builder.students.student_bodies import StudentBody
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.tenants.prepared import Prepared, prepare
from hplm_builder.tenants.trained_layers import trained_layers


def computed_domain(base: Base) -> Domain:
    """Return a domain without tables: what serving gives for text that no table has."""
    if base.config.is_whole:
        return TokenDomain(base.config)
    lower = load_lower(base)
    dtype = choose_dtype("auto", CPU)
    return OpenDomain(lower.config, [], [], lower, overlay_windows=OVERLAY_WINDOWS, dtype=dtype)


@dataclass(frozen=True)
class PreparedTask:
    """The layers of a base in which students are trained, and the features of a task's parts over it.

    `like` are the bases whose representations are of the students' space: the base, and the base that a trunk was made from.
    """

    like: tuple[str | None, ...]
    upper: UpperLayers
    train: list[Prepared]
    dev: list[Prepared]
    test: list[Prepared]
    unlabelled: list[Prepared]

    @classmethod
    def of(cls, base: Base, data: LabelledData) -> PreparedTask:
        """Compute the features. Raises DataError as `prepare` does."""
        upper, featurise, _ = trained_layers(base, computed_domain(base), all_train=True)
        encoder = base.load_text_encoder()
        parts = [prepare(part, data, encoder, featurise) for part in (*data.labelled.values(), data.unlabelled)]
        return cls((base.config.name, base.trunk_of), upper, *parts)

    @property
    def learn(self) -> list[Prepared]:
        """All texts to learn from."""
        return [*self.train, *self.unlabelled]


def run_row(
    make_body: Callable[[], StudentBody],
    data: LabelledData,
    prepared: PreparedTask,
    task: TaughtTask,
    settings: StudentSettings,
    report: Callable[[str], None],
) -> RunResult:
    """Train the students of a row and score them. `make_body` and `settings` are the row's.

    Raises ConfigError if the training diverges.

    `more` of the result has the scores of each prefix, those of the teacher, and the residuals after each student.
    """
    start_s = time.monotonic()
    taught, kind = task.taught, task_named(data.task)
    learn = Texts(prepared.learn, _joined(taught.states))
    dev = Texts(prepared.dev, taught.states["dev"])
    hidden = prepared.upper.config.hidden_size
    ensemble, map_, stages = train_students(
        make_body,
        hidden,
        data,
        learn,
        dev,
        settings,
        begin=lambda number: report(f"student {number + 1}"),
        is_same_space=taught.about["base"] in prepared.like,
    )
    report("all prefixes")
    soft = _joined(taught.outputs)
    labelled = [replace(one, targets=target[None]) for one, target in zip(learn.examples, soft, strict=True)]
    pruned = train_prefixes(
        ensemble,
        head_over_students(taught.head, map_),
        data,
        labelled,
        prepared.dev,
        prepared.test,
        settings,
        kind.scale([example.source for example in prepared.train]),
    )
    return _result(pruned, stages, kind.metric, task.test_scores(data, prepared.test), taught.about, start_s)


def _joined(parts: dict[str, Tensor]) -> Tensor:
    """Return the rows of the texts to learn from, in the order of `PreparedTask.learn`."""
    return torch.cat([parts["train"], parts["unlabelled"]])


def _result(
    pruned: Pruned,
    stages: Sequence[Stage],
    metric: str,
    teacher: dict[str, float],
    about: dict[str, Any],
    start_s: float,
) -> RunResult:
    best = pruned.scores[pruned.best - 1]
    return RunResult(
        dev=best[f"dev_{metric}"],
        test=best[f"test_{metric}"],
        scores=best,
        epochs=len(pruned.curve) - 1,
        seconds=time.monotonic() - start_s,
        more={
            "best": pruned.best,
            "prefixes": [{key: scores[f"{key}_{metric}"] for key in ("dev", "test")} for scores in pruned.scores],
            "teacher": {**about, "test": teacher[metric]},
            "students": [stage.row for stage in stages],
        },
    )


def most_training(settings: StudentSettings, train_examples: int) -> float:
    """Return for how many examples, at most, one student is trained and trains back: the measure of a run's time."""
    later = (settings.most_students - 1) * settings.texts_share
    if not settings.boosting:
        later = settings.most_students - 1
    return train_examples * (settings.epochs * (1 + later) + settings.pruning_epochs * settings.most_students)
