"""The answers of a cascade to stored level outputs, and the effect of its settings (Tabi, sections 7.3 to 7.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hplm.cascade.level_outputs import CascadeOutputs, LevelOutputs, PartOutputs
from hplm.cascade.offline import OfflineAnswer, answer_offline
from hplm.cascade.plan import CascadePlan
from hplm.tasks.task import log_softmax
from hplm_builder.cascade.cascade_build import Latency
from hplm_builder.evaluation.cascade.answered import (
    Answered,
    Booleans,
    Floats,
    Integers,
    LevelAnswers,
    Row,
    latency_figures,
    shown_shares,
)
from hplm_builder.evaluation.cascade.policies import CASCADE

# Cut-offs of Fig. 8.
CUT_OFFS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))


@dataclass(frozen=True)
class TextTimes:
    """The milliseconds of a text by base and number of tokens; `logic_ms` is the own logic of a cascade for each request."""

    profiles: Mapping[str, Latency]
    logic_ms: float = 0.0

    def of(self, base: str, tokens: Integers) -> Floats:
        """Return the milliseconds `[N]` of texts of so many tokens each."""
        lengths, places = np.unique(tokens, return_inverse=True)
        return np.array([self.profiles[base].latency_ms(int(length)) for length in lengths], np.float64)[places]


def level_answers(outputs: CascadeOutputs, part: PartOutputs, times: TextTimes) -> list[LevelAnswers]:
    """Return what each level answers to the whole texts of a part, from the fastest level to the slowest."""
    found = [
        LevelAnswers(
            level.base,
            np.exp(log_softmax(of_level.logits, level.temperature)),
            part.gold,
            times.of(level.base, of_level.tokens),
        )
        for level, of_level in zip(outputs.levels, part.whole, strict=True)
    ]
    return sorted(found, key=lambda level: float(level.latency_ms.mean()))


@dataclass(frozen=True)
class CascadeRun:
    """The answers of a plan to a part; `bases` are those of the part's levels."""

    plan: CascadePlan
    bases: tuple[str, ...]
    part: PartOutputs
    answers: tuple[OfflineAnswer, ...]

    @classmethod
    def of(cls, plan: CascadePlan, outputs: CascadeOutputs, part: PartOutputs) -> CascadeRun:
        """Answer the texts of a part as a server does."""
        bases = tuple(level.base for level in outputs.levels)
        return cls(plan, bases, part, tuple(answer_offline(plan, bases, part)))

    @property
    def right(self) -> Booleans:
        """Whether each answer is right."""
        return np.array([answer.right for answer in self.answers], np.bool_)

    @property
    def levels(self) -> Integers:
        """The place in the plan of the level that answered each text last."""
        return np.array([answer.level for answer in self.answers], np.int64)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of texts that each level of the plan answered last."""
        return tuple((np.bincount(self.levels, minlength=len(self.plan.levels)) / len(self.answers)).tolist())

    def outputs_at(self, place: int, alpha: float | None = None) -> LevelOutputs:
        """Return the outputs of the level at `place` of the plan for all texts, pruned by the plan's alpha or another."""
        first, number = (self.bases.index(self.plan.levels[each].base) for each in (0, place))
        if place == 0:
            return self.part.whole[first]
        return self.part.read(first, number, self.plan.levels[1].alpha if alpha is None else alpha)

    def answered(self, times: TextTimes) -> Answered:
        """Return the answers with their times: a text takes the sum of the levels that read it."""
        levels = self.levels
        work_ms = {}
        for place, level in enumerate(self.plan.levels):
            work_ms[level.base] = times.of(level.base, self.outputs_at(place).tokens) * (levels >= place)
        latency_ms = np.sum([*work_ms.values()], axis=0) + times.logic_ms
        return Answered(CASCADE, shown_plan(self.plan), self.right, latency_ms, work_ms, self.shares)


def shown_plan(plan: CascadePlan) -> str:
    """Return a plan in few words."""
    bases = "+".join(level.base for level in plan.levels)
    if len(plan.levels) == 1:
        return bases
    first = plan.levels[0].dispatch
    return f"{bases}, c {first.cut_off:g}, k {first.slope:g}, alpha {plan.levels[1].alpha:g}"


def with_cut_off(plan: CascadePlan, cut_off: float) -> CascadePlan:
    """Return the plan with another cut-off at every level but the last."""
    levels = [replace(level, dispatch=replace(level.dispatch, cut_off=cut_off)) for level in plan.levels[:-1]]
    return replace(plan, levels=(*levels, plan.levels[-1]))


