"""Options that the evaluations share, and what they come to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.models.device import choose_device
from hplm.reporting.benchmark_result import JsonOption
from hplm.reporting.command_options import with_shared
from hplm.reporting.progress import bar_report, progress_bars
from hplm_builder.cli.options import DEFAULT_STORE, StoreOption
from hplm_builder.data.data_warnings import leak_warnings
from hplm_builder.evaluation.search.budget import Budget, budget_of
from hplm_builder.evaluation.search.eval_task import EvalTask, read_tasks
from hplm_builder.evaluation.search.run_store import RunStore
from hplm_builder.evaluation.search.search_loop import search
from hplm_builder.evaluation.search.study import BestRuns, Study
from hplm_builder.evaluation.search.summary import training_summary
from hplm_builder.evaluation.search.time_estimate import estimate
from hplm_builder.evaluation.search.variants import Variant

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class EvalOptions:
    """What every evaluation is asked for."""

    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Folder of a task with train, dev and test; repeat for more.")
    ] = None
    root: Annotated[Path | None, typer.Option(help="Folder of such folders: all of them.")] = None
    budget: Annotated[str, typer.Option(help="cpu: train and dev examples are capped; full: nothing is.")] = "cpu"
    examples: Annotated[
        int | None, typer.Option(min=2, help="Train examples of a task at most, instead of the budget's.")
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the budget's.")] = None
    search_every_seed: Annotated[
        bool | None,
        typer.Option(
            "--search-every-seed/--search-first-seed",
            help="Learning rates are searched with each seed, or with the first for all; default: the budget's.",
        ),
    ] = None
    seed: Annotated[list[int] | None, typer.Option(min=0, help="Repeat for more; default: 0, 1 and 2.")] = None
    store: StoreOption = DEFAULT_STORE
    pooling: Annotated[
        str | None, typer.Option(help="What a classification's head reads: mean, the default, or cls.")
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[int | None, typer.Option(min=1, help="Of this process; 1 where several share --resume.")] = None
    resume: Annotated[
        Path | None,
        typer.Option(help="Finished runs are kept here: go on where it was, or share the work with other processes."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how long it would take.")] = False
    quick: Annotated[bool, typer.Option("--quick", help="A look in seconds: a few examples, one epoch, one seed.")] = (
        False
    )
    json_file: JsonOption = None

    @property
    def pooled(self) -> str:
        """What heads that are trained read."""
        return self.pooling or "mean"

    def read(self) -> tuple[list[EvalTask], Budget, torch.device]:
        """Tasks, what may be spent on them, and where. Raises DataError, ConfigError."""
        budget = budget_of("quick" if self.quick else self.budget, self.examples, self.epochs, self.search_every_seed)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return read_tasks(self.data or (), self.root), budget, choose_device(self.device)

    def study(
        self, tasks: Sequence[EvalTask], variants: Sequence[Variant], budget: Budget, device: torch.device
    ) -> Study:
        """With the seeds that were given, or three, of which a quick look has one."""
        seeds = tuple(self.seed) if self.seed else SEEDS[: 1 if budget.name == "quick" else None]
        study = Study(tasks, variants, budget, seeds, self.pooled, device)
        budget.train_settings(seeds[0], variants[0].rate, self.pooled)  # what is wrong with them shows now
        return study

    def run(
        self, tasks: Sequence[EvalTask], variants: Sequence[Variant], budget: Budget, device: torch.device
    ) -> tuple[Study, BestRuns]:
        """Search, and keep what was found. A dry run ends the program before."""
        study = self.study(tasks, variants, budget, device)
        with open_run_store(self.resume) as results:
            return study, run_study(study, results, self.dry_run)


eval_command = partial(with_shared, EvalOptions)


@contextmanager
def open_run_store(resume: Path | None) -> Iterator[RunStore]:
    """The folder of finished runs; without `resume` one that is gone at the end."""
    if resume is not None:
        yield RunStore(resume)
        return
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        yield RunStore(Path(folder))


def run_study(study: Study, results: RunStore, dry_run: bool) -> BestRuns:
    """Print what it will take, and do it. A dry run ends the program after the first."""
    with progress_bars() as progress:
        found = estimate(study, results, bar_report(progress, "runs"))
        found.show(study, progress.console)
        if dry_run:
            raise typer.Exit
        return search(study, results, found.run_s, progress)


def study_settings(study: Study, found: BestRuns, more: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of how it was made."""
    drawn = {task.name: task.sample(study.budget, study.seeds[0]) for task in study.tasks}
    return {
        **more,
        "trained": training_summary(found),
        "budget": asdict(study.budget),
        "seeds": list(study.seeds),
        "searched_seeds": list(study.searched_seeds),
        "learning_rates": {variant.name: variant.rate for variant in study.variants},
        "adapter_at": {
            variant.name: at for variant in study.variants if (at := variant.about(study.tasks[0]).get("adapter_at"))
        },
        "pooling": study.pooling,
        "device": study.device.type,
        "examples": {name: data.counts for name, data in drawn.items()},
        "leaks": {name: said for name, data in drawn.items() if (said := leak_warnings(data))},
    }
