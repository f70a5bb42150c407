"""Options that the `hplm eval` studies share, and running a study with them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.models import base as bases
from hplm.models.device import choose_device
from hplm.reporting.benchmark_result import JsonOption
from hplm.reporting.command_options import with_shared
from hplm.reporting.progress import bar_report, progress_bars
from hplm.store.layout import Store
from hplm_builder.cli.options import DEFAULT_STORE, StoreOption
from hplm_builder.data.data_warnings import leak_warnings
from hplm_builder.evaluation.search.budget import Budget, budget_of
from hplm_builder.evaluation.search.eval_task import EvalTask, read_tasks
from hplm_builder.evaluation.search.finished_runs import BestRuns
from hplm_builder.evaluation.search.run_store import RunStore
from hplm_builder.evaluation.search.search_loop import search
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.search.study import Study, Variant
from hplm_builder.evaluation.search.summary import training_summary
from hplm_builder.evaluation.search.time_estimate import estimate

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class EvalOptions:
    """The options of every study."""

    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Folder of a task with train, dev and test; repeat for more.")
    ] = None
    root: Annotated[Path | None, typer.Option(help="Folder that holds such folders; all of them are read.")] = None
    budget: Annotated[str, typer.Option(help="cpu: at most 900 train and 400 dev examples; full: all examples.")] = (
        "cpu"
    )
    examples: Annotated[
        int | None, typer.Option(min=2, help="Most train examples of a task, instead of the budget's.")
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of a run at most, instead of the budget's.")] = None
    search_every_seed: Annotated[
        bool | None,
        typer.Option(
            "--search-every-seed/--search-first-seed",
            help="Search learning rates with each seed, or with the first seed for all; default: the budget's.",
        ),
    ] = None
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="Seed of a run; repeat for more; default: 0, 1 and 2.")
    ] = None
    store: StoreOption = DEFAULT_STORE
    pooling: Annotated[
        str | None, typer.Option(help="What the head of a classification reads: mean (the default) or cls.")
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of this process; give 1 if several processes share --resume.")
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps finished runs, to continue later or to share the work with other processes."
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how long it would take.")] = False
    quick: Annotated[bool, typer.Option("--quick", help="A try in seconds: a few examples, one epoch, one seed.")] = (
        False
    )
    json_file: JsonOption = None

    @property
    def pooled(self) -> str:
        """The pooling of the heads that are trained."""
        return self.pooling or "mean"

    def read(self) -> tuple[list[EvalTask], Budget, torch.device]:
        """Return the tasks, the budget and the device. Raises DataError, ConfigError."""
        budget = budget_of("quick" if self.quick else self.budget, self.examples, self.epochs, self.search_every_seed)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return read_tasks(self.data or (), self.root), budget, choose_device(self.device)

    def served(self, base: str, domain: str, miss: str = "compute") -> ServedDomain:
        """Open a base of --store, with a PLOT or domain for the features. Raises ConfigError, ArtifactError."""
        store = Store.at(self.store)
        return ServedDomain(store, bases.load(store.base(base)), domain, miss)

    def study(
        self, tasks: Sequence[EvalTask], variants: Sequence[Variant], budget: Budget, device: torch.device
    ) -> Study:
        """Return the study with the given seeds; the default is three seeds, or one with --quick."""
        seeds = tuple(self.seed) if self.seed else SEEDS[: 1 if budget.name == "quick" else None]
        study = Study(tasks, variants, budget, seeds, self.pooled, device)
        study.train_settings(seeds[0], variants[0].rate)  # raises now if a setting is wrong
        return study

    def run(
        self, tasks: Sequence[EvalTask], variants: Sequence[Variant], budget: Budget, device: torch.device
    ) -> tuple[Study, BestRuns]:
        """Run the study, and keep its runs in the --resume folder. A dry run ends the program before."""
        study = self.study(tasks, variants, budget, device)
        with open_run_store(self.resume) as store:
            return study, run_study(study, store, self.dry_run)


eval_command = with_shared


@contextmanager
def open_run_store(resume: Path | None) -> Iterator[RunStore]:
    """Yield the store of finished runs in `resume`, or in a temporary folder without it."""
    if resume is not None:
        yield RunStore(resume)
        return
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        yield RunStore(Path(folder))


def run_study(study: Study, store: RunStore, dry_run: bool) -> BestRuns:
    """Print how long the study takes, and run it. A dry run ends the program after printing."""
    with progress_bars() as progress:
        expected = estimate(study, store, bar_report(progress, "runs"))
        expected.show(study, progress.console)
        if dry_run:
            raise typer.Exit
        return search(study, store, expected.run_s, progress)


def study_settings(study: Study, best: BestRuns, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a benchmark result: how the study was made, and `more` of the command's own."""
    drawn = {task.name: task.sample(study.budget, study.seeds[0]) for task in study.tasks}
    return {
        **more,
        "trained": training_summary(best),
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
        "repeats": {task.name: dict(task.data.repeats) for task in study.tasks if task.data.repeats},
        "leaks": {name: warnings for name, data in drawn.items() if (warnings := leak_warnings(data))},
    }
