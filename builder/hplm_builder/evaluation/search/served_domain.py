"""Features of PLOT: looked up in a domain's tables as serving does, or computed without tables."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hplm.core.settings import Quantization
from hplm.engine.open_domain import Domain, OpenDomain, open_features
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.models.lower import LowerEncoder
from hplm.plot import table as tables
from hplm.store import artifact, domain_version
from hplm.store.layout import Store
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.study import RATES, FeatureSource, MakeBody, Variant, hbert_body, with_adapters
from hplm_builder.export.register import lineage_of
from hplm_builder.tenants.bodies import ConvertedModel, Half
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.trained_layers import plot_features

OVERLAY_WINDOWS = 65_536  # kept results, so that each window is computed once


@dataclass(frozen=True)
class ServedDomain:
    """A domain of a store, whose features are looked up as serving looks them up."""

    store: Store
    base: Base
    domain: str
    miss: str = "compute"
    quantization: Quantization = "none"

    def __post_init__(self) -> None:
        if self.miss not in ("compute", "backoff"):
            raise ConfigError(f"--miss must be compute or backoff, got {self.miss!r}")

    @cached_property
    def lineage(self) -> list[str]:
        """The folders of the domain's current version and of its ancestors. Raises what `lineage_of` raises."""
        return lineage_of(self.store, self.base, self.domain)

    @cached_property
    def source(self) -> FeatureSource:
        name = f"{self.domain}-{self.miss}" + ("" if self.quantization == "none" else f"-{self.quantization}")
        if self.base.config.is_whole:
            name = "whole"
        return FeatureSource(name, lambda task, report: plot_features(self.lookup))

    @cached_property
    def lookup(self) -> Domain:
        """The open domain. It is opened when features are first needed."""
        return open_features(self.store, self.base, self.lineage, miss=self.miss, quantization=self.quantization)

    def adapter_variant(self, name: str, device: torch.device, **about: Any) -> Variant:
        """Return a variant of adapters over the domain, as served. `about`: what its results depend on besides `self.about`."""
        results_of = with_adapters(lambda task: {**self.about(), **about})
        return Variant(name, self.base, self.source, hbert_body(self.base, device), RATES["hbert"], results_of)

    def about(self, task: EvalTask | None = None) -> dict[str, Any]:
        """Return what the features depend on, in JSON values; the same for every task."""
        if self.base.config.is_whole:
            # Features are the tokens themselves.
            return {"base": self.base.fingerprint}
        folders = [self.store.root / path for path in self.lineage]
        with_branch, root = domain_version.searched(folders)
        read = [(folder / "branch", tables.KIND) for folder in with_branch]
        # Without the root's table, features depend on the version's own encoder alone.
        read.append((folders[0] / "lower", domain_version.LOWER_KIND) if root is None else (root / "root", tables.KIND))
        return {
            "base": self.base.fingerprint,
            "domain": self.domain,
            "tables": [artifact.read(folder, kind).fingerprint for folder, kind in read],
            "miss": self.miss,
            # Left out for `none`, because results from before there was a choice do not name it.
            **({} if self.quantization == "none" else {"quantization": self.quantization}),
        }


def computed_features(lower: LowerEncoder) -> Featurise:
    """Return PLOT features of a model without tables: every window is computed."""
    dtype = choose_dtype("auto", CPU)
    return plot_features(OpenDomain(lower.config, [], [], lower, overlay_windows=OVERLAY_WINDOWS, dtype=dtype))


def converted_body(base: Base, lower: LowerEncoder, halves: Collection[Half]) -> MakeBody:
    """Return a body over token ids: `lower` and the base's upper layers, of which `halves` train."""
    upper = base.load_upper()
    return lambda: ConvertedModel(copy.deepcopy(lower), copy.deepcopy(upper), halves)
