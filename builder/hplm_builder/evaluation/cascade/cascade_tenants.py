"""Tenants of a store for the evaluation of cascades: their levels, their data, and the answers of the levels, computed once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hplm.adapters.tenant import Tenant
from hplm.cascade.level_outputs import CascadeOutputs, PartOutputs
from hplm.cascade.offline import draws_of
from hplm.cascade.plan import CascadePlan
from hplm.engine.open_domain import open_features
from hplm.errors import ConfigError, DataError, MissingArtifactError
from hplm.models import base as bases
from hplm.profiles.profile import Profile
from hplm.registry.registry import Registry
from hplm.reporting.progress import Report
from hplm.store.layout import Store
from hplm.tasks.examples import LabelledText
from hplm.tasks.task_loader import task_named
from hplm_builder.cascade.cascade_build import compute_outputs, set_aside
from hplm_builder.cascade.levels import Level, LevelInput
from hplm_builder.cascade.outputs import ALPHAS, compute_part, load_outputs, save_outputs
from hplm_builder.data.data_warnings import leak_warnings
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.labelled_files import file_of, read_file, read_folder
from hplm_builder.evaluation.cascade.answered import Floats, Integers
from hplm_builder.evaluation.cascade.exit_heads import exit_latency_ms, exits_of, fit_heads, layer_states
from hplm_builder.evaluation.cascade.policies import ExitAnswers
from hplm_builder.evaluation.cascade.pool import calibrated, taken
from hplm_builder.tenants.prepared import Prepared, prepare
from hplm_builder.tenants.tenant_build import load_version
from hplm_builder.tenants.trained_layers import plot_features

# A tenant is called TASK-SEED.
_NAME = re.compile(r"(.+)-(\d+)")
# Degrees of pruning of Fig. 9, which are computed for test texts also where dev has stopped before.
FIGURE_ALPHAS = tuple(alpha for alpha in ALPHAS if alpha <= 0.9)
# The parts for which the answers of exit heads are computed.
EXIT_PARTS = ("select", "test")


@dataclass(frozen=True)
class CascadeTenant:
    """A tenant with versions over two or more bases, and its data.

    `data` has train, the examples that select as dev, and test. `proof` has examples that neither train nor select. `plan` is
    the plan in force, None if the tenant has none. `warnings` are sentences about the data.
    """

    name: str
    task: str
    store: Store
    levels: tuple[LevelInput, ...]
    data: LabelledData
    proof: tuple[LabelledText, ...]
    plan: CascadePlan | None = None
    warnings: tuple[str, ...] = ()

    @cached_property
    def about(self) -> dict[str, Any]:
        """The versions and data that the outputs of the levels depend on, in JSON values."""
        return {
            "levels": {level.base_name: level.tenant.version for level in self.levels},
            "data": self.data.sha256,
            "proof": replace(self.data, dev=list(self.proof), test=[]).sha256,
        }


@dataclass(frozen=True)
class TenantOutputs:
    """The answers of a tenant's levels to the texts that select, prove and judge, and those of its exit heads.

    `exits` has, by part (`select`, `test`), the answers and confidences `[layers, N]` of the heads on the layers of the most
    accurate level.
    """

    outputs: CascadeOutputs
    test: PartOutputs
    exits: Mapping[str, tuple[Integers, Floats]]

    def exit_answers(self, part: str, profile: Profile) -> ExitAnswers:
        """Return the answers of the exit heads to a part, with their times. `profile` is that of the most accurate level."""
        of_part = {"select": self.outputs.select, "test": self.test}[part]
        answers, confidence = self.exits[part]
        latency_ms = exit_latency_ms(profile, len(answers), of_part.whole[-1].tokens)
        return ExitAnswers(self.outputs.levels[-1].base, answers, confidence, of_part.gold, latency_ms)


def served_part(tenant: CascadeTenant, plan: CascadePlan, found: TenantOutputs) -> PartOutputs:
    """Return the answers to the test texts as a server with the plan has them: with its temperatures and its draws.

    Raises DataError if the outputs lack the plan's degree of pruning, because they were computed before the plan.
    """
    temperatures = {level.base: level.dispatch.temperature for level in plan.levels}
    bases = [level.base for level in found.outputs.levels]
    first, *later = (bases.index(level.base) for level in plan.levels)
    if later and plan.levels[1].alpha not in found.test.alphas(first, later):
        raise DataError(
            f"{tenant.name}: the kept outputs are older than the tenant's plan: give --resume another folder"
        )
    of_plan = calibrated(
        found.test, [temperatures.get(level.base, level.temperature) for level in found.outputs.levels]
    )
    texts = [example.text_or_pair for example in tenant.data.test]
    return replace(of_plan, draws=draws_of(tenant.name, plan.levels[-1].number, texts, len(bases)))


def find_tenants(store: Store, folders: Sequence[Path]) -> list[CascadeTenant]:
    """Open the tenants that the folders of data are named after, TASK-SEED each.

    A folder has train, dev and test, and may have `proof.*`; without it a part of dev is set aside by the seed, as
    `hplm tenant create --levels` does. Raises ConfigError, DataError or ArtifactError.
    """
    if not folders:
        raise ConfigError("no tenant: give --data FOLDER, repeatable, or --root FOLDER with a folder for each tenant")
    with closing(Registry.open_read_only(store)) as registry:
        return [_find_tenant(store, registry, folder) for folder in folders]


def _find_tenant(store: Store, registry: Registry, folder: Path) -> CascadeTenant:
    name = folder.name
    if (parts := _NAME.fullmatch(name)) is None:
        raise ConfigError(f"{folder}: a folder is named after its tenant, TASK-SEED, for example sst-2-0")
    data = read_folder(folder)
    if not data.test:
        raise DataError(f"{folder} has no test data, which the evaluation reports on: add test.*")
    if data.task != "classification":
        raise DataError(f"{folder} is a {data.task}: the compared policies are about classifications")
    warnings, given = [*data.repeats.values(), *leak_warnings(data)], None
    if (file := file_of(folder, "proof")) is not None:
        checked = check_data(
            data.train, data.dev, read_file(file), task=data.task, expected_labels=data.labels, test_name="proof"
        )
        given, repeated = checked.test, checked.repeats.get("test")
        warnings += [repeated] if repeated else []
    data, proof, of_proof = set_aside(data, given, int(parts[2]))
    record = registry.tenant(name)
    if len(record.bases) < 2:
        raise ConfigError(f"tenant {name!r} has a version over {record.base} alone: a cascade needs two bases or more")
    levels = []
    for base_name in record.bases:
        current = registry.tenant(name, base_name).current
        base = bases.load(store.base(base_name))
        lineage = [version.path for version in registry.lineage(current.domain_version_id)]
        tenant = load_version(store, current, base)
        if tenant.card.labels != data.labels:
            raise DataError(f"{folder}: tenant {name!r} over {base_name} was trained on other labels than these data")
        levels.append(LevelInput(base, open_features(store, base, lineage), tenant, base_name))
    cascade = registry.cascade_of(name)
    plan = cascade.plan if cascade is not None and cascade.is_in_force else None
    return CascadeTenant(name, parts[1], store, tuple(levels), data, tuple(proof), plan, (*warnings, *of_proof))


def outputs_of(tenant: CascadeTenant, folder: Path, report: Report) -> TenantOutputs:
    """Return what the levels answer, from `folder` if it was computed before; else compute and keep it there.

    Raises DataError if the folder has the outputs of other versions or data.
    """
    about = folder / "about.json"
    if about.exists() and json.loads(about.read_text()) != tenant.about:
        raise DataError(
            f"{folder} has outputs of other versions or data of {tenant.name}: give --resume another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    about.write_text(json.dumps(tenant.about))
    try:
        outputs = load_outputs(folder / "dev")
    except MissingArtifactError:
        outputs = compute_outputs(tenant.levels, tenant.data.dev, tenant.proof, report)
        save_outputs(folder / "dev", outputs)
    try:
        test = load_outputs(folder / "test").select
    except MissingArtifactError:
        test = _compute_test(tenant, outputs, report)
        # The artifact of a cascade has two parts, and the second one has no text here.
        save_outputs(folder / "test", replace(outputs, select=test, proof=taken(test, np.zeros(0, np.int64))))
    exits = folder / "exits.npz"
    if not exits.exists():
        partial = folder / "exits.partial.npz"
        np.savez(partial, **_compute_exits(tenant, outputs, report))
        partial.rename(exits)
    with np.load(exits) as arrays:
        found = {part: (arrays[f"{part}.answers"], arrays[f"{part}.confidence"]) for part in EXIT_PARTS}
    return TenantOutputs(outputs, test, found)


def _compute_test(tenant: CascadeTenant, outputs: CascadeOutputs, report: Report) -> PartOutputs:
    """Return what the levels answer to the test texts, pruned by every alpha that dev has and by those of Fig. 9."""
    ordered = [next(one for one in tenant.levels if one.base_name == level.base) for level in outputs.levels]
    pairs = {(by, reader) for by in range(len(ordered)) for reader in range(by + 1, len(ordered))}
    of_plan = {level.alpha for level in tenant.plan.levels} - {0.0} if tenant.plan is not None else set()
    alphas = {
        pair: sorted(
            {*FIGURE_ALPHAS, *of_plan, *(alpha for by, reader, alpha in outputs.select.pruned if (by, reader) == pair)}
        )
        for pair in pairs
    }
    done, total = 0, len(tenant.data.test) * (len(ordered) + sum(map(len, alphas.values())))

    def tick(texts: int) -> None:
        nonlocal done
        done += texts
        report("test", min(1.0, done / total))

    with ExitStack() as opened:
        levels = [opened.enter_context(Level(level)) for level in ordered]
        temperatures = [level.temperature for level in outputs.levels]
        return compute_part(levels, temperatures, tenant.data.test, alphas=alphas, tick=tick)


def _compute_exits(tenant: CascadeTenant, outputs: CascadeOutputs, report: Report) -> dict[str, Any]:
    """Fit heads on all layers of the most accurate level; return their answers and confidences by part."""
    level = next(one for one in tenant.levels if one.base_name == outputs.levels[-1].base)
    data, encoder = tenant.data, level.base.load_text_encoder()
    done, total = 0, sum(map(len, data.labelled.values()))

    def tick(texts: int) -> None:
        nonlocal done
        done += texts
        report("exit heads", done / total)

    def states_of(part: Sequence[LabelledText]) -> tuple[list[Prepared], Any]:
        prepared = prepare(part, data, encoder, plot_features(level.domain))
        return prepared, layer_states(level.base, level.tenant, prepared, tick)

    states, gold = {}, {}
    for part, examples in data.labelled.items():
        prepared, states[part] = states_of(examples)
        gold[part] = np.array([int(example.targets[0]) for example in prepared], np.int64)
    heads = fit_heads(
        states["train"], gold["train"], states["dev"], gold["dev"], len(data.labels), served_head(level.tenant)
    )
    arrays: dict[str, Any] = {}
    for name, part in zip(EXIT_PARTS, ("dev", "test"), strict=True):
        arrays[f"{name}.answers"], arrays[f"{name}.confidence"] = exits_of(states[part], heads)
    return arrays


def served_head(tenant: Tenant) -> tuple[Any, Any]:
    """Return the weight and the bias of the tenant's own head. Raises ConfigError if the head reads tokens."""
    if task_named(tenant.card.task).reads_tokens:
        raise ConfigError(f"a {tenant.card.task} has no exit heads")
    return tenant.head.weight, tenant.head.bias
