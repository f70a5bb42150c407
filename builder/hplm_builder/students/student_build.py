"""Builds the students of a tenant: runs Algorithms 1 and 2 on what a teacher says, and packs the best prefix as a tenant."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.packed import pack, to_bfloat16
from hplm.adapters.students import OwnLayers, Students, check_own_bytes, no_adapter
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.engine.open_domain import Domain
from hplm.models.base import Base
from hplm.models.device import CPU, computing_in
from hplm.models.layers import layer_weights
from hplm.reporting.progress import Report, shared_out, silent
from hplm.runtime.crash_points import crash_point
from hplm.tasks.task_loader import task_named
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.joint_prefixes import Pruned, head_over_students, train_prefixes
from hplm_builder.students.stacking import Stage, Texts, keep_nothing, nothing_kept, train_students
from hplm_builder.students.student_bodies import OwnStudent, SharedStudent, StudentBody, first_student
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.students.teacher import Taught, check_task
from hplm_builder.tenants.baselines import baseline_scores, baseline_warnings, constant_baseline
from hplm_builder.tenants.bodies import ADAPTER_AT, fastest_format
from hplm_builder.tenants.finetune import TRAINING_COST
from hplm_builder.tenants.prepared import Prepared, Room, counted, mean_tokens, prepare, sample_of
from hplm_builder.tenants.tenant_build import MEASURED_EXAMPLES
from hplm_builder.tenants.trained_layers import trained_layers

# Most seconds in which the time of a token is measured for an estimate.
MEASURED_S = 1.0


@dataclass(frozen=True)
class KeptStudents:
    """The files in `folder` from which an interrupted training continues. `run` identifies the training."""

    folder: Path
    run: dict[str, Any]

    def load(self, name: str) -> dict[str, Any] | None:
        """Return what was kept under a name; None if nothing of this training was."""
        return self._file(name).load(CPU)

    def keep(self, name: str, state: dict[str, Any]) -> None:
        """Keep tensors and plain values under a name. Raises OSError."""
        self._file(name).save(state)
        crash_point("job.trained")

    def load_student(self, number: int) -> dict[str, Any] | None:
        """Return the state of the student with this number; None if it was not kept."""
        return self.load(f"student-{number}")

    def keep_student(self, number: int, state: dict[str, Any]) -> None:
        """Keep the state of the student with this number. Raises OSError."""
        self.keep(f"student-{number}", state)

    def _file(self, name: str) -> Checkpoint:
        return Checkpoint(self.folder / f"{name}.pt", self.run)


@dataclass(frozen=True)
class Work:
    """The tokens that a training of students computes: those of the texts to learn from, of dev and of test."""

    learn: float
    dev: float
    test: float
    settings: StudentSettings

    def student(self, number: int) -> float:
        """Return the tokens of the student with this number, from 0, as predictions of a token; training costs more."""
        settings = self.settings
        share = settings.texts_share if number and settings.boosting else 1.0
        return settings.epochs * (TRAINING_COST * share * self.learn + self.dev) + self.learn + 2 * self.dev

    @property
    def prefixes(self) -> float:
        """The tokens of Algorithm 2, as predictions of a token."""
        settings = self.settings
        once = settings.pruning_epochs * (TRAINING_COST * self.learn + self.dev) + 2 * self.dev + self.test
        return settings.most_students * once

    @property
    def steps(self) -> dict[str, float]:
        """The cost of each step by name, for `shared_out`."""
        students = {student_step(number, self.settings): self.student(number) for number in self._numbers}
        return {"features": self.learn + self.dev + self.test, **students, "prefixes": self.prefixes}

    @property
    def tokens(self) -> float:
        """The tokens of all steps but the features, if no step ends early."""
        return sum(map(self.student, self._numbers)) + self.prefixes

    @property
    def _numbers(self) -> range:
        return range(self.settings.most_students)


def student_step(number: int, settings: StudentSettings) -> str:
    """Return the step in which the student with this number, from 0, is trained, in words."""
    return f"student {number + 1} of at most {settings.most_students}"


def build_students(
    base: Base,
    lookup: Domain,
    name: str,
    data: LabelledData,
    taught: Taught,
    settings: StudentSettings,
    report: Report = silent,
    kept: KeptStudents | None = None,
    *,
    example: str = "",
) -> Tenant:
    """Train students over the trunk `base` on what a teacher says; return the best prefix on dev as a tenant.

    Each finished student is `kept`. The card's `about` has `scores` of the best prefix, `examples`, `seed`, `miss`,
    `baseline_scores`, `warnings` if there are any, and `students`: `form`, `teacher`, `stages` of Algorithm 1, `prefixes` with
    the scores of every prefix, `curve`, and the settings that are not the default. Raises DataError, ConfigError, and what
    `report` raises.
    """
    check_task(data.task)
    encoder, room = base.load_text_encoder(), Room()
    upper, featurise, token_bytes = trained_layers(base, lookup, all_train=settings.form == "own")
    room.expect(data, encoder, token_bytes)
    check_form(base, settings)
    work = work_of(data, base, settings)
    report = shared_out(report, work.steps)
    tick = counted("features", sum(data.counts.values()), report)
    train, dev, test, unlabelled = (
        prepare(part, data, encoder, featurise, tick, room)
        for part in (data.train, data.dev, data.test, data.unlabelled)
    )
    learn = [*train, *unlabelled]
    step, total, done = "", 1.0, 0.0

    def begin(named: str, tokens: float) -> None:
        nonlocal step, total, done
        step, total, done = named, tokens, 0.0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(step, min(1.0, done / total))

    def learned(of: dict[str, Tensor]) -> Tensor:
        return torch.cat([of["train"], *([of["unlabelled"]] if unlabelled else [])])

    ensemble, map_, stages = train_students(
        first_student(upper, settings.form, settings.reduction_factor, ADAPTER_AT),
        base.config.hidden_size,
        data,
        Texts(learn, learned(taught.states)),
        Texts(dev, taught.states["dev"]),
        settings,
        count,
        lambda number: begin(student_step(number, settings), work.student(number)),
        nothing_kept if kept is None else kept.load_student,
        keep_nothing if kept is None else kept.keep_student,
        is_same_space=taught.about["base"] in (base.trunk_of, base.config.name),
    )
    begin("prefixes", work.prefixes)
    scale = task_named(data.task).scale([one.source for one in train])
    soft = [replace(one, targets=target[None]) for one, target in zip(learn, learned(taught.outputs), strict=True)]
    pruned = train_prefixes(
        ensemble, head_over_students(taught.head, map_), data, soft, dev, test, settings, scale, count
    )
    report("prefixes", 1.0)
    constant, best = constant_baseline(data), pruned.dev[pruned.best - 1]
    warnings = [
        *data_warnings(data, encoder),
        *baseline_warnings(data, best, constant, None, settings.student_rate),
    ]
    about = {
        "scores": pruned.scores[pruned.best - 1],
        "examples": data.counts,
        "seed": settings.seed,
        "miss": lookup.miss,
        "baseline_scores": baseline_scores(constant=constant),
        "students": _about(pruned, stages, taught, settings),
        **({"warnings": warnings} if warnings else {}),
    }
    return _tenant(base, name, data, pruned, settings, example=example, about=about)


def check_form(base: Base, settings: StudentSettings) -> None:
    """Raise ConfigError if layers of a student's own would be too large over this trunk."""
    if settings.form == "own":
        config = base.config
        check_own_bytes(config.upper_layers, config.hidden_size, config.intermediate_size)


