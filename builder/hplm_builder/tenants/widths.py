"""The width of a tenant's adapter: if several widths are trained, the tenant's dev examples choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hplm.core.settings import REDUCTION_FACTOR, AdapterWidth
from hplm.errors import ConfigError
from hplm.reporting.progress import Report
from hplm.tasks.task import Task
from hplm_builder.tenants.dev_scores import CLEAR_ERRORS, DevScore
from hplm_builder.tenants.finetune import Trained


def width_name(reduction_factor: int) -> AdapterWidth:
    """Return whether adapters with this reduction factor are narrow or wide."""
    return "narrow" if reduction_factor >= REDUCTION_FACTOR else "wide"


def factors_to_train(task: Task, width: AdapterWidth, slot_factor: int) -> tuple[int, ...]:
    """Return the reduction factors of the adapters to train, for slots with a reduction factor of `slot_factor`.

    With `auto` the task's usual factor is the first, and the other one follows if the slots hold both.
    """
    narrow = max(slot_factor, REDUCTION_FACTOR)
    if width != "auto":
        return (narrow if width == "narrow" else slot_factor,)
    usual = task.reduction_factor(slot_factor)
    other = slot_factor if usual == narrow else narrow
    return (usual,) if other == usual else (usual, other)


def choose(scores: Sequence[DevScore]) -> int:
    """Return the number of the score to keep: 0, unless a later one is clearly above those before it."""
    kept = 0
    for number, score in enumerate(scores):
        if score.is_clearly_above(scores[kept]):
            kept = number
    return kept


def train_widths(
    train: Callable[[int, Report, Trained | None], Trained], factors: Sequence[int], report: Report
) -> tuple[Trained, dict[str, Any]]:
    """Train an adapter with each of the reduction factors, and return the chosen one with what a card says about the choice.

    `train` gets a reduction factor, a progress callback and the rival, which is the first width's training. A width is left out
    if no dev score could be clearly above the first one's, if it was not ahead of its rival, or if it diverged. Raises
    ConfigError if all diverge, and what `report` raises.
    """
    made: dict[int, Trained] = {}
    failure: ConfigError | None = None
    left_out = ""
    for number, factor in enumerate(factors):

        def report_share(step: str, done: float, number: int = number) -> None:
            report(step, (number + done) / len(factors))

        rival = next(iter(made.values()), None)
        if rival is not None and not rival.dev.leaves_room:
            left_out = f"on dev {rival.dev.value:.3f} leaves no room for a clearly better width"
            continue
        try:
            trained = train(factor, report_share, rival)
        except ConfigError as error:
            failure, left_out = error, "the training of the other width diverged"
            continue
        if rival is not None and trained.is_beaten:
            epoch = int(max(row["epoch"] for row in trained.curve))
            own, other = trained.highest_by(epoch), rival.highest_by(epoch)
            left_out = f"on dev {width_name(factor)} was not ahead after epoch {epoch} ({own:.3f} and {other:.3f})"
        else:
            made[factor] = trained
    if not made:
        assert failure is not None
        raise failure
    finished = list(made.values())
    kept = choose([one.dev for one in finished])
    about: dict[str, Any] = {"adapter_width": width_name(list(made)[kept])}
    if len(factors) > 1:
        names = [width_name(factor) for factor in made]
        about["width_scores"] = {name: one.dev.value for name, one in zip(names, finished, strict=True)}
        about["width_why"] = (
            f"{left_out}, so {names[0]} stays" if left_out else _why(names, [one.dev for one in finished], kept)
        )
    return finished[kept], about


def _why(names: Sequence[str], scores: Sequence[DevScore], kept: int) -> str:
    usual, other = scores[0], scores[-1]
    found = f"on dev {names[-1]} has {other.value - usual.value:+.3f} (standard error {other.error_beside(usual):.3f})"
    if kept:
        return f"{found}, which is clearly better than {names[0]}"
    return f"{found}, which is not above {CLEAR_ERRORS:g} standard errors, so {names[0]} stays, the task's usual width"
