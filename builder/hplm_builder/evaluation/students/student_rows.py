"""The rows of the figure of quality: students as they are served, and what each part of the training is worth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from hplm.models.layers import UpperLayers
from hplm_builder.fleet.students_repository import evenly_spaced
from hplm_builder.students.student_bodies import OwnStudent, StudentBody, first_student
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.tenants.bodies import ADAPTER_AT

# The base of a row's students: a trunk of --trunk, --one-layer or --over-ngrams, or the base that --trunk was made from.
Place = Literal["trunk", "one-layer", "over-ngrams", "parent"]


@dataclass(frozen=True)
class StudentRow:
    """A way to train students. `changed` are the settings that differ from a tenant's job.

    Students of `parent` have half of that base's layers, evenly spaced, as their own.
    """

    name: str
    text: str
    place: Place = "trunk"
    changed: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, usual: StudentSettings) -> StudentSettings:
        """Return the settings of the row's students. Raises ConfigError."""
        return replace(usual, **self.changed)

    def make_body(self, upper: UpperLayers, settings: StudentSettings) -> Callable[[], StudentBody]:
        """Return what makes fresh first students over the layers of the row's base. Raises ConfigError."""
        # Making a body changes the number format of the layers that it is given.
        upper = copy.deepcopy(upper)
        if self.place != "parent":
            return first_student(upper, settings.form, settings.reduction_factor, ADAPTER_AT)
        depth = len(upper.layers)
        half = nn.ModuleList(upper.layers[i] for i in evenly_spaced(depth, -(-depth // 2)))
        return lambda: OwnStudent(upper, half)


# How many times as wide the adapters of row one-wide are, so that one student has the parameters of this number of students.
WIDE = 4
STUDENTS = "students"
ROWS = {
    row.name: row
    for row in (
        StudentRow(STUDENTS, "adapters in a trunk of two layers, as they are served by default"),
        StudentRow("own", "each student has two layers of its own", changed={"form": "own"}),
        StudentRow("one-layer", "a trunk of one layer", "one-layer"),
        StudentRow("over-ngrams", "a trunk over the n-gram encoder", "over-ngrams"),
        StudentRow("no-stacking", "without eq. 3", changed={"stacking_weight": 0.0}),
        StudentRow("bagging", "students trained apart, and averaged", changed={"boosting": False}),
        StudentRow("no-pruning", "prefixes are not trained together", changed={"joint_prefixes": False}),
        StudentRow("one-distilled", "one student alone, distilled", changed={"most_students": 1}),
        StudentRow(
            "one-wide",
            f"one student alone with adapters {WIDE} times as wide",
            changed={"most_students": 1, "reduction_factor": StudentSettings.reduction_factor // WIDE},
        ),
        StudentRow(
            "half-depth",
            "half of the teacher's base, all of its weights distilled",
            "parent",
            {"most_students": 1, "form": "own"},
        ),
    )
}