def work_of(data: LabelledData, base: Base, settings: StudentSettings) -> Work:
    """Return the work of a training, by the mean length of some texts."""
    encoder = base.load_text_encoder()
    tokens = {
        part: len(texts) * mean_tokens(texts, encoder) if texts else 0.0
        for part, texts in (*data.labelled.items(), ("unlabelled", data.unlabelled))
    }
    return Work(tokens["train"] + tokens["unlabelled"], tokens["dev"], tokens["test"], settings)


def estimate_students(base: Base, lookup: Domain, data: LabelledData, settings: StudentSettings) -> float:
    """Return the seconds that `build_students` would take on this machine now, if no student ends early."""
    encoder = base.load_text_encoder()
    upper, featurise, token_bytes = trained_layers(base, lookup, all_train=settings.form == "own")
    Room().expect(data, encoder, token_bytes)
    body = first_student(upper, settings.form, settings.reduction_factor, ADAPTER_AT)()
    sample = sample_of(data.train, MEASURED_EXAMPLES)
    prepare(sample[:2], data, encoder, featurise)  # the first call fills caches
    begin_s = time.perf_counter()
    batch = prepare(sample, data, encoder, featurise)
    feature_s = (time.perf_counter() - begin_s) / sum(len(one.tokens) for one in batch)
    step_s = _token_s(body, batch[: settings.batch_examples])
    work = work_of(data, base, settings)
    return feature_s * work.steps["features"] + step_s * work.tokens


