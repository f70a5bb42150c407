"""Options that the evaluations share, and what they come to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.nn.dtype import choose_device
from hplm.progress import bar_report, progress_bars
from hplm_builder.evaluation.budget import BUDGETS, Budget, budget_of
from hplm_builder.evaluation.cost import estimate
from hplm_builder.evaluation.results import Results
from hplm_builder.evaluation.search import search
from hplm_builder.evaluation.study import Found, Study
from hplm_builder.evaluation.summary import training_of
from hplm_builder.evaluation.tasks import EvalTask, read_tasks
from hplm_builder.evaluation.variants import Variant

SEEDS = (0, 1, 2)

DataOption = Annotated[
    list[Path] | None, typer.Option("--data", help="Folder of a task with train, dev and test; repeat for more.")
]
RootOption = Annotated[Path | None, typer.Option("--root", help="Folder of such folders: all of them.")]
BudgetOption = Annotated[str, typer.Option("--budget", help="cpu: train examples are capped; full: nothing is.")]
ExamplesOption = Annotated[
    int | None, typer.Option("--examples", min=2, help="Train examples of a task at most, instead of the budget's.")
]
EpochsOption = Annotated[int | None, typer.Option("--epochs", min=1, help="Instead of the budget's.")]
SeedOption = Annotated[list[int] | None, typer.Option("--seed", min=0, help="Repeat for more; default: 0, 1 and 2.")]
PoolingOption = Annotated[str, typer.Option("--pooling", help="What a classification's head sees: mean or cls.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Of this process; 1 where several share --resume.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume", help="Finished runs are kept here: go on where it was, or share the work with other processes."
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say how long it would take.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A look in seconds: a few examples, one epoch, one seed.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the artifacts.")]
BaseOption = Annotated[str, typer.Option("--base", help="Name of the base.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")]


def make_study(
    tasks: Sequence[EvalTask],
    variants: Sequence[Variant],
    budget: Budget,
    seeds: Sequence[int] | None,
    pooling: str,
    device: torch.device,
) -> Study:
    """With the seeds that were given, or three, of which a quick look has one."""
    chosen = tuple(seeds) if seeds else SEEDS[: 1 if budget.name == "quick" else None]
    study = Study(tasks, variants, budget, chosen, pooling, device)
    budget.train_settings(chosen[0], variants[0].rate, pooling, 1.0)  # what is wrong with them shows now
    return study


def read_settings(
    data: Sequence[Path] | None,
    root: Path | None,
    budget: str,
    examples: int | None,
    epochs: int | None,
    quick: bool,
    threads: int | None,
    device: str,
) -> tuple[list[EvalTask], Budget, torch.device]:
    """What the shared options say. Raises DataError, ConfigError."""
    chosen = budget_of("quick" if quick else budget, examples, epochs)
    if threads is not None:
        torch.set_num_threads(threads)
    return read_tasks(data or (), root), chosen, choose_device(device)


@contextmanager
def kept_results(resume: Path | None) -> Iterator[Results]:
    """The folder of finished runs; without `resume` one that is gone at the end."""
    if resume is not None:
        yield Results(resume)
        return
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        yield Results(Path(folder))


def conduct(study: Study, results: Results, dry_run: bool) -> Found:
    """Print what it will take, do it, say what this process did of it. A dry run ends the program after the first."""
    with progress_bars() as progress:
        found = estimate(study, results, bar_report(progress, "runs"))
        found.show(study, progress.console)
        if dry_run:
            raise typer.Exit
        answer, done_here = search(study, results, found.workload, progress)
        total = study.runs_each * sum(1 for _ in study.pairs())
        progress.console.print(f"{done_here} of {total} runs were done here", highlight=False)
    return answer


def about_study(study: Study, found: Found, more: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of how it was made."""
    return {
        **more,
        "trained": training_of(found),
        "budget": asdict(study.budget),
        "seeds": list(study.seeds),
        "searched_seeds": list(study.searched_seeds),
        "learning_rates": {variant.name: list(study.budget.rates(variant.rate)) for variant in study.variants},
        "pooling": study.pooling,
        "device": study.device.type,
        "examples": {
            task.name: {
                part: len(getattr(task.within(study.budget, study.seeds[0]), part)) for part in ("train", "dev", "test")
            }
            for task in study.tasks
        },
    }


DEFAULT_BUDGET = BUDGETS["cpu"].name
