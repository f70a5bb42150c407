"""Tables of any size for known texts: only rows that the texts need are computed and written.

A look-up of those texts answers as from whole tables, which at a percentage of 100 would take gigabytes and hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hplm.core.settings import BaseConfig
from hplm.engine import lower_layers as lowers
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.plot.keys import pack
from hplm.plot.ngrams import Ids, middle, text_ngrams
from hplm.plot.table import row_bytes
from hplm.store.domain_version import has_branch
from hplm.store.layout import Store
from hplm_builder.tables.plot_tables import Counted, write_ngrams

BERT_BASE_HIDDEN = 768
OWN_TABLE = "own table"  # level of the look-up; no domain above it can have this name


@dataclass(frozen=True)
class TableSize:
    """The size of a whole table of the top `percent` of a corpus's distinct n-grams, without a root's bigrams and unigrams.

    The bytes are those of its base's width and of BERT-base's.
    """

    percent: float
    rows: int
    megabytes: float
    bert_base_gigabytes: float

    @classmethod
    def of(cls, percent: float, rows: int, config: BaseConfig) -> TableSize:
        return cls(
            percent, rows, rows * row_bytes(config) / 1e6, rows * row_bytes(config, hidden_size=BERT_BASE_HIDDEN) / 1e9
        )


@dataclass(frozen=True)
class VersionTree:
    """A domain whose own table can have other sizes: `lineage` as `open_lineage` takes it, `counted` from its corpus."""

    store: Store
    base: Base
    lineage: Sequence[Path | str]
    counted: Counted

    def __post_init__(self) -> None:
        """Raises ConfigError if the domain has no table whose size could differ."""
        if not self.is_root and not has_branch(folder := self.store.root / self.lineage[0]):
            raise ConfigError(f"domain {folder.parent.name!r} was built without a table: name a domain that has one")

    @property
    def is_root(self) -> bool:
        return len(self.lineage) == 1

    def size(self, percent: float) -> TableSize:
        """Return the table's size at `percent`; at 0 the domain has no table of its own, only those above it."""
        return TableSize.of(percent, len(self.counted.top(percent)) if percent else 0, self.base.config)

    def open(self, folder: Path, percent: float, miss: str, texts: Sequence[Ids]) -> OpenDomain:
        """Open the look-up with a table of that size, for `texts` alone. Its tables are written to `folder`, which is new."""
        if not percent:
            return self._opened(self.lineage[1:], miss)
        config = self.base.config
        needed, _ = text_ngrams(np.concatenate(texts), [len(ids) for ids in texts], config)
        kept = self.counted.top(percent)
        if not self.is_root:
            self._write(folder / "branch", OWN_TABLE, _among(kept, needed, config))
            (folder / "lower").symlink_to((self.store.root / self.lineage[0] / "lower").absolute())
            return self._opened([folder, *self.lineage[1:]], miss)
        self._write(folder / "root", OWN_TABLE, _among(kept, needed, config))
        self._write(folder / "unigram", "unigram", np.unique(needed)[:, None])
        if config.window > 2:
            bigrams = self.counted.bigrams(config.vocab_size)[: len(kept)]
            self._write(folder / "bigram", "bigram", _among(bigrams, needed[:, middle(2, config.window)], config))
        return self._opened([folder], miss)

    def _opened(self, lineage: Sequence[Path | str], miss: str) -> OpenDomain:
        # The store's files were checked when the features for training were opened.
        return open_lineage(self.store, self.base, lineage, miss=miss, verify=False)

    def _write(self, folder: Path, name: str, grams: Ids) -> None:
        lower = lowers.of_lineage(self.store, self.base, self.lineage)
        dtype = choose_dtype("auto", CPU)
        write_ngrams(folder, name, grams, lower, self.base.fingerprint, {}, dtype, lambda count: None)


def _among(grams: Ids, needed: Ids, config: BaseConfig) -> Ids:
    """Return the n-grams that are among `needed`, in their order."""
    return grams[np.isin(pack(grams, config.vocab_size), pack(needed, config.vocab_size))]
