"""The search that all studies use: every variant trains at each learning rate, dev chooses the best, seeds show the spread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from rich.progress import Progress

from hplm.errors import ConfigError
from hplm.reporting.progress import Report
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.finished_runs import BestRuns, FinishedRuns
from hplm_builder.evaluation.search.run_store import BusyError, RunKey, RunResult, RunStore
from hplm_builder.evaluation.search.study import MakeBody, Study, Variant
from hplm_builder.tenants.finetune import fine_tune
from hplm_builder.tenants.prepared import Featurise, Prepared, counted, prepare
from hplm_builder.tenants.pseudo_labels import pseudo_labelled

POLL_S = 1.0  # seconds between looks for the runs that other processes do


def search(study: Study, store: RunStore, run_s: Mapping[tuple[str, str], float], progress: Progress) -> BestRuns:
    """Do every run that is not finished and that no other process does, then wait for the other processes.

    `run_s` maps (task name, variant name) to the estimated seconds of a run. Prints how many runs this process did.
    Raises DataError, ConfigError.
    """
    loop = _SearchLoop(study, store, run_s, progress)
    while loop.do_open_runs():
        time.sleep(POLL_S)
    total = sum(loop.finished.total(task, variant) for task, variant in study.pairs())
    progress.console.print(f"{loop.done_here} of {total} runs were done by this process", highlight=False)
    return {(task.name, variant.name): loop.finished.best(task, variant) for task, variant in study.pairs()}


class FeatureCache:
    """The features of one task from one source, which the next run most likely needs; they can take a gigabyte."""

    def __init__(self) -> None:
        self._source: tuple[str, str] | None = None
        self._featurise: Featurise | None = None
        self._parts: dict[tuple[str, int | None], list[Prepared]] = {}

    def parts(
        self, task: EvalTask, variant: Variant, data: LabelledData, seed: int, report: Report
    ) -> dict[str, list[Prepared]]:
        """Return features by part of `data`: train, dev, test, and unlabelled if it has any. Raises DataError.

        `data` is the sample of the task that a budget takes with `seed`.
        """
        encoder = variant.base.load_text_encoder()
        if self._source != (task.name, variant.source.name):
            self._parts = {}
            self._featurise = variant.source.open(task, report)
            self._source = task.name, variant.source.name
        wanted = data.labelled | ({"unlabelled": data.unlabelled} if data.unlabelled else {})
        # The test part, and a part that a budget takes whole, are the same for every seed.
        keys = {
            name: (name, None if name == "test" or part is task.data.labelled.get(name) else seed)
            for name, part in wanted.items()
        }
        self._parts = {key: part for key, part in self._parts.items() if key in keys.values()}
        missing = {name: part for name, part in wanted.items() if keys[name] not in self._parts}
        tick = counted("features", sum(map(len, missing.values())), report)
        assert self._featurise is not None
        for name, part in missing.items():
            self._parts[keys[name]] = prepare(part, data, encoder, self._featurise, tick)
        return {name: self._parts[key] for name, key in keys.items()}


class _SearchLoop:
    """The state of a search in this process: what is finished, the features and models in use, the progress bars."""

    def __init__(
        self, study: Study, store: RunStore, run_s: Mapping[tuple[str, str], float], progress: Progress
    ) -> None:
        self.finished = FinishedRuns(study, store)
        self.done_here = 0
        self._study = study
        self._store = store
        self._run_s = run_s
        self._progress = progress
        self._features = FeatureCache()
        self._bodies: dict[tuple[str, str], MakeBody] = {}
        # The last examples with pseudo-labels: (task, source, seed), the examples, the seconds that labelling took.
        self._pseudo_labelled: tuple[tuple[str, str, int], list[Prepared], float] | None = None
        self._overall = progress.add_task("seconds of work", total=None)
        self._current = progress.add_task("", total=100, visible=False)

    def do_open_runs(self) -> bool:
        """Do the open runs of all tasks and variants once; return whether other processes still do some."""
        done_elsewhere = 0
        for task, variant in self._study.pairs():
            while keys := self.finished.open(task, variant):
                with suppress(BusyError):
                    if any(self._try_run(task, variant, key) for key in keys):
                        continue
                done_elsewhere += len(keys)
                break
        self._show_overall(self._finished_s())
        if done_elsewhere:
            words = f"waiting for {done_elsewhere} runs of other processes"
            self._progress.update(self._current, visible=True, description=words, completed=0)
        return done_elsewhere > 0

    def _try_run(self, task: EvalTask, variant: Variant, key: RunKey) -> bool:
        """Do a run and return True, or return False if another process does it.

        Raises BusyError if another process builds what the run needs.
        """
        with self._store.claim(key.path) as is_ours:
            if not is_ours:
                return False
            # Another process may have finished the run before this process locked it.
            if self.finished.run(task, variant, key.seed, key.rate) is None:
                with self._store.training(key):
                    self._store.write(key, self.finished.about(task, variant), self._run(task, variant, key))
                self.done_here += 1
            return True

    def _run(self, task: EvalTask, variant: Variant, key: RunKey) -> RunResult:
        """Train and score a variant. A run that diverges has a result without scores."""
        study, cost_s = self._study, self._run_s[task.name, variant.name]
        data = study.data(task, variant, key.seed)
        finished_s = self._finished_s()

        def report(step: str, done: float) -> None:
            self._progress.update(
                self._current, visible=True, description=f"{key}: {step}", completed=round(100 * done)
            )
            self._show_overall(finished_s + (done * cost_s if step == "fine-tune" else 0.0))

        features = self._features.parts(task, variant, data, key.seed, report)
        if (task.name, variant.name) not in self._bodies:
            # Only the body in use is kept, because each is a model.
            self._bodies = {(task.name, variant.name): variant.body(task)}
        settings = study.train_settings(key.seed, key.rate)
        parts = features["train"], features["dev"], features["test"]
        start_s = time.monotonic()
        hidden_size = variant.base.config.hidden_size
        teacher_s = 0.0
        try:
            if variant.with_pseudo_labels:
                examples, teacher_s = self._label_unlabelled(task, variant, key, data, features, report)
                parts, start_s = ([*parts[0], *examples], *parts[1:]), time.monotonic()
            trained = fine_tune(
                self._bodies[task.name, variant.name], hidden_size, data, parts, settings, report, device=study.device
            )
        except ConfigError:
            return RunResult(seconds=time.monotonic() - start_s)  # the training diverged at this learning rate
        return RunResult(
            dev=trained.scores[f"dev_{task.metric}"],
            test=trained.scores[f"test_{task.metric}"],
            scores=trained.scores,
            best_epoch=trained.best_epoch,
            epochs=len(trained.curve),
            trained_parameters=sum(p.numel() for p in trained.body.parameters() if p.requires_grad)
            + sum(array.size for array in trained.head.arrays.values()),
            seconds=teacher_s + time.monotonic() - start_s,
            dev_without=list(trained.dev.without),
            more=variant.measure_more(task, data, trained) if variant.measure_more else {},
        )

    def _label_unlabelled(
        self,
        task: EvalTask,
        variant: Variant,
        key: RunKey,
        data: LabelledData,
        features: Mapping[str, list[Prepared]],
        report: Report,
    ) -> tuple[list[Prepared], float]:
        """Return the unlabelled examples with a teacher's labels, and the seconds; kept for the seed's other learning rates."""
        teacher = (task.name, variant.source.name, key.seed)
        if self._pseudo_labelled is None or self._pseudo_labelled[0] != teacher:
            self._pseudo_labelled = None  # free the last features before the next are made
            start_s = time.monotonic()
            labelled = pseudo_labelled(
                variant.base,
                data,
                (features["train"], features["dev"], []),
                features["unlabelled"],
                self._study.train_settings(key.seed, key.rate),
                report,
                device=self._study.device,
            )
            self._pseudo_labelled = teacher, labelled.examples, time.monotonic() - start_s
        return self._pseudo_labelled[1:]

    def _finished_s(self) -> float:
        """Return the estimated seconds of all finished runs, and show how many runs there are."""
        counts = {(t.name, v.name): self.finished.count(t, v) for t, v in self._study.pairs()}
        totals = {(t.name, v.name): self.finished.total(t, v) for t, v in self._study.pairs()}
        total_s = sum(total * self._run_s[pair] for pair, total in totals.items())
        words = f"{sum(counts.values())} of {sum(totals.values())} runs, seconds of work"
        self._progress.update(self._overall, description=words, total=max(1, round(total_s)))
        return sum(count * self._run_s[pair] for pair, count in counts.items())

    def _show_overall(self, seconds: float) -> None:
        self._progress.update(self._overall, completed=round(seconds))
