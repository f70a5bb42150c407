"""Tenants with students of random weights over tiny trunks, and the slow twin of their answers."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hplm_builder.export import register
from hplm_builder.export.model_folders import export
from hplm_builder.export.register import ROOT_OF_WHOLE
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.adapters.students import Form
from hplm.adapters.tenant import Tenant
from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.core.settings import WHOLE, EncodeSettings, LookupSettings
from hplm.core.text import TextOrPair
from hplm.engine import reference
from hplm.engine.open_domain import open_features, open_lineage
from hplm.models.base import Base
from hplm.registry.records import NewLevel
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny

# The two trunks. The first adapts the number of students to its load; the second always has as few students as a tenant allows.
ADAPTING, LEAST = "tiny", "whole"
MODELS = {ADAPTING: "students", LEAST: "hbert"}
QUIET_S = 0.5
# The logits of random weights are large, so most confidences would be 1.
TEMPERATURE = 50.0


def make_models(folder: Path) -> Path:
    """A store with both trunks, and a repository that serves them."""
    store, models = Store(folder / "store"), folder / "models"
    for seed, shape in enumerate((tiny.config(), tiny.config(name=LEAST, form=WHOLE))):
        tiny.make_base(store, shape, seed=seed)
        if not shape.is_whole:
            build_plot(store, shape.name, domain_of(shape.name), tiny.sentences(30), 30.0, Progress(disable=True))
        look_up = LookupSettings(store="", base=shape.name, table=domain_of(shape.name), dtype="float32")
        encode = EncodeSettings(
            store="",
            base=shape.name,
            dtype="float32",
            num_slots=24,
            # Small batches, so that some requests at once are a burst.
            batch_rows=1,
            row_tokens=64,
            students_fall_batches=1.0 if shape.name == ADAPTING else 1e-6,
            students_quiet_s=QUIET_S,
        )
        export(store, models, look_up, encode, name=MODELS[shape.name])
    return models


def domain_of(base: str) -> str:
    """The name of a trunk's root."""
    return ROOT_OF_WHOLE if base == LEAST else "general"


@dataclass
class Making:
    """Publishes tenants over the trunks of `make_models`."""

    store: Store
    bases: dict[str, Base]

    @classmethod
    def over(cls, folder: Path) -> Making:
        store = Store(folder / "store")
        return cls(store, {name: tiny.bases.load(store.base(name)) for name in MODELS})

    def tenant(self, name: str, base: str, like: str, students: int, seed: int, form: Form = "shared") -> Tenant:
        """Publish a tenant with so many students; with one, an ordinary tenant."""
        over = self.bases[base]
        made = tiny.tenant_of(over, name, seed, like)
        made = made if students == 1 else tiny.students_of(over, name, seed, students, form, like)
        tiny.publish(self.store, over, domain_of(base), made)
        return made

    def cascade(self, small: Tenant, large: Tenant, cut_off: float) -> None:
        """Publish a tenant whose first level is `small` over the trunk ADAPTING, and whose second is `large` over LEAST."""
        name, made = small.card.name, (small, large)
        levels = [
            LevelPlan(base, number, Dispatch(TEMPERATURE, cut_off, 8.0), weights, 0.0)
            for number, (base, weights) in enumerate([(ADAPTING, (1.0,)), (LEAST, (0.0, 1.0))], 1)
        ]
        new = []
        with closing(Registry.open(self.store)) as registry:
            for level, tenant in zip(levels, made, strict=True):
                number = registry.next_number(name)
                folder = self.store.tenant_version(name, number)
                tenants.save(folder, tenant)
                domain = register.register_root(registry, self.store, self.bases[level.base], domain_of(level.base))
                path, about = self.store.relative(folder), register.registered_about(tenant.card)
                new.append(NewLevel(domain.id, path, about, number, None))
            plan = CascadePlan(tuple(levels), Promise(0.9, 95, 100, 1.0), deterministic=True)
            registry.publish_levels(name, new, plan, time.time())

    def set_least(self, name: str, least: int) -> None:
        with closing(Registry.open(self.store)) as registry:
            registry.set_least_students(name, least)


class Offline:
    """Computes what the first k students of a tenant answer, one text and one student at a time."""

    def __init__(self, making: Making) -> None:
        store, bases = making.store, making.bases
        self._upper = {name: base.load_upper() for name, base in bases.items()}
        self._encoders = {name: base.load_text_encoder() for name, base in bases.items()}
        root = store.table(domain_of(ADAPTING), "root").parent
        self._domains = {
            ADAPTING: open_lineage(store, bases[ADAPTING], [root], dtype=torch.float32),
            LEAST: open_features(store, bases[LEAST], []),
        }

    def prefixes(self, base: str, tenant: Tenant, text: TextOrPair) -> list[npt.NDArray[np.float32]]:
        """Return the logits `[1, labels]` of k = 1, 2, ... students."""
        (features,) = self._domains[base].features(self._encoders[base].encode([text]))
        # A whole base has ids and types, which stay whole numbers.
        hidden = torch.from_numpy(features if base == LEAST else features.astype(np.float32))
        upper = self._upper[base]
        if tenant.students is None:
            return [reference.logits(upper, hidden, tenant).numpy()]
        numbers = range(1, tenant.card.students + 1)
        return [reference.students(upper, hidden, tenant, number).numpy() for number in numbers]
