"""Tables of any size, as far as given texts can tell: only rows that the texts ask for are computed and written.

A look-up answers the same from these as from whole tables, which at a percentage of 100 would be gigabytes and hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hplm.core.settings import BaseConfig
from hplm.engine import lower_layers as lowers
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.plot.keys import pack
from hplm.plot.table import row_bytes
from hplm.plot.windows import Ids, centre, windows
from hplm.store.layout import Store
from hplm_builder.tables.plot_tables import Counted, write_windows

BERT_BASE_HIDDEN = 768
OWN_TABLE = "own table"  # no domain's name, of those above it


@dataclass(frozen=True)
class TableSize:
    """A table of the top `percent` of a corpus's distinct n-grams, whole: `rows`, and bytes with its base's width and with
    BERT-base's. A root's bigrams and unigrams are not counted.
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
    """A domain whose own table is to have other sizes: `lineage` as `open_lineage` takes it, `counted` from its corpus."""

    store: Store
    base: Base
    lineage: Sequence[Path | str]
    counted: Counted

    @property
    def is_root(self) -> bool:
        return len(self.lineage) == 1

    def size(self, percent: float) -> TableSize:
        """0: no table of its own, only those above it."""
        return TableSize.of(percent, len(self.counted.top(percent)) if percent else 0, self.base.config)

    def open(self, folder: Path, percent: float, miss: str, texts: Sequence[Ids]) -> OpenDomain:
        """The look-up with a table of that size, good for `texts` alone. Writes what it needs to `folder`, which is new."""
        if not percent:
            return self._opened(self.lineage[1:], miss)
        config = self.base.config
        asked, _ = windows(np.concatenate(texts), [len(ids) for ids in texts], config.window, config.pad_id)
        kept = self.counted.top(percent)
        if not self.is_root:
            self._write(folder / "branch", OWN_TABLE, _among(kept, asked, config))
            (folder / "lower").symlink_to((self.store.root / self.lineage[0] / "lower").absolute())
            return self._opened([folder, *self.lineage[1:]], miss)
        self._write(folder / "root", OWN_TABLE, _among(kept, asked, config))
        self._write(folder / "unigram", "unigram", np.unique(asked)[:, None])
        if config.window > 2:
            start = centre(config.window) - centre(2)
            bigrams = self.counted.bigrams(config.vocab_size)[: len(kept)]
            self._write(folder / "bigram", "bigram", _among(bigrams, asked[:, start : start + 2], config))
        return self._opened([folder], miss)

    def _opened(self, lineage: Sequence[Path | str], miss: str) -> OpenDomain:
        # What is of the store was checked when the features for training were opened.
        return open_lineage(self.store, self.base, lineage, miss=miss, verify=False)

    def _write(self, folder: Path, name: str, grams: Ids) -> None:
        lower = lowers.of_lineage(self.store, self.base, self.lineage)
        about: dict[str, Any] = {}
        dtype = choose_dtype("auto", CPU)
        write_windows(folder, name, grams, lower, self.base.fingerprint, about, dtype, lambda count: None)


def _among(grams: Ids, asked: Ids, config: BaseConfig) -> Ids:
    """Those of `grams` that are among `asked`, in their order."""
    return grams[np.isin(pack(grams, config.vocab_size), pack(asked, config.vocab_size))]
