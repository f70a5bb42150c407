"""Builds a tenant's cascade of its trained levels: calibrates, computes what levels answer, selects, and proves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from hplm.cascade.calibration import measure_calibration, why_uncalibrated
from hplm.cascade.candidates import Candidate, best_candidates, find_candidates
from hplm.cascade.level_outputs import CalibratedLevel, CascadeOutputs, PartOutputs, PrunedBy
from hplm.cascade.offline import answer_offline
from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.cascade.promise import proved_accuracy
from hplm.cascade.selection import CascadeTarget, broken_promise, select_candidate
from hplm.errors import DataError
from hplm.profiles.profile import Profile
from hplm.reporting.progress import Report, silent
from hplm.tasks.examples import LabelledText
from hplm.tasks.task_loader import task_named
from hplm_builder.cascade.levels import Level, LevelInput
from hplm_builder.cascade.outputs import UNNUMBERED, calibrate_levels, compute_part
from hplm_builder.cascade.used_texts import is_used, used_by
from hplm_builder.data.labelled import LabelledData

# The share of dev examples that a proof gets which has no file.
PROOF_SHARE = 0.4
# The share of `build_cascade` that each step of its progress takes.
STEPS = {"calibrate": 0.2, "prune": 0.4, "prove": 0.3, "select": 0.1}


class Latency(Protocol):
    """The times of a level, for example a `LevelLatency`."""

    def latency_ms(self, tokens: int) -> float:
        """Return the milliseconds of a request of one text of `tokens` tokens, while no other request runs."""
        ...


@dataclass(frozen=True)
class LevelLatency:
    """The times of a level: of its base, which computes each text once for each of the level's students."""

    profile: Profile
    students: int = 1

    def latency_ms(self, tokens: int) -> float:
        """Return the milliseconds of a request of one text of `tokens` tokens, while no other request runs."""
        return self.profile.latency_ms(tokens, students=self.students)


@dataclass(frozen=True)
class BuiltCascade:
    """A cascade that was selected and proved.

    Versions have no numbers yet: those of `plan` are 0, see `numbered`. The plan may leave trained levels out. `about` has, in
    JSON values, `candidates` (rows of a table, see `best_candidates`), `levels` with the accuracy and calibration of each level
    on the examples that select, and `warnings` if there are any.
    """

    plan: CascadePlan
    outputs: CascadeOutputs
    about: dict[str, Any]


def numbered(plan: CascadePlan, numbers: Mapping[str, int]) -> CascadePlan:
    """Return the plan with the numbers of the tenant's versions, by base."""
    levels = tuple(replace(level, number=numbers[level.base]) for level in plan.levels)
    return replace(plan, levels=levels)


def set_aside(
    data: LabelledData, proof: Sequence[LabelledText] | None, seed: int, used: Set[int] = frozenset()
) -> tuple[LabelledData, list[LabelledText], list[str]]:
    """Return the data to train, calibrate and select on, the examples of the proof, and warnings. Call it before training.

    Without `proof`, about PROOF_SHARE of the dev examples are set aside, by `seed` and text, so that an update sets the same
    ones aside. Examples whose texts also train or select prove nothing, so they are left out, with a warning. So are those
    in `used`, the checksums of texts that trained or selected the versions from which an update trains on. Raises DataError if
    answers of the task have no confidence, and if no example is left to select or to prove.
    """
    if not task_named(data.task).has_confidence:
        raise DataError(f"answers of a {data.task} have no confidence, so no cascade can be made of its models")
    if proof is None:
        proof = [example for example in data.dev if _is_of_proof(example, seed)]
        data = replace(data, dev=[example for example in data.dev if not _is_of_proof(example, seed)])
    own = used_by(data)
    of_own = sum(is_used(example, own) for example in proof)
    kept = [example for example in proof if not is_used(example, own | used)]
    of_earlier = len(proof) - len(kept) - of_own
    warnings = [
        f"{count:,} of {len(proof):,} proof examples {what}, so they prove nothing"
        for count, what in (
            (of_own, "also train or select"),
            (of_earlier, "have trained or selected an earlier version"),
        )
        if count
    ]
    if not data.dev or not kept:
        what = "dev examples to select with" if not data.dev else "examples that prove the accuracy"
        raise DataError(
            "; ".join([*warnings, f"no {what} are left"])
            + ": give more dev examples, or a file of examples that do not train (--proof)"
        )
    return data, kept, warnings


