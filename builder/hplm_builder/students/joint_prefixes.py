"""Algorithm 2: all prefixes of the students are trained together, through one classifier, on the teacher's soft labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.tenant import Head
from hplm.engine.encode import pool
from hplm.models.device import CPU, computing_in
from hplm.tasks.task import Scale
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.descent import Descent
from hplm_builder.students.ensemble import Ensemble, answers_of, pooled_states
from hplm_builder.students.stacking import Map
from hplm_builder.students.student_bodies import OwnStudent
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.finetune import TaskHead
from hplm_builder.tenants.judging import dev_score_of, scores_of
from hplm_builder.tenants.prepared import Prepared


@dataclass(frozen=True)
class Pruned:
    """Trained students with one classifier. `scores` has a dictionary of scores for each prefix, by part and name.

    `best` is the number of students of the best prefix on dev. `dev` has the dev score of each prefix, with its chance.
    """

    ensemble: Ensemble
    head: Head
    scores: list[dict[str, float]]
    dev: list[DevScore]
    best: int
    curve: list[dict[str, float]]


def head_over_students(teacher: Head, map_: Map) -> Head:
    """Return the teacher's head over the students' representations, through the map."""
    if map_.linear is None:
        return teacher
    weight, bias = (part.detach().numpy() for part in (map_.linear.weight, map_.linear.bias))
    return Head(teacher.weight @ weight, teacher.bias + teacher.weight @ bias)


def train_prefixes(
    ensemble: Ensemble,
    start: Head,
    data: LabelledData,
    learn: list[Prepared],
    dev: list[Prepared],
    test: list[Prepared],
    settings: StudentSettings,
    scale: Scale,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Pruned:
    """Train the students and the classifier, which begins as `start`, and score each prefix on dev and test.

    The targets of `learn` are soft labels. The epoch with the best mean dev score of all prefixes is kept; the untrained
    students are epoch 0. Raises ConfigError if the training diverges, and what `tick` raises.
    """
    task = task_named(data.task)
    head = TaskHead(start.weight.shape[1], data)
    head.go_on_from(start, scale)
    model = nn.ModuleDict({"ensemble": ensemble.requires_grad_(True), "head": head})
    count = len(ensemble.students)
    # Without pruning, only the prefix of all students is trained and judged.
    trained = slice(0, count) if settings.joint_prefixes else slice(count - 1, count)

    def loss(batch: list[Prepared]) -> Tensor:
        lengths = [len(example.tokens) for example in batch]
        features = torch.cat([example.features for example in batch])
        states = []
        for student in ensemble.students:
            with computing_in(*fastest_format(CPU)):
                hidden = student(features, lengths)
            states.append(torch.cat([pool(task, settings.pooling, part) for part in hidden.float().split(lengths)]))
        prefixes = F.dropout(ensemble.prefixes(torch.stack(states))[trained], settings.dropout)
        targets = torch.cat([example.targets for example in batch])
        texts = [example.tokens for example in batch]
        # A student's computation is shared by all prefixes. So one step back has the sum of the gradients of all prefixes.
        losses = [task.loss(head(prefix), targets, texts, scale, None) for prefix in prefixes]
        return torch.stack(losses).mean()

    def states_of(examples: list[Prepared]) -> Tensor:
        with torch.no_grad():
            each = [pooled_states(body, data, examples, settings.pooling, tick) for body in ensemble.students]
            return ensemble.prefixes(torch.stack(each))

    def judge() -> tuple[float, ...]:
        served = head.to_served(scale)
        scores = [
            scores_of(data, dev, answers_of(prefix, served, data, dev))[task.metric]
            for prefix in states_of(dev)[trained]
        ]
        return (sum(scores) / len(scores),)

    descent = Descent(
        *(settings.pruning_epochs, settings.prefix_rate, settings.batch_examples, settings.weight_decay),
        *(settings.patience, settings.seed),
    )
    # Whichever students were trained in this process, a continued training drops out the same values.
    torch.manual_seed(settings.seed)
    curve = descent.run("the training of all prefixes", model, [*ensemble.later_alphas], learn, loss, judge, tick)
    ensemble.requires_grad_(False)
    for student in ensemble.students:
        if isinstance(student, OwnStudent):
            student.round_as_served()
    served = head.to_served(scale)
    scores: list[dict[str, Any]] = [{} for _ in range(count)]
    chances: list[DevScore] = []
    for part, examples in (("dev", dev), ("test", test)):
        for number, prefix in enumerate(states_of(examples)) if examples else ():
            answers = answers_of(prefix, served, data, examples)
            scores[number] |= {f"{part}_{key}": value for key, value in scores_of(data, examples, answers).items()}
            if part == "dev":
                chances.append(dev_score_of(data, examples, answers))
    values = [chance.value for chance in chances]
    # The shortest of equally good prefixes. Without pruning there is no choice.
    best = 1 + values.index(max(values)) if settings.joint_prefixes else count
    return Pruned(ensemble, served, scores, chances, best, curve)