def cut_off_rows(task: str, run: CascadeRun, outputs: CascadeOutputs, times: TextTimes) -> list[Row]:
    """Return the rows of Fig. 8: the combined accuracy and latency by the cut-off c."""
    rows = []
    for cut_off in sorted({*CUT_OFFS, run.plan.levels[0].dispatch.cut_off}):
        tried = CascadeRun.of(with_cut_off(run.plan, cut_off), outputs, run.part)
        mean, p50, _, p99 = latency_figures(tried.answered(times).latency_ms)
        rows.append(
            {
                "cut_off": cut_off,
                "task": task,
                "accuracy": 100 * float(tried.right.mean()),
                "answered_by_first": 100 * tried.shares[0],
                "mean_ms": mean,
                "p50_ms": p50,
                "p99_ms": p99,
                "is_chosen": cut_off == run.plan.levels[0].dispatch.cut_off,
            }
        )
    return rows


def alpha_rows(task: str, run: CascadeRun, times: TextTimes) -> list[Row]:
    """Return the rows of Fig. 9 and Table 3: the large level on the re-routed texts, by the degree of pruning alpha.

    `pruned` is the percentage of the large level's tokens that pruning removes. `large_accuracy` is the level's own,
    `accuracy` that of the weighted answer. The last level of the plan is the large one. No text re-routed gives no rows.
    """
    last = len(run.plan.levels) - 1
    number = run.bases.index(run.plan.levels[last].base)
    first = run.bases.index(run.plan.levels[0].base)
    came = run.levels == last
    if not came.any():
        return []
    middle = [run.bases.index(level.base) for level in run.plan.levels[1:]]
    whole = run.part.whole[number]
    whole_ms = float(times.of(run.bases[number], whole.tokens[came]).mean())
    rows = []
    for alpha in run.part.alphas(first, middle):
        pruned = run.part.read(first, number, alpha)
        latency_ms = float(times.of(run.bases[number], pruned.tokens[came]).mean())
        rows.append(
            {
                "alpha": alpha,
                "task": task,
                "rerouted": int(came.sum()),
                "pruned": 100 * (1 - pruned.tokens[came].sum() / whole.tokens[came].sum()),
                "large_ms": latency_ms,
                "large_ms_less": 100 * (1 - latency_ms / whole_ms),
                "large_accuracy": 100 * float(pruned.right[came].mean()),
                "accuracy": 100 * weighted_accuracy(run, alpha, came),
                "is_chosen": alpha == run.plan.levels[1].alpha,
            }
        )
    return rows


def weighted_accuracy(run: CascadeRun, alpha: float, texts: Booleans) -> float:
    """Return the share of right weighted answers (eq. 6) of all levels of the plan to some texts, pruned by `alpha`."""
    total = sum(
        weight * np.exp(log_softmax(run.outputs_at(place, alpha).logits[texts], level.dispatch.temperature))
        for place, (level, weight) in enumerate(zip(run.plan.levels, run.plan.levels[-1].weights, strict=True))
    )
    return float((np.asarray(total).argmax(1) == run.part.gold[texts]).mean())


def sharing_row(task: str, run: CascadeRun) -> Row:
    """Return the row of section 7.3.2: accuracies of the first and the last level on the texts that each answers.

    A part without texts has NaN.
    """
    first, last = run.outputs_at(0), run.part.whole[run.bases.index(run.plan.levels[-1].base)]
    returned = run.levels == 0

    def share(right: Booleans, texts: Booleans) -> float:
        return 100 * float(right[texts].mean()) if texts.any() else float("nan")

    return {
        "shared": task,
        "returned": 100 * float(returned.mean()),
        "small_on_returned": share(first.right, returned),
        "large_on_returned": share(last.right, returned),
        "small_on_rerouted": share(first.right, ~returned),
        "large_on_rerouted": share(last.right, ~returned),
        "cascade_on_rerouted": share(run.right, ~returned),
    }


def levels_row(task: str, run: CascadeRun, times: TextTimes, note: str) -> Row:
    """Return a row of Table 5: a cascade of some number of levels."""
    mean, p50, _, p99 = latency_figures(run.answered(times).latency_ms)
    return {
        "levels": len(run.plan.levels),
        "task": task,
        "accuracy": 100 * float(run.right.mean()),
        "mean_ms": mean,
        "p50_ms": p50,
        "p99_ms": p99,
        "answered_by_level": shown_shares(run.shares),
        "plan": shown_plan(run.plan),
        "note": note,
    }
