"""Algorithm 1: students are trained one after another, each on the residual of the students before it.

The first student learns the teacher's representation on all texts. Each next student begins as a copy of the last one. It
minimises eq. 2, so that it corrects what the ensemble so far lacks, and eq. 3, so that its layer ceil(N/2) imitates the
ensemble so far (virtual stacking). Students are added as long as the residual on dev falls.

Representations are compared in the teacher's space. If students are of another width than the teacher, or if the teacher stands
over another base than the one that the trunk was made of, one linear map takes their representations there. The map is trained
with the first student. All losses are divided by the variance of the teacher's
representations, so that a residual of 1 is that of a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hplm.engine.encode import pool
from hplm.models.device import CPU, computing_in
from hplm.tasks.task import Task
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.descent import Descent
from hplm_builder.students.ensemble import Ensemble, pooled_states
from hplm_builder.students.student_bodies import StudentBody
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.prepared import Prepared

# The weight of squares in the ridge regression that the map begins from, as a share of the mean variance.
RIDGE = 1e-2


@dataclass(frozen=True)
class Texts:
    """Texts with the trunk's features, and the teacher's representations `[n, Ht]` of them."""

    examples: list[Prepared]
    taught: Tensor


@dataclass(frozen=True)
class Stage:
    """The ensemble after a student: the student, its multiplier, and the shares of variance that the ensemble lacks.

    `curve` has a row for each epoch, see `Descent.run`; `dev` there is the residual on dev with its sign turned.
    """

    body: StudentBody
    alpha: float
    train_residual: float
    dev_residual: float
    curve: list[dict[str, float]]

    @property
    def row(self) -> dict[str, Any]:
        """The numbers of the stage, in JSON values."""
        return {
            "alpha": self.alpha,
            "train_residual": self.train_residual,
            "dev_residual": self.dev_residual,
            "epochs": len(self.curve) - 1,
        }


class Map(nn.Module):
    """Takes students' representations to the teacher's space; the identity if they are of that space."""

    def __init__(self, width: int, teacher_width: int, *, is_same_space: bool) -> None:
        super().__init__()
        self.linear = None if is_same_space and width == teacher_width else nn.Linear(width, teacher_width)

    def forward(self, states: Tensor) -> Tensor:
        return states if self.linear is None else self.linear(states)

    def directions(self, states: Tensor) -> Tensor:
        """Map differences of representations, without the map's bias."""
        return states if self.linear is None else states @ self.linear.weight.T

    def fit(self, states: Tensor, taught: Tensor) -> None:
        """Set the map to the ridge regression of `taught` `[n, Ht]` on `states` `[n, H]`."""
        if self.linear is None:
            return
        centred, aim = states - states.mean(0), taught - taught.mean(0)
        squares = centred.T @ centred
        squares.diagonal().add_(RIDGE * squares.diagonal().mean() + 1e-12)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linalg.solve(squares, centred.T @ aim).T)
            self.linear.bias.copy_(taught.mean(0) - self.linear.weight @ states.mean(0))


# The multiplier of a copied student, as a share of the multiplier that makes the student as large as the residual. A copy says
# nothing of the residual: a larger multiplier would have to be unlearned first, and with 0 there is no gradient.
FIRST_ALPHA = 0.1
# Loads what was kept of the student with a number, and keeps a student's state under its number, see `train_students`.
Load = Callable[[int], "dict[str, Any] | None"]
Keep = Callable[[int, "dict[str, Any]"], None]


def nothing_kept(number: int) -> dict[str, Any] | None:
    """Return None: no student was trained before."""
    return None


def keep_nothing(number: int, state: dict[str, Any]) -> None:
    """Keep no student: a training that is not meant to be interrupted."""


