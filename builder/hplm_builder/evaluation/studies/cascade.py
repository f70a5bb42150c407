"""`hplm eval cascade`: a tenant's cascade beside other policies, its settings and its promise (Tabi, section 7)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress

from hplm.cascade.calibration import Calibration, measure_calibration
from hplm.errors import ConfigError
from hplm.profiles.profile import Profile
from hplm.reporting.benchmark_result import Goal, JsonOption, Report, writable
from hplm.reporting.progress import bar_report, progress_bars
from hplm.store.layout import Store
from hplm_builder.cli.options import DEFAULT_STORE, StoreOption
from hplm_builder.evaluation.cascade.answered import Row, averaged, policy_row
from hplm_builder.evaluation.cascade.cascade_tenants import CascadeTenant, TenantOutputs, find_tenants, outputs_of
from hplm_builder.evaluation.cascade.contract import Resample, contract_row
from hplm_builder.evaluation.cascade.policies import CASCADE, SINGLE_LARGE
from hplm_builder.evaluation.cascade.tenant_study import (
    TARGET_BELOW,
    TenantStudy,
    best_level_accuracy,
    resample_tenant,
    study_tenant,
)
from hplm_builder.evaluation.search.time_estimate import show_warnings
from hplm_builder.profiles.base_profile import profile_of

# Goals of the cascade against the single large level.
MEAN_BELOW = 25.0  # percent of the mean latency
MOST_POINTS = 1.0  # percentage points of accuracy
P99_TIMES = 1.3
MOST_EXCESS = 0.02  # calibration error above chance
LEAST_KEPT = 95.0  # percent of the resamples that keep the promise
RESAMPLES = 200


def cascade(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", help="Folder named after a tenant, TASK-SEED, with train, dev, test and proof; repeatable."
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder that holds such folders; all of them are read.")] = None,
    store: StoreOption = DEFAULT_STORE,
    resume: Annotated[
        Path | None, typer.Option(help="Folder that keeps what the levels answer, to continue later.")
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=0, help="Resamples of each task, of which examples select, prove and judge; 0: none.")
    ] = RESAMPLES,
    logic_ms: Annotated[
        float,
        typer.Option(min=0, help="Own logic of the model `cascade` for a request, as `hplm bench cascade` shows."),
    ] = 0.0,
    requests: Annotated[
        Path | None, typer.Option(callback=writable, help="Also write the test requests for `hplm bench cascade`.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of this process.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare tenants' cascades with single levels, INFaaS, Cocktail and early exit, as Tabi's section 7 does.

    The tenants are in --store already, with versions over two bases or more (`hplm tenant create --levels`), and are called
    TASK-SEED, as their folders of data. Levels answer dev, proof and test once. Times are those of the profiles
    (`hplm profile`), one request at a time; `hplm bench cascade` measures the same on a server.

    Example: hplm eval cascade --root data --store models/store --resume runs --pictures pictures --json cascade.json
    """
    if threads is not None:
        torch.set_num_threads(threads)
    opened = Store.at(store)
    folders = [*(data or ()), *(sorted(path for path in root.iterdir() if path.is_dir()) if root is not None else ())]
    tenants = find_tenants(opened, folders)
    profiles = read_profiles_of(opened, tenants)
    if requests is not None:
        write_requests(requests, tenants)
    with progress_bars() as progress, _kept(resume) as folder:
        show_warnings(progress.console, {tenant.name: tenant.warnings for tenant in tenants})
        found = {tenant.name: _outputs(tenant, folder, progress) for tenant in tenants}
        studies = {tenant.name: study_tenant(tenant, found[tenant.name], profiles, logic_ms) for tenant in tenants}
        contracts = contract_rows(tenants, found, profiles, resamples, progress)
    by_task: dict[str, list[TenantStudy]] = {}
    for study in studies.values():
        by_task.setdefault(study.task, []).append(study)
    rows = [*study_rows(by_task, packing_of(profiles)), *contracts]
    if pictures is not None:
        _draw(pictures, rows, by_task)
    settings = {
        "tenants": {
            tenant.name: {
                **tenant.data.counts,
                "proof": len(tenant.proof),
                "levels": {level.base: round(level.temperature, 3) for level in found[tenant.name].outputs.levels},
                "target": round(studies[tenant.name].target, 4),
                **({"warnings": list(tenant.warnings)} if tenant.warnings else {}),
                "plan": "selected here" if tenant.plan is None else f"version {tenant.plan.levels[-1].number}",
            }
            for tenant in tenants
        },
        "profiles": {base: profile_settings(profile) for base, profile in profiles.items()},
        "packing": packing_of(profiles),
        "logic_ms": logic_ms,
        "resamples": resamples,
    }
    Report("cascade-quality", settings, rows, goals_of(rows)).publish(json_file)


