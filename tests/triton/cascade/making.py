"""Cascades of random weights over tiny bases, and the slow twin of what the model `cascade` answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hplm_builder.export import register
from hplm_builder.export.model_folders import export
from hplm_builder.export.register import ROOT_OF_WHOLE
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import Tenant
from hplm.cascade.dispatch import DETERMINISTIC, DispatchInput, draw_of, word_importances
from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.cascade.pruning import prune
from hplm.cascade.weighting import weighted
from hplm.core.settings import WHOLE, BaseConfig, EncodeSettings, LookupSettings, ManagerSettings
from hplm.core.text import TextOrPair
from hplm.engine.encode import EngineRequest
from hplm.engine.open_domain import Domain, open_features, open_lineage
from hplm.models.base import Base
from hplm.registry.records import NewLevel
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from tests import tiny

# The model of each base. The bases are levels in this order. The second is a whole base.
MODELS = {"small": "small", "middle": "middle", "tiny": "hbert"}
# Of random weights, most confidences are about 0.6 with this temperature.
TEMPERATURE = 2.0


def make_bases(folder: Path, manager: ManagerSettings | None = None, *, look_up_instances: int | None = None) -> Path:
    """A store with three bases, and a repository that serves them."""
    store, models = Store(folder / "store"), folder / "models"
    shapes = (
        tiny.config(name="small", hidden_size=32, upper_layers=1),
        tiny.config(name="middle", form=WHOLE),
        tiny.config(),
    )
    for seed, shape in enumerate(shapes):
        tiny.make_base(store, shape, seed=seed)
        table = table_of(shape)
        if not shape.is_whole:
            build_plot(store, shape.name, table, tiny.sentences(30), 30.0, Progress(disable=True), dtype="float32")
        look_up = LookupSettings(store="", base=shape.name, table=table, dtype="float32")
        encode = EncodeSettings(store="", base=shape.name, dtype="float32", num_slots=8)
        export(
            store,
            models,
            look_up,
            encode,
            manager,
            name=MODELS[shape.name],
            look_up_instances=look_up_instances,
        )
    return models


def table_of(shape: BaseConfig) -> str:
    """The name of a base's root."""
    return ROOT_OF_WHOLE if shape.is_whole else f"general-{shape.name}"


@dataclass
class Making:
    """Publishes tenants in a store with the bases of `make_bases`."""

    store: Store
    bases: Mapping[str, Base]
    domains: dict[str, int]

    @classmethod
    def over(cls, folder: Path) -> Making:
        store = Store(folder / "store")
        bases = {name: tiny.bases.load(store.base(name)) for name in MODELS}
        with closing(Registry.open(store, create=True)) as registry:
            domains = {
                name: register.register_root(registry, store, base, table_of(base.config)).id
                for name, base in bases.items()
            }
        return cls(store, bases, domains)

    def cascade(
        self, name: str, like: str, seed: int, levels: Sequence[LevelPlan], **settings: Any
    ) -> tuple[CascadePlan, list[Tenant]]:
        """Publish a tenant of random weights with a plan over `levels`, and return both. The numbers of `levels` are set."""
        made, new, numbered = [], [], []
        with closing(Registry.open(self.store)) as registry:
            first = registry.next_number(name)
            for number, level in enumerate(levels, first):
                made.append(tiny.tenant_of(self.bases[level.base], name, seed + 1000 * number, like))
                folder = self.store.tenant_version(name, number)
                tenants.save(folder, made[-1])
                path, about = self.store.relative(folder), register.registered_about(made[-1].card)
                new.append(NewLevel(self.domains[level.base], path, about, number, None))
                numbered.append(LevelPlan(level.base, number, level.dispatch, level.weights, level.alpha))
            latency_ms = settings.pop("latency_ms", 1.0)
            plan = CascadePlan(tuple(numbered), Promise(0.9, 95, 100, latency_ms), **settings)
            registry.publish_levels(name, new, plan, time.time())
        return plan, made


def levels_over(*bases: str, cut_off: float = 0.7, slope: float = 8.0, alpha: float = 0.0) -> list[LevelPlan]:
    """Levels over bases with weights that grow, and pruning before the second level."""
    made = []
    for place, base in enumerate(bases, 1):
        total = place * (place + 1) / 2
        weights = tuple(number / total for number in range(1, place + 1))
        dispatch = Dispatch(TEMPERATURE + 0.1 * place, cut_off, slope)
        made.append(LevelPlan(base, 0, dispatch, weights, alpha if place == 2 else 0.0))
    return made


@dataclass(frozen=True)
class Wanted:
    """The answer that the model `cascade` must give, with `logits` of its last level or of all levels together."""

    level: str
    reroutes: int
    confidence: float
    labels: list[str]
    logits: npt.NDArray[Any]


class OfflineCascade:
    """Computes answers of cascades level by level, one text at a time, without a server."""

    def __init__(self, making: Making) -> None:
        self._making = making
        self._engines = {name: tiny.engine_of(base) for name, base in making.bases.items()}
        self._encoders = {name: base.load_text_encoder() for name, base in making.bases.items()}
        self._domains = {name: self._open(base) for name, base in making.bases.items()}

    def _open(self, base: Base) -> Domain:
        store = self._making.store
        if base.config.is_whole:
            return open_features(store, base, [])
        return open_lineage(store, base, [store.table(table_of(base.config), "root").parent], dtype=torch.float32)

    def answer(self, plan: CascadePlan, levels: Sequence[Tenant], text: TextOrPair) -> Wanted:
        """Return what the tenant with these levels must be answered."""
        parts = [part.encode() for part in ((text,) if isinstance(text, str) else text)]
        shown: list[npt.NDArray[Any]] = []
        for place, (level, tenant) in enumerate(zip(plan.levels, levels, strict=True)):
            card, task = tenant.card, task_named(tenant.card.task)
            encoded = self._encoders[level.base].encode([text])
            (features,) = self._domains[level.base].features(encoded)
            ((outputs, received),) = self._engines[level.base].run_with_importance([EngineRequest(tenant, features)])
            tokens, moves = encoded[0].tokens, tenant.head.transitions
            spans, logits = task.decode(outputs, card.labels, tokens, moves)
            shown.append(logits)
            confidence = task.confidence(outputs, card.labels, tokens, moves, level.dispatch.temperature)
            is_last = place + 1 == len(plan.levels)
            draw = draw_of(card.name, plan.levels[-1].number, *parts, level=place + 1)
            draw = DETERMINISTIC if plan.deterministic else draw
            if not DispatchInput.of(level.dispatch, draw, is_last=is_last).is_rerouted(confidence):
                break
            text = prune(text, word_importances(received, tokens), plan.levels[place + 1].alpha)
        if place and not task.reads_tokens:
            temperatures = [level.dispatch.temperature for level in plan.levels[: place + 1]]
            mean = weighted(shown, temperatures, level.weights)
            return Wanted(level.base, place, float(mean.max()), [card.labels[int(mean.argmax())]], np.log(mean)[None])
        return Wanted(level.base, place, confidence, [span.label for span in spans], logits)
