"""Making a tenant: fine-tune over the features that serving will see, publish adapter and head."""

from __future__ import annotations

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from hplm.adapters import tenant as tenants
from hplm.adapters.packed import pack
from hplm.adapters.tenant import Tenant, TenantCard, check_name
from hplm.nn import base as bases
from hplm.nn.lookup import PlotLookup, open_lookup
from hplm.store.layout import Store
from hplm.text import EncodedText, TextEncoder
from hplm_builder.finetune import AdapterModel, Featurise, Prepared, TrainSettings, adapter_body, fine_tune, prepare
from hplm_builder.labelled import LabelledData

REDUCTION_FACTOR = 16


def plot_features(lookup: PlotLookup) -> Featurise:
    """Merged window vectors of each text."""

    def featurise(encoded: list[EncodedText]) -> list[Tensor]:
        lengths = [len(one.ids) for one in encoded]
        hidden = lookup.hidden_states(np.concatenate([one.ids for one in encoded]), lengths)
        return list(torch.from_numpy(hidden).split(lengths))

    return featurise


def token_ids(encoded: list[EncodedText]) -> list[Tensor]:
    """Features of the unconverted model: the ids themselves."""
    return [torch.from_numpy(one.ids) for one in encoded]


def prepare_all(
    data: LabelledData, encoder: TextEncoder, featurise: Featurise, progress: Progress, name: str
) -> tuple[list[Prepared], list[Prepared], list[Prepared]]:
    """Train, dev and test ready to train on."""
    bar = progress.add_task(f"{name}: features", total=3)
    parts = []
    for examples in (data.train, data.dev, data.test):
        parts.append(prepare(examples, data, encoder, featurise))
        progress.update(bar, advance=1)
    return parts[0], parts[1], parts[2]


def build_tenant(
    store: Store,
    base_name: str,
    plot_name: str,
    name: str,
    data: LabelledData,
    settings: TrainSettings,
    progress: Progress,
    *,
    example: str = "",
) -> TenantCard:
    """Fine-tune and publish a tenant; its card carries the scores."""
    check_name(name)
    base = bases.load(store.base(base_name))
    encoder = TextEncoder(base.tokenizer_path, base.config.max_tokens)
    parts = prepare_all(data, encoder, plot_features(open_lookup(store, base, plot_name)), progress, name)
    make_body = adapter_body(base.load_upper(), REDUCTION_FACTOR)
    trained = fine_tune(make_body, base.config.hidden_size, data, *parts, settings, progress, f"{name}: fine-tune")
    assert isinstance(trained.body, AdapterModel)
    card = TenantCard(
        name=name,
        task=data.task,
        labels=data.labels,
        base=base.fingerprint,
        pooling=settings.pooling,
        example=example or (data.test or data.dev)[0].text,
        about={
            "scores": trained.scores,
            "examples": {"train": len(data.train), "dev": len(data.dev), "test": len(data.test)},
            "learning_rate": trained.learning_rate,
            "epochs": settings.epochs,
            "best_epoch": trained.best_epoch,
            "seed": settings.seed,
        },
    )
    tenants.save(store.tenant(name), Tenant(card, pack(trained.body.adapter()), trained.head))
    return card
