"""The fleet of the peer `adapter`: the same tenants over a whole base of the same size, served by hplm itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from hplm.adapters import bank_file
from hplm.adapters.bank_file import BankFile
from hplm.core.settings import WHOLE, BaseConfig
from hplm.errors import ArtifactError
from hplm.models import base as bases
from hplm.models.base import WORDS
from hplm.registry.registry import Registry
from hplm.store import artifact
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
    with artifact.replacing(folder) as partial:
        written = Store(partial)
        words = {WORDS: model.word_embeddings.weight}
        tokenizer = served.base.tokenizer_path.read_bytes()
        bases.save(written.base(BASE), config, words, model.body.state_dict(), tokenizer, about)
        base = bases.load(written.base(BASE))
        with served.open_tenants() as (bank, tenants):
            wanted = set(names)
            chosen = [tenant for tenant in tenants if tenant.name in wanted]
            loaded = map(bank.load, progress.track(chosen, description="tenants over the whole base"))
            members = (replace(each, card=replace(each.card, base=base.fingerprint)) for each in loaded)
            bank_file.write(written.bank(BANK), base.fingerprint, members)
        with closing(Registry.open(written, create=True)) as registry:
            now_s, path = time.time(), written.relative(written.base(BASE))
            registry.publish_base(BASE, base.fingerprint, path, now_s)
            root = registry.publish_domain(BASE, ROOT, path, now_s, parent_id=None, about={}, expected=None)
            registry.publish_tenants(root.id, written.relative(written.bank(BANK)), sorted(names), now_s)
    return store


def _holds(store: Store, names: Sequence[str]) -> bool:
    """Return whether the store has a whole fleet of these tenants."""
    try:
        base = bases.load(store.base(BASE), verify=False)
        return sorted(BankFile(store.bank(BANK), base.fingerprint).names) == sorted(names)
    except ArtifactError:
        return False
