"""A base so small that whole servers start in seconds: random weights, a real tokenizer, real tables and tenants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hplm_builder.export import register
from hplm_builder.export.model_folders import export
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hplm.adapters import bank_file
from hplm.adapters import tenant as tenants
from hplm.adapters.packed import Adapter, PackedAdapter, Place, pack, to_bfloat16
from hplm.adapters.students import Form, OwnLayers, Students, no_adapter, own_shapes
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.settings import REDUCTION_FACTOR, WHOLE, BaseConfig, EncodeSettings, LookupSettings, ManagerSettings
from hplm.engine.encode import EncodeEngine
from hplm.engine.lower_layers import LOWER_FORMS, lower_form, make_lower
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.models import base as bases
from hplm.models.layers import UpperLayers, WholeLayers
from hplm.models.lower import LowerEncoder
from hplm.registry.records import TenantVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store

PLOT = "general"
WORDS = [
    *("the", "a", "of", "and", "red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "fast", "slow"),
    *("over", "under", "river", "hill", "Paris", "Anna", "Berlin", "Rome", "Oslo", "Bob", "Eve", "Tom", "one", "two"),
]
# Tenants take turns, so that batches are mixed.
PLACES: tuple[Place, ...] = get_args(Place)
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "alpha": ("classification", ("yes", "no")),
    "beta": ("classification", ("red", "green", "blue")),
    "gamma": ("classification", ("low", "high")),
    "tagger": ("tagging", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
}
# In `make_repository` where asked for; those of TASKS all take one text and give labels. With how many texts they take.
OTHER_TASKS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "grade": ("regression", ("score",), 1),
    "alike": ("regression", ("score",), 2),
    "follows": ("classification", ("no", "yes"), 2),
}

# As a form it stands for a whole base, without lower layers.
KINDS = (NgramEncoder.form, WHOLE)
# For tests of what both kinds of base have in common, with the fixtures `tiny_models`, `tiny_store` or `tiny_base`.
BASES_OF_BOTH_KINDS = pytest.mark.parametrize("tiny_models", KINDS, indirect=True, scope="session")
# For tests of what both forms of lower layers have in common.
BOTH_FORMS = pytest.mark.parametrize("form", tuple(LOWER_FORMS))
# The same for tests that use the fixtures `tiny_models`, `tiny_store` or `tiny_base`.
BASES_OF_BOTH_FORMS = pytest.mark.parametrize("tiny_models", tuple(LOWER_FORMS), indirect=True, scope="session")


def tokenizer() -> Tokenizer:
    """WordPiece over WORDS and single characters."""
    letters = [chr(c) for c in range(33, 127)]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(word.lower() for word in WORDS),
        *letters,
        *("##" + c for c in letters),
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return made


def config(
    window: int = 3,
    name: str = "tiny",
    *,
    form: str = NgramEncoder.form,
    hidden_size: int = 48,
    upper_layers: int = 2,
    max_tokens: int = 40,
) -> BaseConfig:
    """The shape of a tiny base. With WHOLE as `form` it has two layers more, which have no adapters, and two token types."""
    if form == WHOLE:
        shape = config(name=name, hidden_size=hidden_size, max_tokens=max_tokens)
        return replace(
            shape,
            lower_form=WHOLE,
            window=1,
            window_layers=0,
            upper_layers=upper_layers + 2,
            adapter_layers=upper_layers,
            token_types=2,
        )
    return BaseConfig(
        name=name,
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=hidden_size,
        num_heads=4,
        intermediate_size=2 * hidden_size,
        window_layers=2,
        upper_layers=upper_layers,
        max_tokens=max_tokens,
        vectors_per_ngram=lower_form(form).vectors_per_ngram(window),
        window=window,
        lower_form=form,
    )


def sentences(count: int, seed: int = 0, words: tuple[int, int] = (1, 30)) -> list[str]:
    """Random word sequences of 1 to 29 words, or of `words`, end exclusive."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(*words))) for _ in range(count)]


def make_base(store: Store, shape: BaseConfig, seed: int = 0, *, trunk_of: str = "") -> bases.Base:
    """A base of random weights, large enough that every part shows in the answer; a trunk of the base `trunk_of` if named."""
    torch.manual_seed(seed)
    lower: torch.nn.Module
    if shape.is_whole:
        words = torch.nn.Embedding(shape.vocab_size, shape.hidden_size)
        lower, upper = torch.nn.ModuleDict({"word_embeddings": words}), WholeLayers(shape, words.weight.detach())
    else:
        lower, upper = make_lower(shape), UpperLayers(shape)
    for module in (lower, upper):
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
    made = tokenizer().to_str().encode()
    meta = {"trunk": {"of": trunk_of}} if trunk_of else {}
    bases.save(store.base(shape.name), shape, lower.state_dict(), upper.state_dict(), made, meta)
    return bases.load(store.base(shape.name))


