"""`hplm eval students`: how good students are beside their teacher, and what each part of their training is worth."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Annotated, Any, cast

import typer
from rich.progress import Progress

from hplm.adapters.tenant import Pooling
from hplm.errors import ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import bar_report, progress_bars
from hplm.store.layout import Store
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_options import SEEDS, EvalOptions, eval_command, open_run_store
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.run_store import RunKey, RunResult, RunStore
from hplm_builder.evaluation.students import taught_task
from hplm_builder.evaluation.students.student_rows import ROWS, STUDENTS, Place, StudentRow
from hplm_builder.evaluation.students.student_run import PreparedTask, computed_domain, most_training, run_row
from hplm_builder.evaluation.students.taught_task import TaughtTask, teach
from hplm_builder.students.student_build import check_form
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.students.teacher import Candidate, check_task
from hplm_builder.tenants.finetune import TrainSettings

# Goals of the paper's Table 1, as shares of the teacher's score in percent.
BEST_PREFIX, ONE_STUDENT = 96.0, 95.0
# Examples on which the time of a run is measured.
MEASURED_EXAMPLES = 32
# A store's folder beside the runs, with a teacher for each task and seed.
TEACHERS = "teachers"
POLL_S = 2.0  # seconds between looks for runs of other processes

TrunkOption = Annotated[str, typer.Option(help="Base of --store where students start: a trunk of two layers.")]
RowOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Row to compare; repeat for more. Default: {STUDENTS}. There are {', '.join(ROWS)}."),
]


@dataclass(frozen=True)
class StudentStudy:
    """Rows by tasks and seeds. `places` has the base of each row's students, `teachers` the bases of possible teachers."""

    tasks: Sequence[EvalTask]
    rows: Sequence[StudentRow]
    places: Mapping[Place, Base]
    teachers: Sequence[Base]
    budget: Budget
    seeds: tuple[int, ...]
    settings: StudentSettings
    with_unlabelled: bool

    def keys(self) -> list[tuple[EvalTask, int, StudentRow]]:
        """Return all runs. Runs with the same teacher are neighbours."""
        return [(task, seed, row) for task in self.tasks for seed in self.seeds for row in self.rows]

    def data(self, task: EvalTask, seed: int) -> LabelledData:
        """Return the examples of a run."""
        return task.sample(self.budget, seed, unlabelled=self.with_unlabelled)

    def key(self, task: EvalTask, seed: int, row: StudentRow) -> RunKey:
        """Return the name of a run."""
        return RunKey(task.name, row.name, seed, row.settings(self.settings).student_rate)

    def about(self, task: EvalTask, seed: int, row: StudentRow) -> dict[str, Any]:
        """Return what a run depends on, in JSON values."""
        return {
            **self.about_teacher(task, seed),
            "base": self.places[row.place].fingerprint,
            "settings": replace(row.settings(self.settings), seed=seed).changed,
        }

    def about_teacher(self, task: EvalTask, seed: int) -> dict[str, Any]:
        """Return what a teacher depends on, in JSON values."""
        return {
            "data": task.digest,
            "train examples": self.budget.most_train,
            "dev examples": self.budget.most_dev,
            "test examples": self.budget.most_test,
            "unlabelled": self.with_unlabelled,
            "teachers": [base.fingerprint for base in self.teachers],
            "teacher epochs": self.budget.epochs,
            "seed": seed,
        }

    def candidates(self) -> list[Candidate]:
        """Return the models that may teach: adapters over each base, and all layers of each base."""
        return [
            Candidate(f"{base.config.name}, {'all layers' if is_full else 'adapters'}", base, domain, is_full=is_full)
            for base in self.teachers
            for domain in [computed_domain(base)]
            for is_full in (False, True)
        ]

    def teacher_settings(self, seed: int) -> TrainSettings:
        """Return how teachers are trained."""
        budget = self.budget
        return TrainSettings(budget.epochs, pooling=self.settings.pooling, seed=seed, patience=budget.patience)


