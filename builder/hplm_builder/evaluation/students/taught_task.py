"""The teacher of a task and a seed. All rows learn from the same teacher, so it is trained once and kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hplm.adapters.tenant import Head
from hplm.errors import DataError
from hplm.reporting.progress import Report
from hplm.tasks.examples import LabelledText
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.ensemble import answers_of
from hplm_builder.students.teacher import Candidate, Taught, best_teacher
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.judging import scores_of
from hplm_builder.tenants.prepared import Prepared


@dataclass(frozen=True)
class TaughtTask:
    """The states and soft labels that the best teacher gives a task's texts.

    `test_states` `[n, Ht]` are of the test texts, which students do not see.
    """

    taught: Taught
    test_states: Tensor

    def test_scores(self, data: LabelledData, test: Sequence[Prepared]) -> dict[str, float]:
        """Return the teacher's scores on test, by name."""
        return scores_of(data, test, answers_of(self.test_states, self.taught.head, data, [*test]))


def teach(
    candidates: Sequence[Candidate],
    data: LabelledData,
    settings: TrainSettings,
    report: Callable[[Candidate], Report],
) -> TaughtTask:
    """Train the candidates, and return what the best one on dev says. Raises ConfigError if all diverge."""
    unlabelled = len(data.unlabelled)
    # The teacher reads the test texts as further texts without labels.
    texts = [LabelledText(example.text, pair=example.pair) for example in data.test]
    taught = best_teacher(candidates, replace(data, unlabelled=[*data.unlabelled, *texts]), settings, report)
    states, outputs = dict(taught.states), dict(taught.outputs)
    of_both = states.pop("unlabelled")
    outputs["unlabelled"] = outputs["unlabelled"][:unlabelled]
    states["unlabelled"] = of_both[:unlabelled]
    return TaughtTask(replace(taught, states=states, outputs=outputs), of_both[unlabelled:])


def save(task: TaughtTask, path: Path) -> None:
    """Write a teacher to a file atomically."""
    taught = task.taught
    values = {
        "states": taught.states,
        "outputs": taught.outputs,
        "head": {name: torch.from_numpy(array) for name, array in taught.head.arrays.items()},
        "about": taught.about,
        "test_states": task.test_states,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(values, partial)
    partial.replace(path)


def load(path: Path) -> TaughtTask:
    """Read a teacher from its file. Raises DataError if the file is damaged."""
    try:
        values = torch.load(path, weights_only=True)
        head = {name: array.numpy() for name, array in values["head"].items()}
        taught = Taught(values["states"], values["outputs"], Head(*head.values()), values["about"])
        return TaughtTask(taught, values["test_states"])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a teacher ({error!r}): remove the file") from None
