"""The fleet of the peer `adapter`: the same tenants over a whole base of the same size, served by hplm itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from hplm.adapters import bank_file
from hplm.core.settings import WHOLE, BaseConfig
from hplm.errors import MissingRegistryError
from hplm.models import base as bases
from hplm.models.base import WORDS
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm_loadtest.benchmarks.served_repository import ServedRepository
from hplm_loadtest.peers.whole_model import make_seeded_model, whole_config

BASE, ROOT, BANK = "whole", "general", "fleet"


def whole_base_config(config: BaseConfig) -> BaseConfig:
    """Return the shape of a whole base of the same model, with adapters in the same layers. It has no token types."""
    return replace(
        config,
        name=BASE,
        lower_form=WHOLE,
        window=1,
        vectors_per_ngram=1,
        window_layers=0,
        lower_layers=0,
        upper_layers=config.original_layers,
        adapter_layers=config.adapted_layers,
        token_types=0,
    )


def write_whole_fleet(folder: Path, served: ServedRepository, names: Sequence[str], progress: Progress) -> Store:
    """Write a store with the tenants `names` over a whole base of seeded weights, unless `folder` holds them already.

    A tenant keeps its adapter and its head: the adapter stands in the same layers as over the fleet's base.
    """
    store = Store(folder)
    if _holds(store, names):
        return store
    config = whole_base_config(served.base.config)
    model = make_seeded_model(whole_config(served.base.config), 0)
    about = {"original": "none: seeded weights"}
    # What an interrupted call left.
    shutil.rmtree(folder, ignore_errors=True)
    words, tokenizer = {WORDS: model.word_embeddings.weight}, served.base.tokenizer_path.read_bytes()
    bases.save(store.base(BASE), config, words, model.body.state_dict(), tokenizer, about)
    base = bases.load(store.base(BASE))
    with served.open_tenants() as (bank, tenants):
        wanted = set(names)
        chosen = [tenant for tenant in tenants if tenant.name in wanted]
        loaded = map(bank.load, progress.track(chosen, description="tenants over the whole base"))
        members = (replace(each, card=replace(each.card, base=base.fingerprint)) for each in loaded)
        bank_file.write(store.bank(BANK), base.fingerprint, members)
    with closing(Registry.open(store, create=True)) as registry:
        now_s, path = time.time(), store.relative(store.base(BASE))
        registry.publish_base(BASE, base.fingerprint, path, now_s)
        root = registry.publish_domain(BASE, ROOT, path, now_s, parent_id=None, about={}, expected=None)
        registry.publish_tenants(root.id, store.relative(store.bank(BANK)), sorted(names), now_s)
    return store


def _holds(store: Store, names: Sequence[str]) -> bool:
    """Return whether the store serves a whole fleet of these tenants, which are published last."""
    try:
        with closing(Registry.open_read_only(store)) as registry:
            return {tenant.name for tenant in registry.changes_since(0).published} == set(names)
    except MissingRegistryError:
        return False