@eval_command
def students(
    shared: EvalOptions,
    trunk: TrunkOption,
    one_layer: Annotated[str, typer.Option(help="Base of --store: a trunk of one layer, for row one-layer.")] = "",
    over_ngrams: Annotated[
        str, typer.Option(help="Base of --store: a trunk over the n-gram encoder, for row over-ngrams.")
    ] = "",
    teacher: Annotated[
        list[str] | None,
        typer.Option(help="Base of possible teachers; repeat for more. Default: the base that --trunk was made from."),
    ] = None,
    row: RowOption = None,
    most_students: Annotated[int, typer.Option(min=1, help="Most students.")] = StudentSettings.most_students,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Learn from as many unlabelled texts of the train part too.")
    ] = False,
) -> None:
    """Compare students with their teacher by number of students, and with other trainings (the paper's Tables 1 and 3).

    The teacher is the best model on dev of adapters and of all layers trained, over each base of --teacher. All rows of a task
    and a seed have the same teacher. Dev chooses epochs and the best prefix; test is reported. Examples:

      hplm eval students --trunk trunk-2 --data data/sst-2 --store models/store --quick

      hplm eval students --trunk trunk-2 --root data --store models/store --threads 1 --resume runs --json students.json

      hplm eval students --trunk trunk-2 --one-layer trunk-1 --row one-layer --row bagging --data data/chemprot --resume runs
    """
    study = _study(shared, trunk, one_layer, over_ngrams, teacher or (), row or [STUDENTS], most_students, unlabelled)
    with open_run_store(shared.resume) as store, progress_bars() as progress:
        loop = _Loop(study, store, progress)
        expected_s = loop.expected_s()
        progress.console.print(
            f"at most about {expected_s / 60:,.0f} minutes are left for one process", highlight=False
        )
        if shared.dry_run:
            raise typer.Exit
        while loop.do_open_runs():
            time.sleep(POLL_S)
        found = loop.finished()
    rows = result_rows(study, found)
    Report("students", _settings(study, found), rows, goals_of(rows)).publish(shared.json_file)