def train_students(
    make_body: Callable[[], StudentBody],
    width: int,
    data: LabelledData,
    learn: Texts,
    dev: Texts,
    settings: StudentSettings,
    tick: Callable[[int], None] = lambda tokens: None,
    begin: Callable[[int], None] = lambda number: None,
    load: Load = nothing_kept,
    keep: Keep = keep_nothing,
    *,
    is_same_space: bool = True,
) -> tuple[Ensemble, Map, list[Stage]]:
    """Train students until the residual on dev no longer falls; the last student, which did not lower it, is dropped.

    `learn` are all texts to learn from. `begin` is called with the number of each student, from 0. `keep` gets the state of
    each trained student, and `load` returns it when an interrupted training goes on. With `is_same_space` students of the
    teacher's width need no map. Raises ConfigError if a student diverges, and what `tick` and `begin` raise.
    """
    map_ = Map(width, learn.taught.shape[1], is_same_space=is_same_space)
    run = _Stacking(make_body, map_, width, data, learn, dev, settings, tick)
    stages: list[Stage] = []
    for number in range(settings.most_students):
        begin(number)
        state = load(number)
        stage = run.train_next(stages) if state is None else run.restore(stages, state)
        if state is None:
            keep(number, run.state_of(stage))
        # Bagging adds students without a limit; a comparison must have as many as boosting may have.
        if settings.boosting and stages and not stage.dev_residual < stages[-1].dev_residual:
            break
        stages.append(stage)
        run.take(stage)
    bodies, alphas = [stage.body for stage in stages], [stage.alpha for stage in stages]
    return Ensemble(bodies, alphas, averages=not settings.boosting), run.map, stages


def best_multiplier(residual: Tensor, direction: Tensor) -> float:
    """Return the multiplier of `direction` `[n, Ht]` that leaves least of `residual`: the line search of section 3.1.

    It has a closed form, because the remaining residual is linear in the multiplier.
    """
    return float((residual * direction).sum() / direction.square().sum().clamp(min=1e-12))