def read_profiles_of(store: Store, tenants: Sequence[CascadeTenant]) -> dict[str, Profile]:
    """Return the kept profile of each base of the tenants on this machine, or a quick measurement."""
    levels = {level.base_name: level for tenant in tenants for level in tenant.levels}
    return {name: profile_of(store, level.base, level.domain) for name, level in sorted(levels.items())}


def packing_of(profiles: Mapping[str, Profile]) -> dict[str, float]:
    """Return the packing factor of each base (Tabi, 7.1): how many copies of it compute at once without sharing a core.

    A GPU runs one copy.
    """
    return {
        base: 1.0 if each.device != "cpu" else float(max(1, each.cores // each.threads))
        for base, each in ((base, profile.conditions) for base, profile in profiles.items())
    }


def profile_settings(profile: Profile) -> dict[str, Any]:
    """Return what a benchmark result says about a profile."""
    conditions = profile.conditions
    return {
        "kind": profile.kind,
        "measured_at": profile.measured_at,
        "processor": conditions.processor,
        "device": conditions.device,
        "threads": conditions.threads,
        "dtype": conditions.dtype,
    }


@contextmanager
def _kept(resume: Path | None) -> Iterator[Path]:
    """Yield the folder for outputs, or a temporary one."""
    if resume is not None:
        yield resume
        return
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        yield Path(folder)


def _outputs(tenant: CascadeTenant, folder: Path, progress: Progress) -> TenantOutputs:
    return outputs_of(tenant, folder / tenant.name, bar_report(progress, tenant.name))


def write_requests(path: Path, tenants: Sequence[CascadeTenant]) -> None:
    """Write the test texts of all tenants as JSON lines of task, tenant, text and label. Raises ConfigError for pairs."""
    lines = []
    for tenant in tenants:
        if tenant.data.texts != 1:
            raise ConfigError(f"tenant {tenant.name!r} is of pairs, and `hplm bench cascade` sends single texts")
        lines += [
            json.dumps(
                {"task": tenant.task, "tenant": tenant.name, "text": example.text, "label": example.label},
                ensure_ascii=False,
            )
            for example in tenant.data.test
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def contract_rows(
    tenants: Sequence[CascadeTenant],
    found: Mapping[str, TenantOutputs],
    profiles: Mapping[str, Profile],
    resamples: int,
    progress: Progress,
) -> list[Row]:
    """Return the rows of the promise, by task: without a target, and with one. The seeds of a task share the resamples."""
    by_task: dict[str, list[CascadeTenant]] = {}
    for tenant in tenants:
        by_task.setdefault(tenant.task, []).append(tenant)
    rows = []
    for task, members in by_task.items() if resamples else ():
        for has_target in (False, True):
            drawn: list[Resample] = []
            for place, tenant in enumerate(members):
                outputs = found[tenant.name]
                target = round(best_level_accuracy(outputs) - TARGET_BELOW, 3) if has_target else None
                count = len(range(place, resamples, len(members)))
                report = bar_report(progress, f"{tenant.name}, {'a' if has_target else 'no'} target")
                parts, of_tenant = resample_tenant(
                    outputs, profiles, count, np.random.default_rng(place), target, report
                )
                drawn += of_tenant
            texts = sum(map(len, (outputs.outputs.select, outputs.outputs.proof, outputs.test)))
            rows.append(contract_row(task, target, parts, texts, drawn))
    return rows


def study_rows(by_task: Mapping[str, Sequence[TenantStudy]], packing: Mapping[str, float]) -> list[Row]:
    """Return all tables, each with the means over the seeds of a task."""
    studies = [study for members in by_task.values() for study in members]
    policies = [
        policy_row(task, [study.policies[name] for study in members], packing)
        for task, members in by_task.items()
        for name in members[0].policies
    ]
    for row in policies:
        large = next(one for one in policies if (one["task"], one["policy"]) == (row["task"], SINGLE_LARGE))
        row["mean_ms_less"] = 100 * (1 - row["mean_ms"] / large["mean_ms"])
    return [
        *policies,
        *averaged([row for study in studies for row in study.cut_offs], "cut_off", "task"),
        *averaged([row for study in studies for row in study.alphas], "alpha", "task"),
        *averaged([row for study in studies for row in study.sharing], "shared"),
        *averaged([row for study in studies for row in study.levels], "levels", "task"),
        *averaged([row for study in studies for row in study.calibration], "calibrated", "task"),
    ]


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of the cascade against the single large level, of the calibration and of the promise."""
    by_policy = {(row["task"], row["policy"]): row for row in rows if "policy" in row}
    pairs = [(by_policy[task, SINGLE_LARGE], row) for (task, name), row in by_policy.items() if name == CASCADE]
    against = "of the cascade against the single large level"
    goals = [
        Goal(
            "cascade-mean",
            f"mean latency {against}, average over tasks",
            MEAN_BELOW,
            fmean(row["mean_ms_less"] for _, row in pairs),
            "% below",
            "higher",
        ),
        Goal(
            "cascade-accuracy",
            f"accuracy lost {against}, average over tasks",
            MOST_POINTS,
            fmean(large["accuracy"] - row["accuracy"] for large, row in pairs),
            "points",
            "lower",
        ),
        Goal(
            "cascade-p99",
            f"p99 {against}, the worst task",
            P99_TIMES,
            max(row["p99_ms"] / large["p99_ms"] for large, row in pairs),
            "x",
            "lower",
        ),
        Goal(
            "cascade-calibration",
            "calibration error above chance, the worst level of a task",
            MOST_EXCESS,
            max(row["excess"] for row in rows if row.get("calibrated", CASCADE) != CASCADE),
            "",
            "lower",
        ),
    ]
    if kept := [row["kept"] for row in rows if row.get("target") == "none"]:
        text = "resamples that keep the promise, average over tasks"
        goals.append(Goal("cascade-promise", text, LEAST_KEPT, fmean(kept), "%", "higher"))
    return goals


def pooled_calibration(members: Sequence[TenantStudy]) -> dict[str, Calibration]:
    """Return the calibration of each level and of the cascade, over all seeds of a task."""
    return {
        name: measure_calibration(
            *(np.concatenate([study.reliability[name][column] for study in members]) for column in (0, 1)), draws=1
        )
        for name in members[0].reliability
    }


def _draw(folder: Path, rows: Sequence[Row], by_task: Mapping[str, Sequence[TenantStudy]]) -> None:
    # Imported here, because no other command of the group needs matplotlib.
    from hplm_builder.evaluation.cascade.pictures import draw_pictures

    def with_column(name: str) -> list[Row]:
        return [row for row in rows if next(iter(row)) == name]

    draw_pictures(
        folder,
        [row for row in rows if "policy" in row],
        with_column("cut_off"),
        with_column("alpha"),
        {task: pooled_calibration(members) for task, members in by_task.items()},
    )