def opened(folder: Path) -> tuple[Store, bases.Base]:
    """The store in a folder, and its base."""
    store = Store(folder / "store")
    return store, bases.load(store.base("tiny"))


def engine_of(base: bases.Base, num_slots: int = 8, **changed: Any) -> EncodeEngine:
    """On the CPU in fp32, with slots of two widths, of 8 and of 16 for what is wider than 8; but for what is `changed`."""
    usual: dict[str, Any] = {"reduced_size": 12, "device": torch.device("cpu"), "dtype": torch.float32}
    return EncodeEngine(base.config, base.load_upper(), num_slots=num_slots, **{**usual, **changed})


def some_ngrams(of: bases.Base | LowerEncoder, count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Random windows without padding."""
    return np.random.default_rng(seed).integers(5, of.config.vocab_size, (count, of.config.window))


def random_adapter(shape: BaseConfig, rng: np.random.Generator, factor: int = REDUCTION_FACTOR) -> Adapter:
    layers, hidden, reduced = shape.adapted_layers, shape.hidden_size, shape.hidden_size // factor
    shapes = ((layers, reduced, hidden), (layers, reduced), (layers, hidden, reduced), (layers, hidden))
    return Adapter(*(rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes))


def tenant_of(base: bases.Base, name: str, seed: int, like: str = "") -> Tenant:
    """A tenant of random weights with the task of `like`, by default of its own name, in TASKS or OTHER_TASKS."""
    rng = np.random.default_rng(seed)
    kind = like or name
    task, labels, texts = OTHER_TASKS[kind] if kind in OTHER_TASKS else (*TASKS[kind], 1)
    hidden = base.config.hidden_size
    adapter = random_adapter(base.config, rng)
    count, words = len(labels), 3 if task == "tagging" else 1
    shapes = [(words * count, hidden), (words * count,), *([(1 + count, count)] if task == "tagging" else [])]
    head = Head(*(rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes))
    pooling = "cls" if name == "gamma" else "mean"
    card = TenantCard(
        name,
        task,
        labels,
        base.fingerprint,
        pooling,
        example="Anna sings in Paris",
        texts=texts,
        adapter_at=PLACES[seed % 2],
        transitions=task == "tagging",
        word_window=words,
    )
    return Tenant(card, pack(adapter), head)


def students_of(
    base: bases.Base, name: str, seed: int, count: int, form: Form = "shared", like: str = "alpha"
) -> Tenant:
    """A tenant with `count` students of random weights and the task of `like`; of adapters that differ, or of own layers."""
    rng = np.random.default_rng(seed)
    first, config = tenant_of(base, name, seed, like), base.config
    alphas = np.concatenate([[1], rng.uniform(0.2, 1, count - 1)]).astype(np.float32)
    scores = tuple(np.linspace(0.7, 0.8, count).tolist())
    card = replace(first.card, students=count, student_form=form)
    if form == "shared":
        packed = (first.packed, *(pack(random_adapter(config, rng)) for _ in range(count - 1)))
        return replace(first, card=card, students=Students(alphas, packed, None, scores))
    shapes = own_shapes(config.upper_layers, config.hidden_size, config.intermediate_size)
    own = OwnLayers(tuple(to_bfloat16(rng.normal(0, 0.2, (count, *shape))) for shape in shapes))
    return replace(first, card=card, packed=no_adapter(config.hidden_size), students=Students(alphas, (), own, scores))


def name_root(store: Store, base: bases.Base, domain: str = PLOT) -> None:
    """A root domain in the registry, without tables: enough where nothing is looked up."""
    with closing(Registry.open(store, create=True)) as registry:
        registry.publish_base(base.config.name, base.fingerprint, store.relative(store.base(base.config.name)), 1.0)
        path = store.relative(store.table(domain, "root").parent)
        registry.publish_domain(base.config.name, domain, path, 1.0, parent_id=None, about={}, expected=None)


def make_tenant(store: Store, base: bases.Base, name: str, seed: int, like: str = "", *, domain: str = PLOT) -> Tenant:
    """As `tenant_of`, published as the tenant's next version."""
    made = tenant_of(base, name, seed, like)
    publish(store, base, domain, made)
    return made


def publish(store: Store, base: bases.Base, domain: str, made: Tenant) -> TenantVersion:
    """Publish a tenant's next version without training, as its job would."""
    name = made.card.name
    with closing(register.open_registry(store)) as registry:
        current = registry.find_tenant(name, base.config.name)
        version = register.register_root(registry, store, base, domain)
        number = registry.next_number(name, lambda n: store.tenant_version(name, n))
        folder = store.tenant_version(name, number)
        tenants.save(folder, made)
        return registry.publish_tenant(
            *(name, version.id, store.relative(folder), time.time()),
            about=register.registered_about(made.card),
            number=number,
            expected=current.current.number if current else None,
        )


def folder_of(store: Store, name: str) -> Path:
    """Where the files of a tenant's current version lie."""
    found = register.published(store, name)
    assert found is not None
    return store.path(found.current.path)


def load_tenant(store: Store, base: bases.Base, name: str) -> Tenant:
    """A tenant as it is published."""
    return tenants.load(folder_of(store, name), name=name, fingerprint=base.fingerprint)


def delete_tenant(store: Store, name: str) -> None:
    with closing(Registry.open(store)) as registry:
        registry.delete_tenant(name, time.time())


def fleet_of(base: bases.Base, count: int, seed: int = 0, factors: Sequence[int] = (REDUCTION_FACTOR,)) -> list[Tenant]:
    """Tenants `t0`, `t1`, ...: one head for all, so that only the adapters tell their logits apart.

    Their widths are those of `factors` in turn.
    """
    rng = np.random.default_rng(seed)
    hidden = base.config.hidden_size
    head = Head(rng.normal(0, 0.5, (8, hidden)).astype(np.float32), np.zeros(8, np.float32))
    members = []
    for number in range(count):
        labels = tuple(f"t{number}-{label}" for label in range(8))
        card = TenantCard(f"t{number}", "classification", labels, base.fingerprint, adapter_at=PLACES[number % 2])
        # Kept as the bank keeps them, so that a reference computes with the numbers that are served.
        packed = pack(random_adapter(base.config, rng, factors[number % len(factors)]))
        weights = to_bfloat16(packed.weights.astype(np.float32))
        members.append(Tenant(card, PackedAdapter(weights, packed.hidden_size, packed.reduced_size), head))
    return members


def make_fleet(store: Store, base: bases.Base, count: int, seed: int = 0) -> list[Tenant]:
    """As `fleet_of`, published in a bank file."""
    members = fleet_of(base, count, seed)
    make_bank(store, base, members)
    return members


def make_bank(store: Store, base: bases.Base, members: list[Tenant]) -> Path:
    """Publish tenants in a bank file, in the place of those that other banks have."""
    if not (store.root / "registry.sqlite").exists():
        register.name_root(store, base, PLOT)
    bank = register.fresh_bank(store, "fleet")
    bank_file.write(store.bank(bank), base.fingerprint, members)
    register.publish_bank(store, base, PLOT, bank)
    return store.bank(bank)


def make_repository(
    folder: Path,
    *,
    miss: str = "compute",
    dtype: str = "float32",
    num_slots: int = 3,
    shape: BaseConfig | None = None,
    plot_settings: dict[str, Any] | None = None,
    upper_settings: dict[str, Any] | None = None,
    manager_settings: dict[str, Any] | None = None,
    registry: str = "",
    instances: int = 1,
    look_up_instances: int | None = None,
    other_tasks: bool = False,
    route: bool = False,
    stage_layers: tuple[int, ...] = (),
) -> Path:
    """A store, whose `registry` may be elsewhere, and model folders; fewer slots than tenants, so that slots are swapped.

    With `manager_settings` there are the models for manage requests, and with `route` those that call the models of bases.
    """
    store = Store(folder / "store", registry)
    base = make_base(store, shape or config())
    if not base.config.is_whole:
        build_plot(store, "tiny", PLOT, sentences(50), 30.0, Progress(disable=True), dtype="float32")
    for seed, name in [*enumerate(TASKS, 1), *enumerate(OTHER_TASKS if other_tasks else ())]:
        make_tenant(store, base, name, seed)
    common: dict[str, Any] = {"store": "", "base": "tiny", "dtype": dtype}
    plot = LookupSettings(**{**common, "table": PLOT, "miss": miss, "overlay_windows": 64, **(plot_settings or {})})
    of_upper = {"num_slots": num_slots, "stage_layers": stage_layers, **(upper_settings or {})}
    upper = EncodeSettings(**{**common, **of_upper})
    manager = None if manager_settings is None else ManagerSettings("", "tiny", PLOT, **manager_settings)
    models = folder / "models"
    processes = {"instances": instances, "look_up_instances": look_up_instances}
    export(store, models, plot, upper, manager, **processes, route=route)
    return models


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
