"""One search for all: every variant trains at its learning rates, the best on dev stays, seeds give the spread."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.progress import Progress

from hplm.errors import ConfigError
from hplm.reporting.progress import Report
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.feature_cache import FeatureCache
from hplm_builder.evaluation.search.run_store import BusyError, RunKey, RunResult, RunStore
from hplm_builder.evaluation.search.study import BestRuns, FinishedRuns, Study
from hplm_builder.evaluation.search.variants import MakeBody, Variant
from hplm_builder.tenants.finetune import fine_tune
from hplm_builder.tenants.prepared import Prepared
from hplm_builder.tenants.pseudo_labels import pseudo_labelled

POLL_S = 1.0


def search(study: Study, results: RunStore, run_s: Mapping[tuple[str, str], float], progress: Progress) -> BestRuns:
    """Do every run that nobody has done or is doing, and wait for the others'. Says how many it did of how many.

    `run_s`: how many seconds a run is thought to take, by the names of task and variant. Raises DataError, ConfigError.
    """
    work = _Work(study, results, run_s, progress)
    while work.round():
        time.sleep(POLL_S)
    total = sum(work.board.total(task, variant) for task, variant in study.pairs())
    progress.console.print(f"{work.done_here} of {total} runs were done here", highlight=False)
    return {(task.name, variant.name): work.board.chosen(task, variant) for task, variant in study.pairs()}


class _Work:
    def __init__(
        self, study: Study, results: RunStore, run_s: Mapping[tuple[str, str], float], progress: Progress
    ) -> None:
        self.board = FinishedRuns(study, results)
        self.done_here = 0
        self._study = study
        self._results = results
        self._run_s = run_s
        self._progress = progress
        self._features = FeatureCache()
        self._bodies: dict[tuple[str, str], MakeBody] = {}
        self._taught: tuple[tuple[str, str, int], list[Prepared], float] | None = None
        self._overall = progress.add_task("seconds of work", total=None)
        self._current = progress.add_task("", total=100, visible=False)

    def round(self) -> bool:
        """Go once over everything; returns whether something is left that another process does."""
        left = 0
        for task, variant in self._study.pairs():
            while keys := self.board.open(task, variant):
                try:
                    taken = any(self._taken(task, variant, key) for key in keys)
                except BusyError:
                    taken = False
                if not taken:
                    left += len(keys)
                    break
        self._show_overall(self._finished_s())
        if left:
            self._progress.update(self._current, visible=True, description=f"{left} runs are others'", completed=0)
        return left > 0

    def _taken(self, task: EvalTask, variant: Variant, key: RunKey) -> bool:
        """Do a run, unless another process is at it. Raises BusyError where what it needs is another's to make."""
        with self._results.claim(key.path) as is_ours:
            if not is_ours:
                return False
            # Since it was found open, another may have finished it.
            if self.board.run(task, variant, key.seed, key.rate) is None:
                self._results.write(key, self.board.about(task, variant), self._do(task, variant, key))
                self.done_here += 1
            return True

    def _do(self, task: EvalTask, variant: Variant, key: RunKey) -> RunResult:
        study, cost_s = self._study, self._run_s[task.name, variant.name]
        data = study.data(task, variant, key.seed)
        finished_s = self._finished_s()

        def report(step: str, done: float) -> None:
            self._progress.update(
                self._current, visible=True, description=f"{key}: {step}", completed=round(100 * done)
            )
            self._show_overall(finished_s + (done * cost_s if step == "fine-tune" else 0.0))

        found = self._features.parts(task, variant, data, key.seed, report)
        if (task.name, variant.name) not in self._bodies:
            self._bodies = {(task.name, variant.name): variant.body(task)}  # the one in use alone: each is a model
        settings = study.train_settings(key.seed, key.rate)
        parts = found["train"], found["dev"], found["test"]
        start_s = time.monotonic()
        hidden_size = variant.base.config.hidden_size
        teacher_s = 0.0
        try:
            if variant.taught:
                examples, teacher_s = self._pseudo_labelled(task, variant, key, data, found, report)
                parts, start_s = ([*parts[0], *examples], *parts[1:]), time.monotonic()
            trained = fine_tune(
                self._bodies[task.name, variant.name], hidden_size, data, parts, settings, report, device=study.device
            )
        except ConfigError:
            return RunResult(seconds=time.monotonic() - start_s)  # it diverged, which the search is there to find out
        return RunResult(
            dev=trained.scores[f"dev_{task.metric}"],
            test=trained.scores[f"test_{task.metric}"],
            scores=trained.scores,
            best_epoch=trained.best_epoch,
            epochs=len(trained.curve),
            trained_parameters=sum(p.numel() for p in trained.body.parameters() if p.requires_grad)
            + sum(array.size for array in trained.head.arrays.values()),
            seconds=teacher_s + time.monotonic() - start_s,
            more=variant.more(task, data, trained) if variant.more else {},
        )

    def _pseudo_labelled(
        self,
        task: EvalTask,
        variant: Variant,
        key: RunKey,
        data: LabelledData,
        found: Mapping[str, list[Prepared]],
        report: Report,
    ) -> tuple[list[Prepared], float]:
        """The unlabelled examples with a teacher's labels, and the seconds that took; kept for the seed's other rates."""
        of = (task.name, variant.source.name, key.seed)
        if self._taught is None or self._taught[0] != of:
            self._taught = None  # the last one's features are let go first
            start_s = time.monotonic()
            taught = pseudo_labelled(
                variant.base,
                data,
                (found["train"], found["dev"], []),
                found["unlabelled"],
                self._study.train_settings(key.seed, key.rate),
                report,
                device=self._study.device,
            )
            self._taught = of, taught.examples, time.monotonic() - start_s
        return self._taught[1:]

    def _finished_s(self) -> float:
        """What all finished runs were thought to take."""
        counts = {(t.name, v.name): self.board.finished(t, v) for t, v in self._study.pairs()}
        totals = {(t.name, v.name): self.board.total(t, v) for t, v in self._study.pairs()}
        total_s = sum(total * self._run_s[pair] for pair, total in totals.items())
        words = f"{sum(counts.values())} of {sum(totals.values())} runs, seconds of work"
        self._progress.update(self._overall, description=words, total=max(1, round(total_s)))
        return sum(count * self._run_s[pair] for pair, count in counts.items())

    def _show_overall(self, seconds: float) -> None:
        self._progress.update(self._overall, completed=round(seconds))
