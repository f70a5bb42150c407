"""The slow twin of a served cascade: what a plan answers, computed from stored outputs of its levels, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


from hplm.cascade.level_outputs import Numbers, PartOutputs
from hplm.cascade.plan import CascadePlan


@dataclass(frozen=True)
class OfflineAnswer:
    """The answer to one text: the number of its label (-1 of a tagging, whose entities are in `LevelOutputs.answers`).

    `level` is the number of the level in the plan that answered last, from 0; so often was the text re-routed. `confidence` is
    that of the answer: calibrated, and of a weighted answer its largest probability.
    """

    label: int
    level: int
    confidence: float
    right: bool


def answer_offline(
    plan: CascadePlan, bases: Sequence[str], part: PartOutputs, draws: Numbers | None = None
) -> list[OfflineAnswer]:
    """Return the answers of a plan to the texts of a part, as the model `cascade` gives them if no level is late.

    `bases` are those of the part's levels, in order. `draws` `[N, levels]` are by default those of the part; those of a served
    plan are `draws_of` its tenant and number.
    """
    raise NotImplementedError


def draws_of(tenant: str, number: int, texts: Sequence[str | tuple[str, str]], levels: int) -> Numbers:
    """Return the draws `[N, levels]` of texts or pairs at version `number` of the last level."""
    raise NotImplementedError