def _is_of_proof(example: LabelledText, seed: int) -> bool:
    digest = hashlib.blake2b(f"proof {seed} {example.text_or_pair}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < PROOF_SHARE


def build_cascade(
    levels: Sequence[LevelInput],
    data: LabelledData,
    proof: Sequence[LabelledText],
    target: CascadeTarget,
    profile_of: Callable[[LevelInput], Latency],
    report: Report = silent,
) -> BuiltCascade:
    """Calibrate and select on the dev examples of `data`, and prove on `proof`, both of `set_aside`.

    The steps of `report` are those of STEPS. Raises ContractError with the nearest offer if the target cannot be promised,
    ConfigError if the answers have no confidence, and what `report` raises.
    """
    profiles = {level.base_name: profile_of(level) for level in levels}
    outputs = compute_outputs(levels, data.dev, proof, report, profiles=profiles)
    report("select", 0.0)
    built = select_again(outputs, target, profiles)
    report("select", 1.0)
    return built


def compute_outputs(
    levels: Sequence[LevelInput],
    select: Sequence[LabelledText],
    proof: Sequence[LabelledText],
    report: Report = silent,
    *,
    profiles: Mapping[str, Latency] | None = None,
) -> CascadeOutputs:
    """Calibrate the levels on `select`, and return what they answer to both parts. `report` as in `build_cascade`.

    With `profiles`, the times of each base by name, there are answers only to pruned texts that a selection may need.
    """
    with ExitStack() as opened:
        found, temperatures, answered = calibrate_levels(
            [opened.enter_context(Level(level)) for level in levels],
            select,
            _progress("calibrate", len(levels) * len(select), report),
        )
        calibrated = tuple(
            CalibratedLevel(level.base_name, temperature)
            for level, temperature in zip(found, temperatures, strict=True)
        )
        pairs = len(levels) * (len(levels) - 1) // 2
        # How many degrees of pruning there will be is unknown: five are usual.
        part = compute_part(
            found, temperatures, select, answered=answered, tick=_progress("prune", 5 * pairs * len(select), report)
        )
        if profiles is not None:
            needed = _needed(part, calibrated, profiles)
            part = replace(part, pruned={key: outputs for key, outputs in part.pruned.items() if key in needed})
        alphas: dict[tuple[int, int], list[float]] = {}
        for by, reader, alpha in part.pruned:
            alphas.setdefault((by, reader), []).append(alpha)
        proved = compute_part(
            found,
            temperatures,
            proof,
            alphas=alphas,
            tick=_progress("prove", (len(levels) + len(part.pruned)) * len(proof), report),
        )
        card = found[0].tenant.card
        return CascadeOutputs(card.name, card.task, card.labels, calibrated, part, proved)


def _needed(part: PartOutputs, levels: Sequence[CalibratedLevel], profiles: Mapping[str, Latency]) -> set[PrunedBy]:
    """Return which pruned texts a selection may need: a candidate is never taken if a faster one is as accurate."""
    best = [
        candidate
        for deterministic in (False, True)
        for candidate in best_candidates(_candidates(part, levels, profiles, deterministic=deterministic))
    ]
    return {(one.levels[0], reader, one.alpha) for one in best for reader in one.levels[1:]}


def _candidates(
    part: PartOutputs, levels: Sequence[CalibratedLevel], profiles: Mapping[str, Latency], *, deterministic: bool
) -> list[Candidate]:
    return find_candidates(
        part,
        [level.temperature for level in levels],
        [profiles[level.base].latency_ms for level in levels],
        deterministic=deterministic,
    )


def _progress(step: str, total: int, report: Report) -> Callable[[int], None]:
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        report(step, min(1.0, done / max(1, total)))

    return tick


def select_again(outputs: CascadeOutputs, target: CascadeTarget, profiles: Mapping[str, Latency]) -> BuiltCascade:
    """Select a cascade and prove it, without computing. `profiles` has the times of each base, by name.

    Raises ContractError as `build_cascade` does.
    """
    candidates = _candidates(outputs.select, outputs.levels, profiles, deterministic=target.deterministic)
    chosen = select_candidate(candidates, target, len(outputs.select), len(outputs.proof))
    plan = prove(plan_of(chosen, outputs, target), outputs, target, chosen)
    rows = best_candidates(candidates)
    about: dict[str, Any] = {
        "candidates": [_row(one, outputs, is_chosen=one == chosen) for one in rows],
        "levels": [_level_row(place, outputs) for place in range(len(outputs.levels))],
    }
    if warnings := _uncalibrated(outputs):
        about["warnings"] = warnings
    return BuiltCascade(plan, outputs, about)


def plan_of(candidate: Candidate, outputs: CascadeOutputs, target: CascadeTarget) -> CascadePlan:
    """Return the plan of a candidate, which promises nothing yet."""
    levels = []
    for place, number in enumerate(candidate.levels):
        level = outputs.levels[number]
        is_last = place == len(candidate.levels) - 1
        # The last level re-routes nothing, so its cut-off and slope are 0.
        dispatch = Dispatch(
            level.temperature, 0.0 if is_last else candidate.cut_off, 0.0 if is_last else candidate.slope
        )
        # Texts are pruned once, before the second level, and stay pruned.
        alpha = candidate.alpha if place == 1 else 0.0
        levels.append(LevelPlan(level.base, UNNUMBERED, dispatch, candidate.weights[place], alpha))
    expected = {
        "accuracy": candidate.accuracy,
        "latency_ms": candidate.latency_ms,
        "rerouted": candidate.rerouted,
        "examples": len(outputs.select),
    }
    promise = Promise(0.0, 0, 0, candidate.latency_ms, target.accuracy, target.latency_ms)
    # Confidences of served texts are compared with the mean on dev.
    confidence = float(outputs.select.whole[candidate.levels[0]].confidence.mean())
    about = {"on_dev": expected, "dev_confidence": confidence}
    return CascadePlan(tuple(levels), promise, target.deterministic, target.on_late, about)


def prove(plan: CascadePlan, outputs: CascadeOutputs, target: CascadeTarget, candidate: Candidate) -> CascadePlan:
    """Return the plan with what the examples of the proof prove. Raises ContractError if that is less than the target."""
    answers = answer_offline(plan, [level.base for level in outputs.levels], outputs.proof)
    right, examples = sum(answer.right for answer in answers), len(answers)
    bound = float(proved_accuracy(right, examples))
    if target.accuracy is not None and bound < target.accuracy:
        raise broken_promise(target, right, examples, candidate.accuracy, candidate.latency_ms)
    return replace(plan, promise=replace(plan.promise, accuracy=bound, right=right, examples=examples))


def _uncalibrated(outputs: CascadeOutputs) -> list[str]:
    """Return a sentence for each level whose confidence the examples that select cannot calibrate."""
    return [
        f"dev cannot calibrate the confidence over {level.base}, because {why}: it stays the model's own score (temperature 1)"
        for level, answers in zip(outputs.levels, outputs.select.whole, strict=True)
        if level.temperature == 1 and (why := why_uncalibrated(answers.right))
    ]


def _row(candidate: Candidate, outputs: CascadeOutputs, *, is_chosen: bool) -> dict[str, Any]:
    """Return a candidate as a row of the table, in JSON values."""
    row = asdict(candidate)
    row["levels"] = [outputs.levels[number].base for number in candidate.levels]
    row["weights"] = [list(weights) for weights in candidate.weights]
    return {**row, "chosen": is_chosen}


def _level_row(place: int, outputs: CascadeOutputs) -> dict[str, Any]:
    """Return a level's accuracy and calibration on the examples that select, in JSON values."""
    level, answers = outputs.levels[place], outputs.select.whole[place]
    calibration = measure_calibration(answers.confidence, answers.right)
    row: dict[str, Any] = {
        "base": level.base,
        "temperature": level.temperature,
        "accuracy": answers.accuracy,
        "calibration_error": calibration.error,
        "calibration_error_by_chance": calibration.by_chance,
    }
    if answers.entities.shape[1]:
        right, answered, labelled = answers.entities.sum(0).tolist()
        row["f1"] = 2 * right / (answered + labelled) if answered + labelled else 1.0
    return row
