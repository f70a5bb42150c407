"""Parts of level outputs put together, drawn from, and calibrated again: what a resample needs, without computing a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from hplm.cascade.calibration import fit_temperature
from hplm.cascade.level_outputs import LevelOutputs, PartOutputs
from hplm.tasks.task import log_softmax
from hplm_builder.evaluation.cascade.answered import Integers

_ARRAYS = [field.name for field in fields(LevelOutputs) if field.name != "answers"]


def joined(parts: Sequence[PartOutputs]) -> PartOutputs:
    """Return the texts of several parts as one, with the pruned texts that all parts have. The parts have the same levels."""

    def join(outputs: Sequence[LevelOutputs]) -> LevelOutputs:
        arrays = {name: np.concatenate([getattr(one, name) for one in outputs]) for name in _ARRAYS}
        return LevelOutputs(**arrays, answers=tuple(answer for one in outputs for answer in one.answers))

    pruned = set.intersection(*(set(part.pruned) for part in parts))
    return PartOutputs(
        tuple(join(levels) for levels in zip(*(part.whole for part in parts), strict=True)),
        np.concatenate([part.gold for part in parts]),
        np.concatenate([part.draws for part in parts]),
        {key: join([part.pruned[key] for part in parts]) for key in sorted(pruned)},
    )


def taken(part: PartOutputs, numbers: Integers) -> PartOutputs:
    """Return the texts with these numbers."""

    def take(one: LevelOutputs) -> LevelOutputs:
        answers = tuple(one.answers[i] for i in numbers.tolist()) if one.answers else ()
        return LevelOutputs(**{name: getattr(one, name)[numbers] for name in _ARRAYS}, answers=answers)

    return PartOutputs(
        tuple(map(take, part.whole)),
        part.gold[numbers],
        part.draws[numbers],
        {key: take(one) for key, one in part.pruned.items()},
    )


def fitted_temperatures(part: PartOutputs) -> list[float]:
    """Return the temperature of each level of a classification, as `Level.calibrate` fits it."""
    texts = np.arange(len(part))

    def fit(outputs: LevelOutputs) -> float:
        def log_likelihood(temperature: float) -> float:
            return float(log_softmax(outputs.logits, temperature)[texts, part.gold].sum())

        return fit_temperature(log_likelihood, outputs.right)

    return [fit(outputs) for outputs in part.whole]


def calibrated(part: PartOutputs, temperatures: Sequence[float]) -> PartOutputs:
    """Return the part of a classification with the confidences of other temperatures."""

    def calibrate(outputs: LevelOutputs, temperature: float) -> LevelOutputs:
        confidence = np.exp(log_softmax(outputs.logits, temperature).max(1)).astype(np.float32)
        return replace(outputs, confidence=confidence)

    return replace(
        part,
        whole=tuple(calibrate(one, temperature) for one, temperature in zip(part.whole, temperatures, strict=True)),
        pruned={key: calibrate(one, temperatures[key[1]]) for key, one in part.pruned.items()},
    )