def _token_s(body: StudentBody, batch: list[Prepared]) -> float:
    """Return the seconds that predicting a token takes, from measured steps of training."""
    lengths = [len(one.tokens) for one in batch]
    features = torch.cat([one.features for one in batch])
    fastest, begun_s = float("inf"), time.perf_counter()
    while time.perf_counter() - begun_s < MEASURED_S:
        start_s = time.perf_counter()
        with computing_in(*fastest_format(CPU)):
            hidden = body(features, lengths)
        hidden.float().square().mean().backward()
        fastest = min(fastest, time.perf_counter() - start_s)
    return fastest / sum(lengths) / TRAINING_COST


def run_of(
    base: Base, domain_version: int, data: LabelledData, settings: StudentSettings, teacher: Any
) -> dict[str, Any]:
    """Return what identifies a training, so that kept students of another training are never taken. All JSON values."""
    texts = json.dumps([text.text_or_pair for text in data.unlabelled]).encode()
    return {
        "base": base.fingerprint,
        "domain_version": domain_version,
        "data": data.sha256,
        "unlabelled": hashlib.sha256(texts).hexdigest(),
        "settings": asdict(settings),
        "teacher": teacher,
    }


def kept_teacher(kept: KeptStudents) -> Taught | None:
    """Return what the teacher of an interrupted training said; None if nothing was kept."""
    state = kept.load("teacher")
    if state is None:
        return None
    head = Head(state["weight"].numpy(), state["bias"].numpy())
    return Taught(state["states"], state["outputs"], head, state["about"])


def keep_teacher(kept: KeptStudents, taught: Taught) -> None:
    """Keep what the teacher says. Raises OSError."""
    weight, bias = torch.tensor(taught.head.weight), torch.tensor(taught.head.bias)
    state = {"states": taught.states, "outputs": taught.outputs, "weight": weight, "bias": bias, "about": taught.about}
    kept.keep("teacher", state)


def _about(pruned: Pruned, stages: list[Stage], taught: Taught, settings: StudentSettings) -> dict[str, Any]:
    """Return what the card says about the students, in JSON values."""
    return {
        "form": settings.form,
        "count": pruned.best,
        "teacher": taught.about,
        "stages": [stage.row for stage in stages],
        "prefixes": [{"students": k, **scores} for k, scores in enumerate(pruned.scores, 1)],
        "curve": pruned.curve,
        "settings": settings.changed,
    }


def _tenant(
    base: Base,
    name: str,
    data: LabelledData,
    pruned: Pruned,
    settings: StudentSettings,
    *,
    example: str,
    about: dict[str, Any],
) -> Tenant:
    """Return the best prefix as a tenant. One student of the form `shared` is an ordinary tenant."""
    assert settings.boosting, "averaged students are for comparisons only"
    count, bodies = pruned.best, [*pruned.ensemble.students][: pruned.best]
    alphas = pruned.ensemble.alphas.detach().numpy()[:count].astype(np.float32)
    scores = tuple(score.value for score in pruned.dev[:count])
    card = TenantCard(
        name=name,
        task=data.task,
        labels=data.labels,
        base=base.fingerprint,
        pooling=settings.pooling,
        example=example,
        about=about,
        texts=data.texts,
        adapter_at=ADAPTER_AT,
        students=count,
        student_form=settings.form,
    )
    if settings.form == "own":
        students = Students(alphas, (), _own_layers(bodies), scores)
        return Tenant(card, no_adapter(base.config.hidden_size), pruned.head, students=students)
    packed = tuple(pack(body.adapters.adapter()) for body in bodies if isinstance(body, SharedStudent))
    many = None if count == 1 else Students(alphas, packed, None, scores)
    return Tenant(card, packed[0], pruned.head, students=many)


def _own_layers(bodies: list[StudentBody]) -> OwnLayers:
    """Return the layers of students of the form `own`, stacked by students and layers."""
    of_students = [[layer_weights(layer) for layer in body.layers] for body in bodies if isinstance(body, OwnStudent)]
    names = range(len(of_students[0][0]))
    return OwnLayers(
        tuple(
            to_bfloat16(torch.stack([torch.stack([layer[i] for layer in layers]) for layers in of_students]).numpy())
            for i in names
        )
    )
