"""Builds tenants: fine-tunes over the features that serving will see, and publishes adapter and head."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hplm.adapters import tenant as tenants
from hplm.adapters.bank import is_banked
from hplm.adapters.bank_file import BankFile
from hplm.adapters.packed import pack
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.names import check_name
from hplm.core.text import EncodedText
from hplm.engine.open_domain import Domain
from hplm.models.base import Base
from hplm.models.layers import UpperLayers
from hplm.registry.records import TenantVersion
from hplm.reporting.progress import Report, silent
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.baselines import baseline_scores, baseline_warnings, constant_baseline, head_baseline
from hplm_builder.tenants.bodies import ADAPTER_AT, AdapterModel, adapter_body
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.finetune import TRAINING_COST, TaskHead, Trained, Trainer, TrainSettings, fine_tune
from hplm_builder.tenants.prepared import (
    Parts,
    Prepared,
    Room,
    count_tokens,
    counted,
    mean_tokens,
    packed_batches,
    prepare,
    prepare_all,
    sample_of,
)
from hplm_builder.tenants.pseudo_labels import pseudo_labelled, upper_body
from hplm_builder.tenants.trained_layers import trained_layers
from hplm_builder.tenants.widths import train_widths

# An estimate measures this many examples, their features in this many parts. The fastest part counts, because any part may
# wait for other work of the machine.
MEASURED_EXAMPLES = 64
FEATURE_MEASUREMENTS = 3
# An estimate measures at most this many training steps, and begins none after this many seconds of them.
MOST_STEPS = 5
STEPS_S = 0.5


def token_ids(encoded: list[EncodedText]) -> list[Tensor]:
    """Return token ids, which are the features of the unconverted model."""
    return [torch.from_numpy(text.ids) for text in encoded]


def train_tenant(
    base: Base,
    lookup: Domain,
    name: str,
    data: LabelledData,
    settings: TrainSettings,
    report: Report = silent,
    *,
    example: str = "",
    start: Tenant | None = None,
    factors: Sequence[int] = (),
) -> Tenant:
    """Fine-tune a tenant over the features that `lookup` gives, without publishing it; with `start`, go on from that version.

    Dev chooses among adapters with the reduction `factors`, by default the one of `settings`, see `train_widths`.

    The card's `about` has `scores`, `examples`, `bottleneck`, `adapter_width`, `learning_rate`, `epochs`, `best_epoch`,
    `patience`, `seed`, `miss`, `curve`, `baseline_scores`, and what `Task.mistakes` returns, see `Trained`. It has
    `width_scores` and `width_why` if there are several factors, `teacher` if there are unlabelled texts, and `warnings` if data
    are odd or nothing was learned. Raises TenantNameError, DataError or ConfigError, and what `report` raises.
    """
    check_name(name)
    encoder, room = base.load_text_encoder(), Room()
    # The teacher of unlabelled texts trains all layers.
    upper, featurise, token_bytes = trained_layers(base, lookup, all_train=bool(data.unlabelled))
    room.expect(data, encoder, token_bytes)
    warnings = data_warnings(data, encoder)
    labelled = parts = prepare_all(data, encoder, featurise, report, room)
    about: dict[str, Any] = {"examples": data.counts, "miss": lookup.miss}
    if data.unlabelled:
        tick = counted("unlabelled", len(data.unlabelled), report)
        unlabelled = prepare(data.unlabelled, data, encoder, featurise, tick, room)
        taught = pseudo_labelled(base, data, parts, unlabelled, settings, report)
        parts = [*parts[0], *taught.examples], *parts[1:]
        about["teacher"] = {"scores": taught.scores, "best_epoch": taught.best_epoch}
    made, dev = tune(base, upper, name, data, parts, settings, report, example=example, start=start, factors=factors)
    constant, head = constant_baseline(data), head_baseline(upper, data, labelled, settings, report)
    about["baseline_scores"] = baseline_scores(constant=constant, head=head)
    warnings += baseline_warnings(data, dev, constant, head, made.card.about["learning_rate"])
    if warnings:
        about["warnings"] = warnings
    return replace(made, card=replace(made.card, about={**made.card.about, **about}))


def tune(
    base: Base,
    upper: UpperLayers,
    name: str,
    data: LabelledData,
    parts: Parts,
    settings: TrainSettings,
    report: Report = silent,
    *,
    example: str = "",
    start: Tenant | None = None,
    factors: Sequence[int] = (),
) -> tuple[Tenant, DevScore]:
    """Fine-tune a tenant in `upper` on examples with its features; return it and its dev score. See `train_tenant`."""
    # An adapter that was trained at one place of a layer is useless at another.
    at = start.card.adapter_at if start else ADAPTER_AT
    adapter, head = (start.adapter, start.head) if start else (None, None)

    def train(factor: int, report: Report, rival: Trained | None) -> Trained:
        make_body = adapter_body(upper, factor, adapter, at=at)
        return fine_tune(make_body, base.config.hidden_size, data, parts, settings, report, start=head, rival=rival)

    trained, chosen = train_widths(train, factors or (settings.reduction_factor,), report)
    assert isinstance(trained.body, AdapterModel)
    about = {
        "scores": trained.scores,
        "examples": {"train": len(parts[0]), "dev": len(parts[1]), "test": len(parts[2])},
        "bottleneck": trained.body.down.shape[1],
        "learning_rate": trained.learning_rate,
        "epochs": settings.epochs,
        "best_epoch": trained.best_epoch,
        "patience": settings.patience,
        "seed": settings.seed,
        "curve": trained.curve,
        **trained.mistakes,
        **chosen,
    }
    made = tenant_of(base, name, data, trained.body, trained.head, settings.pooling, example=example, about=about)
    return made, trained.dev


def tenant_of(
    base: Base, name: str, data: LabelledData, body: AdapterModel, head: Head, pooling: str, **card_fields: Any
) -> Tenant:
    """Return a trained body and head as a tenant; `card_fields` are the card's `example` and `about`."""
    card = TenantCard(
        name=name,
        task=data.task,
        labels=data.labels,
        base=base.fingerprint,
        pooling=pooling,
        texts=data.texts,
        adapter_at=body.at,
        transitions=head.transitions is not None,
        word_window=head.word_window(data.labels),
        **card_fields,
    )
    return Tenant(card, pack(body.adapter()), head)