class _Stacking:
    """The ensemble so far: the sums of its students' representations, of texts to learn from and of dev texts."""

    def __init__(
        self,
        make_body: Callable[[], StudentBody],
        map_: Map,
        width: int,
        data: LabelledData,
        learn: Texts,
        dev: Texts,
        settings: StudentSettings,
        tick: Callable[[int], None],
    ) -> None:
        self.map = map_
        self._make_body, self._data, self._settings, self._tick = make_body, data, settings, tick
        self._learn, self._dev = learn, dev
        self._task: Task = task_named(data.task)
        centred = learn.taught - learn.taught.mean(0)
        self._variance = max(float(centred.square().sum(1).mean()), 1e-12)
        self._sums = [torch.zeros(len(texts.examples), width) for texts in (learn, dev)]
        self._last: tuple[Tensor, Tensor] | None = None

    def train_next(self, stages: Sequence[Stage]) -> Stage:
        """Train the next student."""
        settings, number = self._settings, len(stages)
        torch.manual_seed(settings.seed + number)
        rng = np.random.default_rng([settings.seed, number])
        boosts = bool(stages) and settings.boosting
        body = stages[-1].body.next_student() if boosts else self._make_body()
        residual = self._residual(0) if boosts else self._learn.taught
        trained, alphas = nn.ModuleList([body]), []
        alpha = torch.tensor(1.0)
        if boosts:
            assert self._last is not None
            ratio = float(residual.norm() / self.map.directions(self._last[0]).norm().clamp(min=1e-6))
            alpha = nn.Parameter(torch.tensor(FIRST_ALPHA * max(ratio, 1e-3)))
            alphas.append(alpha)
            trained.register_parameter("alpha", alpha)
        elif number == 0 and self.map.linear is not None:
            self.map.fit(self._states_of(body, 0), self._learn.taught)
            trained.append(self.map)
        chosen = self._choose(residual, number, rng)
        stacked = self.map(self._sums[0]).detach()
        examples = [
            replace(self._learn.examples[i], targets=torch.stack([residual[i], stacked[i]])[None]) for i in chosen
        ]
        weight = settings.stacking_weight if boosts else 0.0

        def loss(batch: list[Prepared]) -> Tensor:
            middle, last = self._pooled(body, batch)
            aims = torch.cat([example.targets for example in batch])
            # The map's bias belongs to the first student, or else to each averaged one.
            predicted = alpha * self.map.directions(last) if boosts else self.map(last)
            total = (aims[:, 0] - predicted).square()
            if weight:
                total = total + weight * (aims[:, 1] - self.map(middle)).square()
            return 0.5 * total.sum(1).mean() / self._variance

        aim = self._residual(1) if boosts else self._dev.taught

        def judge() -> tuple[float, ...]:
            with torch.no_grad():
                states = self._states_of(body, 1)
                if not boosts:
                    return (-self._share(aim - self.map(states)),)
                # With its best multiplier, because the multiplier is chosen anew after the training.
                direction = self.map.directions(states)
                return (-self._share(aim - best_multiplier(aim, direction) * direction),)

        descent = Descent(
            *(settings.epochs, settings.student_rate, settings.batch_examples, settings.weight_decay),
            *(settings.patience, settings.seed + number),
        )
        curve = descent.run(f"student {number + 1}", trained, alphas, examples, loss, judge, self._tick)
        return self._finish(body, curve, number, None)

    def restore(self, stages: Sequence[Stage], state: dict[str, Any]) -> Stage:
        """Return the next student from its state, as `state_of` gave it."""
        body = stages[-1].body.next_student() if stages and self._settings.boosting else self._make_body()
        body.load_state_dict(state["body"])
        self.map.load_state_dict(state["map"])
        return self._finish(body, state["curve"], len(stages), state["alpha"])

    def state_of(self, stage: Stage) -> dict[str, Any]:
        """Return what `restore` needs, of tensors and plain values."""
        return {
            "body": stage.body.state_dict(),
            "map": self.map.state_dict(),
            "alpha": stage.alpha,
            "curve": stage.curve,
        }

    def take(self, stage: Stage) -> None:
        """Add the stage's student to the ensemble so far."""
        assert self._last is not None
        self.map.requires_grad_(False)
        for sums, states in zip(self._sums, self._last, strict=True):
            sums += stage.alpha * states

    def _finish(self, body: StudentBody, curve: list[dict[str, float]], number: int, alpha: float | None) -> Stage:
        """Compute the representations of a trained student, its multiplier by line search, and the residuals with it.

        `number` students stand before it. A multiplier that is given is kept.
        """
        body.requires_grad_(False)
        self._last = self._states_of(body, 0), self._states_of(body, 1)
        if alpha is None:
            alpha = 1.0
            if number and self._settings.boosting:
                alpha = best_multiplier(self._residual(0), self.map.directions(self._last[0]).detach())
        parts = 1 if self._settings.boosting else number + 1
        with torch.no_grad():
            left = [
                self._share(texts.taught - self.map((sums + alpha * states) / parts))
                for texts, sums, states in zip((self._learn, self._dev), self._sums, self._last, strict=True)
            ]
        return Stage(body, alpha, left[0], left[1], curve)

    def _choose(self, residual: Tensor, number: int, rng: np.random.Generator) -> list[int]:
        """Return the numbers of the texts that a student learns from: all for the first one.

        Later: those with the largest residuals, and others at random. With bagging: as many as there are, drawn with
        replacement.
        """
        count = len(residual)
        if not self._settings.boosting:
            return [int(i) for i in rng.integers(0, count, count)] if number else [*range(count)]
        if number == 0:
            return [*range(count)]
        order = np.argsort(-residual.square().sum(1).numpy(), kind="stable")
        hard = math.ceil(self._settings.hard_share * count)
        more = min(math.ceil(self._settings.random_share * count), count - hard)
        return [int(i) for i in (*order[:hard], *rng.choice(order[hard:], more, replace=False))]

    def _pooled(self, body: StudentBody, batch: list[Prepared]) -> tuple[Tensor, Tensor]:
        """Compute what a head reads of the middle and of the last layer, `[n, H]` each."""
        lengths = [len(example.tokens) for example in batch]
        features = torch.cat([example.features for example in batch])
        with computing_in(*fastest_format(CPU)):
            states = body.middle_and_last(features, lengths)
        middle, last = (
            torch.cat([pool(self._task, self._settings.pooling, part) for part in each.float().split(lengths)])
            for each in states
        )
        return middle, last

    def _states_of(self, body: StudentBody, place: int) -> Tensor:
        """Return a student's representations of the texts to learn from (place 0) or of dev (place 1)."""
        texts = (self._learn, self._dev)[place]
        return pooled_states(body, self._data, texts.examples, self._settings.pooling, self._tick)

    def _residual(self, place: int) -> Tensor:
        """Return what the ensemble so far lacks, `[n, Ht]`."""
        texts = (self._learn, self._dev)[place]
        return (texts.taught - self.map(self._sums[place])).detach()

    def _share(self, residual: Tensor) -> float:
        """Return the mean square of a residual as a share of the variance of the teacher's representations."""
        return float(residual.square().sum(1).mean()) / self._variance
