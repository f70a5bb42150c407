"""The metrics of students, for the stages that compute them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hplm.serving.encode_stage import EngineStage
from hplm.triton.bridge.metrics import MetricFamily
from hplm.triton.stages.stage_model import Counters, Gauges


def student_counters(stage: EngineStage[Any, Any, Any]) -> Counters:
    """Return the counters of a stage: answers by the number of students, and how often the cap fell and rose."""
    answers = MetricFamily("hplm_students_answers_total", "Answers by the number of students", "students")
    changes = MetricFamily("hplm_students_cap_changes_total", "How often the cap on students changed", "direction")
    return {
        answers: lambda: stage.answered_by,
        changes: lambda: Counter(fewer=stage.students.falls, more=stage.students.rises),
    }


def student_gauges(stage: EngineStage[Any, Any, Any]) -> Gauges:
    """Return the gauge of a stage: the cap, as soon as a tenant with students was served."""
    cap = MetricFamily("hplm_students_cap", "The most students that answer a text now", "")
    return {cap: lambda: {"": stage.students.cap} if stage.students.most > 1 else {}}