def load_version(store: Store, version: TenantVersion, base: Base) -> Tenant:
    """Load a version with its weights, from its folder or its bank. Raises an ArtifactError, or OSError if the disk fails."""
    folder = store.path(version.path)
    if is_banked(store, folder):
        return BankFile(folder, base.fingerprint).load(version.tenant)
    return tenants.load(folder, fingerprint=base.fingerprint, name=version.tenant)


def load_card(store: Store, version: TenantVersion, base: Base) -> TenantCard:
    """Load a version's card, from its folder or its bank. Raises what `load_version` raises."""
    folder = store.path(version.path)
    if is_banked(store, folder):
        return BankFile(folder, base.fingerprint).card(version.tenant)
    return tenants.load_card(folder)


def estimate_fine_tune(
    data: LabelledData,
    settings: TrainSettings,
    base: Base,
    lookup: Domain,
    *,
    start: Tenant | None = None,
    factors: Sequence[int] = (),
) -> float:
    """Return the seconds that `train_tenant` would take on this machine now, from a few measured examples.

    A training that stops early takes less. Raises DataError if the features take more memory than they may.
    """
    encoder = base.load_text_encoder()
    upper, featurise, token_bytes = trained_layers(base, lookup, all_train=bool(data.unlabelled))
    Room().expect(data, encoder, token_bytes)
    examples = sample_of(data.train, MEASURED_EXAMPLES)
    prepare(examples[:2], data, encoder, featurise)  # the first call fills caches
    sample: list[Prepared] = []
    feature_s = math.inf
    # Other examples each time, because the look-up keeps the windows of measured examples in memory.
    for first in range(min(FEATURE_MEASUREMENTS, len(examples))):
        start_s = time.perf_counter()
        part = prepare(examples[first::FEATURE_MEASUREMENTS], data, encoder, featurise)
        feature_s = min(feature_s, (time.perf_counter() - start_s) / count_tokens(part))
        sample += part
    labelled, unlabelled = count_tokens(sample) / len(sample), 0.0
    if data.unlabelled:
        # Unlabelled texts may be of another length.
        unlabelled = len(data.unlabelled) * mean_tokens(data.unlabelled, encoder)
    train, dev, test = (labelled * len(part) for part in data.labelled.values())

    def training_s(
        make_body: Callable[[], nn.Module], epochs: int, trained: float, judged: float, head: Head | None = None
    ) -> float:
        """Return the seconds of `epochs` over `trained` tokens, each followed by dev, and of predicting `judged` tokens."""
        token_s = _token_s(make_body(), TaskHead(base.config.hidden_size, data, head), data, sample, settings)
        return token_s * (epochs * (TRAINING_COST * trained + dev) + judged)

    seconds = feature_s * (train + dev + test + unlabelled)
    if unlabelled:
        seconds += training_s(upper_body(base), settings.epochs, train, dev + unlabelled)
    adapter, head = (start.adapter, start.head) if start else (None, None)
    epochs = settings.epochs * len(settings.learning_rates)
    for factor in factors or (settings.reduction_factor,):
        make_adapters = adapter_body(upper, factor, adapter)
        seconds += training_s(make_adapters, epochs, train + unlabelled, dev + test, head)
    return seconds


def _token_s(
    body: nn.Module, head: TaskHead, data: LabelledData, sample: list[Prepared], settings: TrainSettings
) -> float:
    """Return the seconds that predicting a token takes, from measured steps of training."""
    rate = settings.learning_rates[0]
    task = task_named(data.task)
    trainer = Trainer(task, settings, rate, body, head, task.scale([example.source for example in sample]))
    batch, *_ = packed_batches(sample, settings.batch_examples, np.random.default_rng(0))
    trainer.step(batch, rate)  # the first call fills caches
    took_s: list[float] = []
    while len(took_s) < MOST_STEPS and sum(took_s) < STEPS_S:
        start_s = time.perf_counter()
        trainer.step(batch, rate)
        took_s.append(time.perf_counter() - start_s)
    return min(took_s) / count_tokens(batch) / TRAINING_COST
