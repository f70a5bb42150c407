"""The answers of a tenant's levels to labelled texts: computed once, then all candidates are made of them (Tabi, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hplm.core.wire import LabelledSpan

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
# The level whose importances pruned the texts, the level that read the texts, and alpha of eq. 5. Levels count from 0.
PrunedBy = tuple[int, int, float]


@dataclass(frozen=True)
class LevelOutputs:
    """The answers of one level to N labelled texts.

    `logits` `[N, labels]`; of a tagging, `[N, 0]`, because nothing is weighted. `confidence` `[N]` at the level's temperature
    (eq. 3). `right` `[N]`: whether the answer is right, of a tagging the whole sentence. `tokens` `[N]` that the level reads.
    `entities` `[N, 3]` of a tagging: right ones, answered ones, and those of the label; else `[N, 0]`. `answers`: the entities
    that a tagging answers to each text; else empty.
    """

    logits: Floats
    confidence: Floats
    right: Flags
    tokens: Counts
    entities: Counts
    answers: tuple[tuple[LabelledSpan, ...], ...] = ()

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return float(self.right.mean())


@dataclass(frozen=True)
class PartOutputs:
    """The answers of all levels to the same N labelled texts.

    `whole` has each level's answers to the texts as they are; levels have the order of `CascadeOutputs.levels`. `pruned` has
    the answers to pruned texts. `gold` `[N]`: the number of the right label, -1 of a tagging. `draws` `[N, levels]`: a draw for
    each level of a cascade, see `hplm.cascade.dispatch.draw_of`.
    """

    whole: tuple[LevelOutputs, ...]
    gold: Counts
    draws: Numbers
    pruned: Mapping[PrunedBy, LevelOutputs] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.gold)

    def read(self, pruner: int, level: int, alpha: float) -> LevelOutputs:
        """Return the answers of `level` to texts that `pruner` pruned by `alpha`, which prunes nothing if it is 0."""
        if alpha == 0 or pruner == level:
            return self.whole[level]
        return self.pruned[pruner, level, alpha]

    def alphas(self, pruner: int, levels: Sequence[int]) -> list[float]:
        """Return 0 and every alpha with which all `levels` have read what `pruner` pruned, ascending."""
        found = [{alpha for by, read, alpha in self.pruned if (by, read) == (pruner, level)} for level in levels]
        return [0.0, *sorted(set.intersection(*found))] if found else [0.0]


@dataclass(frozen=True)
class CalibratedLevel:
    """A level of a tenant: its base, and the temperature that calibrates its confidence."""

    base: str
    temperature: float


@dataclass(frozen=True)
class CascadeOutputs:
    """All that a selection needs: the levels of a tenant in ascending accuracy, and their answers to two parts of the data.

    `select` calibrates and selects. `proof` proves what was selected, and nothing else.
    """

    tenant: str
    task: str
    labels: tuple[str, ...]
    levels: tuple[CalibratedLevel, ...]
    select: PartOutputs
    proof: PartOutputs

    def place(self, base: str) -> int:
        """Return the number of the level over `base`, from 0."""
        return [level.base for level in self.levels].index(base)
