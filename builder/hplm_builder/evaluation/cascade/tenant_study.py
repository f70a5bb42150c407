"""All figures of one tenant's cascade, from what its levels answer to test texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hplm.cascade.calibration import measure_calibration
from hplm.cascade.candidates import MOST_P75, Candidate, find_candidates
from hplm.cascade.level_outputs import CascadeOutputs
from hplm.cascade.plan import CascadePlan
from hplm.cascade.promise import proved_accuracy
from hplm.cascade.selection import MOST_BELOW_BEST, CascadeTarget, choose_candidate
from hplm.profiles.profile import Profile
from hplm.reporting.progress import Report
from hplm.tasks.task import log_softmax
from hplm_builder.cascade.cascade_build import plan_of
from hplm_builder.evaluation.cascade.answered import Answered, Booleans, Floats, Integers, Row
from hplm_builder.evaluation.cascade.cascade_tenants import CascadeTenant, TenantOutputs, served_part
from hplm_builder.evaluation.cascade.cascades import (
    CascadeRun,
    TextTimes,
    alpha_rows,
    cut_off_rows,
    level_answers,
    levels_row,
    sharing_row,
)
from hplm_builder.evaluation.cascade.contract import Parts, Resample, resample
from hplm_builder.evaluation.cascade.policies import (
    CASCADE,
    SINGLE_LARGE,
    SINGLE_SMALL,
    cocktail,
    early_exit,
    infaas,
    single,
)
from hplm_builder.evaluation.cascade.pool import calibrated, fitted_temperatures, joined, taken

# How far below the best level's accuracy the second target of the resamples lies. Without a target every resample promises.
TARGET_BELOW = 0.03
# Candidates of any 75th percentile of latency: Table 5 shows what the limit leaves out.
ANY_P75 = float("inf")


@dataclass(frozen=True)
class TenantStudy:
    """The figures of a tenant. Rows have its task; their seeds are averaged later.

    `reliability` has each level's and the cascade's confidences and right answers on test, by base and CASCADE.
    """

    task: str
    policies: Mapping[str, Answered]
    target: float
    cut_offs: list[Row]
    alphas: list[Row]
    sharing: list[Row]
    levels: list[Row]
    calibration: list[Row]
    reliability: dict[str, tuple[Floats, Booleans]]


def study_tenant(
    tenant: CascadeTenant, found: TenantOutputs, profiles: Mapping[str, Profile], logic_ms: float
) -> TenantStudy:
    """Compare the policies on test, and vary the settings of the cascade. `profiles` has the times of each base.

    The cascade is the tenant's plan in force. Without a plan it is the one that a tenant gets who asks for no target. Settings
    are varied with two levels. There is nothing to vary if every cascade of two levels is less accurate than the levels' mean.
    """
    task, outputs, test = tenant.task, found.outputs, found.test
    times = TextTimes(profiles, logic_ms)
    allowed = _candidates(outputs, profiles)
    chosen = choose_candidate(allowed, CascadeTarget(), len(outputs.select), len(outputs.proof))
    assert chosen is not None  # without a target, one is always chosen
    plan = tenant.plan
    target = None if plan is None else plan.promise.target_accuracy
    if target is None:
        # All policies get the target that a tenant gets who asks for none.
        target = max(one.accuracy for one in allowed) - MOST_BELOW_BEST
    selected = CascadeRun.of(_plan(chosen, outputs), outputs, test)
    run = selected if plan is None else CascadeRun.of(plan, outputs, served_part(tenant, plan, found))
    seen, answered = level_answers(outputs, outputs.select, times), level_answers(outputs, test, times)
    large = max(range(len(seen)), key=lambda i: seen[i].accuracy)
    of_large = profiles[outputs.levels[-1].base]
    seen_exits, test_exits = (found.exit_answers(part, of_large) for part in ("select", "test"))
    policies = [
        single(answered[0], SINGLE_SMALL),
        single(answered[large], SINGLE_LARGE),
        infaas(seen, answered, target),
        cocktail(seen, answered),
        early_exit(seen_exits, test_exits, target),
        run.answered(times),
    ]
    fastest = best_of_each_count(_candidates(outputs, profiles, most_p75=ANY_P75), target)
    varied = [run] if len(run.plan.levels) == 2 else []
    if not varied and 2 in fastest:
        varied = [CascadeRun.of(_plan(fastest[2], outputs), outputs, test)]
    levels = [
        levels_row(task, CascadeRun.of(_plan(best, outputs), outputs, test), times, _note(best, chosen, allowed))
        for best in fastest.values()
    ]
    reliability = {
        level.base: (answers.confidence.astype(np.float64), answers.right)
        for level, answers in zip(outputs.levels, test.whole, strict=True)
    }
    reliability[CASCADE] = np.array([answer.confidence for answer in run.answers]), run.right
    return TenantStudy(
        task,
        {one.policy: one for one in policies},
        target,
        [row for one in varied for row in cut_off_rows(task, one, outputs, times)],
        [row for one in varied for row in alpha_rows(task, one, times)],
        [sharing_row(task, one) for one in varied],
        levels,
        _calibration_rows(task, found, reliability),
        reliability,
    )


def resample_tenant(
    found: TenantOutputs,
    profiles: Mapping[str, Profile],
    count: int,
    rng: np.random.Generator,
    target: float | None,
    report: Report,
) -> tuple[Parts, list[Resample]]:
    """Draw `count` times which examples calibrate and select, prove and judge; the parts have their usual sizes."""
    outputs = found.outputs
    pool = joined([outputs.select, outputs.proof, found.test])
    parts = Parts(len(outputs.select), len(outputs.proof))
    asked = CascadeTarget(target)

    def choose(seen: Integers) -> Booleans | None:
        drawn = taken(pool, seen)
        temperatures = fitted_temperatures(drawn)
        levels = tuple(
            replace(level, temperature=temperature)
            for level, temperature in zip(outputs.levels, temperatures, strict=True)
        )
        of_seen = replace(outputs, levels=levels, select=calibrated(drawn, temperatures))
        chosen = choose_candidate(_candidates(of_seen, profiles), asked, parts.seen, parts.proof)
        if chosen is None:
            return None
        return CascadeRun.of(plan_of(chosen, of_seen, asked), of_seen, calibrated(pool, temperatures)).right

    def bound(right: int, examples: int) -> float:
        return float(proved_accuracy(right, examples))

    drawn = []
    for number in range(count):
        report("resamples", number / count)
        drawn.append(resample(len(pool), parts, rng, choose, bound, target or 0.0))
    return parts, drawn


def best_of_each_count(candidates: list[Candidate], least_accuracy: float) -> dict[int, Candidate]:
    """Return, for each number of levels, the fastest candidate that is accurate enough, or else the most accurate one."""
    best = {}
    for count in sorted({len(one.levels) for one in candidates}):
        members = [one for one in candidates if len(one.levels) == count]
        enough = [one for one in members if one.accuracy >= least_accuracy]
        best[count] = (
            min(enough, key=lambda one: one.latency_ms)
            if enough
            else max(members, key=lambda one: (one.accuracy, -one.latency_ms))
        )
    return best


def best_level_accuracy(found: TenantOutputs) -> float:
    """Return the accuracy of the best level on all texts that did not train."""
    pool = joined([found.outputs.select, found.outputs.proof, found.test])
    return max(level.accuracy for level in pool.whole)


def _candidates(
    outputs: CascadeOutputs, profiles: Mapping[str, Profile], *, most_p75: float = MOST_P75
) -> list[Candidate]:
    return find_candidates(
        outputs.select,
        [level.temperature for level in outputs.levels],
        [profiles[level.base].latency_ms for level in outputs.levels],
        most_p75=most_p75,
    )


def _plan(candidate: Candidate, outputs: CascadeOutputs) -> CascadePlan:
    return plan_of(candidate, outputs, CascadeTarget())


def _note(best: Candidate, chosen: Candidate, allowed: list[Candidate]) -> str:
    """Return what became of the best candidate of its number of levels."""
    if best == chosen:
        return "selected"
    return "a candidate" if best in allowed else f"no candidate: its p75 is above {MOST_P75} times the slowest level's"


def _calibration_rows(task: str, found: TenantOutputs, reliability: Mapping[str, tuple[Floats, Booleans]]) -> list[Row]:
    """Return the calibration of each level and of the cascade's answers on test; `uncalibrated` is at temperature 1."""
    rows = []
    for level, answers in zip(found.outputs.levels, found.test.whole, strict=True):
        raw = np.exp(log_softmax(answers.logits).max(1))
        rows.append(
            _calibration_row(task, level.base, *reliability[level.base])
            | {"temperature": level.temperature, "uncalibrated": measure_calibration(raw, answers.right).excess}
        )
    return [*rows, _calibration_row(task, CASCADE, *reliability[CASCADE])]


def _calibration_row(task: str, name: str, confidence: Floats, right: Booleans) -> Row:
    measured = measure_calibration(confidence, right)
    return {
        "calibrated": name,
        "task": task,
        "accuracy": float(right.mean()),
        "mean_confidence": float(confidence.mean()),
        "error": measured.error,
        "by_chance": measured.by_chance,
        "excess": measured.excess,
    }
