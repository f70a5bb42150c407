"""Features of a domain, looked up in its tables as serving does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hplm.engine.open_domain import Domain, open_features
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.plot import table as tables
from hplm.store import artifact, domain_version
from hplm.store.layout import Store
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.study import FeatureSource
from hplm_builder.export.register import lineage_of
from hplm_builder.tenants.trained_layers import plot_features

OVERLAY_WINDOWS = 65_536  # kept results, so that each window is computed once


@dataclass(frozen=True)
class ServedDomain:
    """A domain of a store, whose features are looked up as serving looks them up."""

    store: Store
    base: Base
    domain: str
    miss: str = "compute"

    def __post_init__(self) -> None:
        if self.miss not in ("compute", "backoff"):
            raise ConfigError(f"--miss must be compute or backoff, got {self.miss!r}")

    @cached_property
    def lineage(self) -> list[str]:
        """The folders of the domain's current version and of its ancestors. Raises what `lineage_of` raises."""
        return lineage_of(self.store, self.base, self.domain)

    @cached_property
    def source(self) -> FeatureSource:
        name = f"{self.domain}-{self.miss}"
        if self.base.config.is_whole:
            name = "whole"
        return FeatureSource(name, lambda task, report: plot_features(self.lookup))

    @cached_property
    def lookup(self) -> Domain:
        """The open domain. It is opened when features are first needed."""
        return open_features(self.store, self.base, self.lineage, miss=self.miss)

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
        }