def _study(
    shared: EvalOptions,
    trunk: str,
    one_layer: str,
    over_ngrams: str,
    teachers: Sequence[str],
    names: Sequence[str],
    most_students: int,
    with_unlabelled: bool,
) -> StudentStudy:
    """Open everything that the study needs. Raises ConfigError, DataError, ArtifactError."""
    if unknown := sorted(set(names) - set(ROWS)):
        raise ConfigError(f"--row: there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if shared.search_every_seed is not None:
        raise ConfigError("students have no search over learning rates: leave out --search-every-seed")
    if shared.device == "cuda":
        raise ConfigError("students are trained on the CPU: leave out --device")
    chosen = [row for name, row in ROWS.items() if name in names]
    tasks, budget, _ = shared.read()
    for task in tasks:
        check_task(task.data.task)
    store = Store.at(shared.store)
    opened = bases.load(store.base(trunk))
    wanted = {row.place for row in chosen}
    places: dict[Place, Base] = {"trunk": opened}
    further: dict[Place, str] = {"one-layer": one_layer, "over-ngrams": over_ngrams, "parent": opened.trunk_of or ""}
    for place, name in further.items():
        if place in wanted:
            if not name:
                raise ConfigError(_missing(place, trunk))
            places[place] = bases.load(store.base(name))
    taught_by = teachers or ([opened.trunk_of] if opened.trunk_of else [])
    if not taught_by:
        raise ConfigError(f"base {trunk} was not made from another base, so give its teachers: --teacher BASE")
    usual = StudentSettings(most_students=most_students, pooling=cast(Pooling, shared.pooled))
    if budget.name == "quick":
        usual = replace(usual, epochs=1, pruning_epochs=1, most_students=min(most_students, 2))
    elif shared.epochs is not None:
        usual = replace(usual, epochs=shared.epochs, pruning_epochs=min(usual.pruning_epochs, shared.epochs))
    seeds = tuple(shared.seed) if shared.seed else SEEDS[: 1 if budget.name == "quick" else None]
    loaded = [bases.load(store.base(name)) for name in taught_by]
    return StudentStudy(tasks, chosen, places, loaded, budget, seeds, usual, with_unlabelled)


def _missing(place: Place, trunk: str) -> str:
    if place == "parent":
        return f"row half-depth needs the base that {trunk} was made from, but {trunk} is no trunk"
    return f"row {place} needs a base: give --{place} NAME"


class _Loop:
    """Does runs that no other process does, and keeps the last teacher and the last features, which the next run needs."""

    def __init__(self, study: StudentStudy, store: RunStore, progress: Progress) -> None:
        self._study, self._store, self._progress = study, store, progress
        self._bar = progress.add_task("runs", total=len(study.keys()))
        self._teacher: tuple[tuple[str, int], TaughtTask] | None = None
        self._prepared: tuple[tuple[str, int, Place], PreparedTask] | None = None

    def finished(self) -> dict[tuple[str, str], list[RunResult]]:
        """Return the results by task and row, in the order of the seeds."""
        found: dict[tuple[str, str], list[RunResult]] = {}
        for task, seed, row in self._study.keys():  # noqa: SIM118
            result = self._read(task, seed, row)
            assert result is not None
            found.setdefault((task.name, row.name), []).append(result)
        return found

    def do_open_runs(self) -> bool:
        """Do each open run that no other process does; return whether runs are still open."""
        done = 0
        keys = self._study.keys()
        for task, seed, row in keys:
            with self._store.claim(self._study.key(task, seed, row).path) as is_ours:
                if is_ours and self._read(task, seed, row) is None:
                    about = self._study.about(task, seed, row)
                    self._store.write(self._study.key(task, seed, row), about, self._run(task, seed, row))
            done += self._read(task, seed, row) is not None
            self._progress.update(self._bar, completed=done)
        return done < len(keys)

    def _read(self, task: EvalTask, seed: int, row: StudentRow) -> RunResult | None:
        return self._store.read(self._study.key(task, seed, row), self._study.about(task, seed, row))

    def _run(self, task: EvalTask, seed: int, row: StudentRow) -> RunResult:
        """Train and score a row. Training that diverges has a result without scores."""
        key, study = self._study.key(task, seed, row), self._study
        data = study.data(task, seed)

        def report(step: str) -> None:
            self._progress.update(self._bar, description=f"{key}: {step}")

        taught = self._taught(task, seed, data)
        prepared = self._features(task, seed, row.place, data)
        settings = replace(row.settings(study.settings), seed=seed)
        if row.place != "parent":
            check_form(study.places[row.place], settings)
        make_body = row.make_body(prepared.upper, settings)
        try:
            return run_row(make_body, data, prepared, taught, settings, report)
        except ConfigError:
            return RunResult()

    def _taught(self, task: EvalTask, seed: int, data: LabelledData) -> TaughtTask:
        """Return the teacher of a task and a seed: the last one, from its file, or trained now."""
        if self._teacher is None or self._teacher[0] != (task.name, seed):
            about = self._study.about_teacher(task, seed)
            kept = self._store.folder / TEACHERS / f"{task.name}-{seed}.pt"
            key = RunKey(task.name, "teacher", seed, 0.0)
            while True:
                with self._store.claim(key.path) as is_ours:
                    if is_ours:
                        if self._store.read(key, about) is None:
                            taught_task.save(self._train_teacher(task, seed, data), kept)
                            self._store.write(key, about, RunResult())
                        self._teacher = (task.name, seed), taught_task.load(kept)
                        break
                time.sleep(POLL_S)
        return self._teacher[1]

    def _train_teacher(self, task: EvalTask, seed: int, data: LabelledData) -> TaughtTask:
        return teach(
            self._study.candidates(),
            data,
            self._study.teacher_settings(seed),
            lambda candidate: bar_report(self._progress, f"{task.name}, seed {seed}: {candidate.name}"),
        )

    def _features(self, task: EvalTask, seed: int, place: Place, data: LabelledData) -> PreparedTask:
        key = (task.name, seed, place)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = None  # free the last features before the next are made
            self._prepared = key, PreparedTask.of(self._study.places[place], data)
        return self._prepared[1]

    def expected_s(self) -> float:
        """Return the most seconds that open runs take, by a short training of each row on a few examples.

        Early stopping takes less. A teacher counts if one of its runs is open.
        """
        study, total_s = self._study, 0.0
        teachers: set[tuple[str, int]] = set()
        per_example_s: dict[tuple[str, str], float] = {}
        for task, seed, row in study.keys():  # noqa: SIM118
            if self._read(task, seed, row) is not None:
                continue
            data = study.data(task, seed)
            count = len(data.train) + len(data.unlabelled)
            few = replace(
                data, train=data.train[:MEASURED_EXAMPLES], dev=data.dev[:8], test=data.test[:8], unlabelled=[]
            )
            if (task.name, seed) not in teachers:
                teachers.add((task.name, seed))
                if (pair := (task.name, "")) not in per_example_s:
                    start_s = time.monotonic()
                    taught = teach(
                        study.candidates(),
                        few,
                        replace(study.teacher_settings(seed), epochs=1),
                        lambda candidate: bar_report(self._progress, f"estimate: {candidate.name}"),
                    )
                    per_example_s[pair] = (time.monotonic() - start_s) / MEASURED_EXAMPLES
                total_s += per_example_s[pair] * len(data.train) * study.budget.epochs
            if (pair := (task.name, row.name)) not in per_example_s:
                brief = replace(row.settings(study.settings), epochs=1, pruning_epochs=1, most_students=1)
                prepared = PreparedTask.of(study.places[row.place], few)
                start_s = time.monotonic()
                make_body = row.make_body(prepared.upper, brief)
                run_row(make_body, few, prepared, taught, brief, lambda step: None)
                per_example_s[pair] = (time.monotonic() - start_s) / most_training(brief, MEASURED_EXAMPLES)
            total_s += per_example_s[pair] * most_training(row.settings(study.settings), count)
        return total_s


def result_rows(study: StudentStudy, found: Mapping[tuple[str, str], Sequence[RunResult]]) -> list[dict[str, Any]]:
    """Return a row for each task and row of the study, and for the default students one for each number of students.

    Scores are test scores in percent, averaged over the seeds that did not diverge. `of_teacher` is the share of the teacher's.
    """
    rows: list[dict[str, Any]] = []
    for (task, name), results in found.items():
        runs = [result for result in results if result.test is not None]
        about = {"task": task, "row": name, "seeds": len(runs)}
        if not runs:
            rows.append({**about, "diverged": len(results)})
            continue
        teacher = [run.more["teacher"]["test"] for run in runs]
        best = [run.test for run in runs if run.test is not None]
        rows.append(
            {
                **about,
                "students": "best on dev: " + ", ".join(str(run.more["best"]) for run in runs),
                **_scores(best, teacher),
                "teacher": 100 * fmean(teacher),
                "dev": 100 * fmean(run.dev for run in runs if run.dev is not None),
                "minutes": fmean(run.seconds for run in runs) / 60,
                "diverged": len(results) - len(runs),
            }
        )
        if name == STUDENTS:
            most = max(len(run.more["prefixes"]) for run in runs)
            for number in range(1, most + 1):
                # A seed with fewer students answers with all it has.
                chosen = [run.more["prefixes"][:number][-1] for run in runs]
                scores = _scores([prefix["test"] for prefix in chosen], teacher)
                rows.append({**about, "students": str(number), **scores, "dev": 100 * fmean(p["dev"] for p in chosen)})
    return rows


def _scores(values: Sequence[float], teacher: Sequence[float]) -> dict[str, Any]:
    return {
        "test": 100 * fmean(values),
        "spread": 100 * stdev(values) if len(values) > 1 else math.nan,
        "of_teacher": 100 * fmean(value / other for value, other in zip(values, teacher, strict=True)),
    }


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals of the default students against their teacher, averages over tasks."""
    goals = []
    for goal, start, text in (
        (BEST_PREFIX, "best on dev", "the best prefix on dev"),
        (ONE_STUDENT, "1", "one student"),
    ):
        shares = [
            row["of_teacher"]
            for row in rows
            if row["row"] == STUDENTS and "of_teacher" in row and row["students"].split(":")[0] == start
        ]
        if shares:
            name = start.replace(" ", "-")
            words = f"score of {text}, as a share of the teacher's, average over tasks"
            goals.append(Goal(f"students-{name}", words, goal, fmean(shares), "%", "higher"))
    return goals


def _settings(study: StudentStudy, found: Mapping[tuple[str, str], Sequence[RunResult]]) -> dict[str, Any]:
    return {
        "rows": {row.name: row.text for row in study.rows},
        "bases": {place: base.config.name for place, base in study.places.items()},
        "seeds": list(study.seeds),
        "examples": {task.name: study.data(task, study.seeds[0]).counts for task in study.tasks},
        "repeats": {task.name: dict(task.data.repeats) for task in study.tasks if task.data.repeats},
        "metrics": {task.name: task.metric for task in study.tasks},
        "settings": study.settings.changed,
        "teachers": {
            f"{task}, {row}": [run.more["teacher"]["name"] for run in results if run.more]
            for (task, row), results in found.items()
            if row == STUDENTS
        },
        "students": {
            f"{task}, {row}": [run.more["students"] for run in results if run.more]
            for (task, row), results in found.items()
        },
    }
