"""The demo: one base, one PLOT and four tenants, trained on real labelled data from packages on PyPI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import TenantCard
from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings
from hplm.errors import ArtifactError, ConfigError
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.tasks.examples import LabelledText
from hplm_builder.convert.base import DEFAULT_BASE, ensure_base
from hplm_builder.data import package_readers
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.splits import split_of
from hplm_builder.data.text_sources import SOURCES
from hplm_builder.export.model_folders import KEEPABLE_SETTINGS, export, has_manager
from hplm_builder.export.register import published
from hplm_builder.jobs.local_builds import build_tenant
from hplm_builder.tables.plot_tables import build_plot, has_plot
from hplm_builder.tenants.finetune import TrainSettings

DEMO_FOLDER = Path("build/demo")
PLOT = "general"
PLOT_SOURCES = ("wikipedia", "films", "dialog", "snippets", "phenotypes", "icd")
TOP_PERCENT = 1.0


@dataclass(frozen=True)
class DemoTenant:
    """A demo task: its examples, each with its group for the split, how much to train, and an example text to show.

    Few examples and epochs keep the first `make serve` down to minutes; the scores are not the best possible.
    """

    name: str
    read: Callable[[], list[tuple[LabelledText, str]]]
    most_train: int
    epochs: int
    example: str


def _films() -> list[tuple[LabelledText, str]]:
    """Return film reviews with their sentiment."""
    return [
        (LabelledText(text, "positive" if label == "1" else "negative"), text)
        for text, label in package_readers.film_reviews()
    ]


def _icd() -> list[tuple[LabelledText, str]]:
    """Return ICD-10-CM diagnoses with their chapter, grouped by category, because those of one category are near copies."""
    return [
        (LabelledText(text, chapter), category)
        for text, chapter, category in package_readers.icd_descriptions()
        if text
    ]


def _spam() -> list[tuple[LabelledText, str]]:
    """Return text messages with `spam` or `ham`."""
    return [
        (LabelledText(text, "spam" if label == "1" else "ham"), text) for text, label in package_readers.text_messages()
    ]


def _phenotypes() -> list[tuple[LabelledText, str]]:
    """Return definitions with their organ system, for terms in exactly one system that has at least 100 terms."""
    terms = {term["id"][0]: term for term in package_readers.phenotype_terms() if "is_obsolete" not in term}
    parents = {key: [value.split(" ! ")[0] for value in term.get("is_a", [])] for key, term in terms.items()}
    systems = {key for key, above in parents.items() if "HP:0000118" in above}

    def systems_of(key: str) -> set[str]:
        return {key} if key in systems else set().union(*(systems_of(parent) for parent in parents.get(key, [])))

    definitions: list[tuple[str, str, str]] = []
    for key, term in terms.items():
        term_systems = systems_of(key)
        if "def" in term and len(term_systems) == 1 and key not in systems:
            definitions.append((package_readers.quoted(term["def"][0]), terms[term_systems.pop()]["name"][0], key))
    sizes = Counter(system for _, system, _ in definitions)
    return [(LabelledText(text, system), key) for text, system, key in definitions if sizes[system] >= 100 and text]


TENANTS = (
    DemoTenant("icd10", _icd, 6_000, 4, "Displaced fracture of shaft of left femur"),
    DemoTenant("films", _films, 1_000, 2, "A moving, beautifully acted film that I would see again."),
    DemoTenant("spam", _spam, 4_000, 3, "WINNER!! Claim your free prize now, call 09061701461"),
    DemoTenant("phenotypes", _phenotypes, 3_500, 4, "An abnormally small kidney."),
)


def demo_data(tenant: DemoTenant, *, quick: bool = False) -> LabelledData:
    """Return the tenant's examples in the fixed split, with a seeded sample of large parts. `quick`: see `build_demo`."""
    parts: dict[str, list[LabelledText]] = {"train": [], "dev": [], "test": []}
    for example, group in tenant.read():
        parts[split_of(group)].append(example)
    rng = np.random.default_rng(0)
    for name, most, share in (("train", tenant.most_train, 10), ("dev", 400, 8), ("test", 1_000, 8)):
        count = most // share if quick else most
        if len(parts[name]) > count:
            parts[name] = [parts[name][i] for i in rng.choice(len(parts[name]), count, replace=False)]
    return check_data(parts["train"], parts["dev"], parts["test"])


def _check_same_base(store: Store, base: Base, folder: Path) -> None:
    """Refuse a folder whose demo stands on another base, as an older hplm built it. Raises ConfigError."""
    with closing(Registry.open(store, create=True)) as registry:
        others = sorted({domain.base for domain in registry.domains()} - {base.config.name})
    if others:
        raise ConfigError(
            f"{folder} holds a demo over base {others[0]}, this hplm's demo stands on {base.config.name}: "
            f"remove {folder} with all tenants in it (`make clean` for build/demo), or choose another folder"
        )


def build_demo(folder: Path, progress: Progress, *, quick: bool = False) -> list[TenantCard]:
    """Build what is missing in `folder/store` and `folder/models`. Sound parts and the settings of models are kept.

    `quick` counts every fortieth document, trains on a tenth of the examples for half the epochs, and tests on an eighth.
    """
    store = Store(folder / "store")
    steps = progress.add_task("demo: base, tables, tenants, models", total=3 + len(TENANTS))
    base = ensure_base(store)
    progress.update(steps, advance=1)
    if not has_plot(store, base, PLOT):
        _check_same_base(store, base, folder)
        documents = [text for source in PLOT_SOURCES for text in SOURCES[source]()]
        build_plot(store, DEFAULT_BASE, PLOT, documents[:: 40 if quick else 1], TOP_PERCENT, progress)
    progress.update(steps, advance=1)
    cards = []
    for demo in TENANTS:
        if (card := _sound_card(store, demo.name, base)) is None:
            settings = TrainSettings(epochs=(demo.epochs + 1) // 2 if quick else demo.epochs)
            data = demo_data(demo, quick=quick)
            card = build_tenant(store, DEFAULT_BASE, PLOT, demo.name, data, settings, progress, example=demo.example)
        cards.append(card)
        progress.update(steps, advance=1)
    models, manager = folder / "models", ManagerSettings(store="", base=DEFAULT_BASE, domain=PLOT)
    export(
        store,
        models,
        LookupSettings(store="", base=DEFAULT_BASE, table=PLOT),
        EncodeSettings(store="", base=DEFAULT_BASE),
        manager if has_manager(models) else None,
        keep=KEEPABLE_SETTINGS,
    )
    progress.update(steps, advance=1)
    return cards


def _sound_card(store: Store, name: str, base: Base) -> TenantCard | None:
    """Return the card of a published tenant, None if there is no such tenant or if its artifact is damaged."""
    if (tenant := published(store, name, base.config.name)) is None:
        return None
    try:
        return tenants.load(store.path(tenant.current.path), name=name, fingerprint=base.fingerprint).card
    except ArtifactError:
        return None
