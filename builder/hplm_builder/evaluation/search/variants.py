"""The rows of a comparison: which features a variant takes, and what it trains above them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hplm.adapters.packed import Place
from hplm.core.settings import REDUCTION_FACTOR, Quantization
from hplm.core.text import EncodedText
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, computing_in
from hplm.models.layers import OriginalEncoder, WindowEncoder
from hplm.plot import table as tables
from hplm.reporting.progress import Report
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.original import base_config, load_original
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.export.register import lineage_of
from hplm_builder.tenants.bodies import (
    ADAPTER_AT,
    ConvertedModel,
    FullModel,
    Half,
    HeadModel,
    OriginalUpper,
    adapter_body,
    fastest_format,
)
from hplm_builder.tenants.finetune import Trained
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE, upper_body
from hplm_builder.tenants.tenant_build import plot_features, token_ids

MakeBody = Callable[[], nn.Module]
About = Callable[[EvalTask], Mapping[str, Any]]
OVERLAY_WINDOWS = 65_536
# Of the middle of each grid: where training is neither slow nor unsteady on the tasks at hand.
RATES: Mapping[str, float] = {
    "dedicated": 1e-4,
    "shared": 1e-2,
    "adapter": 2e-3,
    "plot": TEACHER_RATE,
    "hbert": 2e-3,
}


@dataclass(frozen=True)
class FeatureSource:
    """Where features come from. Sources of one `name` give the same; `open` may build what the task needs first."""

    name: str
    open: Callable[[EvalTask, Report], Featurise]


@dataclass(frozen=True)
class Variant:
    """What is compared. `body` is asked for when `source` is open; `rate` is the middle of the grid; `about` gives, in JSON
    values, what a task's results depend on.

    `more(task, data, trained)` measures what else a trained model is asked, which costs `more_tests` predictions of the
    test part. A variant that `costs_as` another is not measured to estimate the time. One that is `taught` also learns
    from as many texts that the budget takes no label of, see `hplm_builder.tenants.pseudo_labels`.
    """

    name: str
    base: Base
    source: FeatureSource
    body: Callable[[EvalTask], MakeBody]
    rate: float
    about: About
    more: Callable[[EvalTask, LabelledData, Trained], dict[str, Any]] | None = None
    more_tests: int = 0
    costs_as: Variant | None = None
    taught: bool = False


@dataclass(frozen=True)
class ServedDomain:
    """The features of a domain of a store, as serving looks them up."""

    store: Store
    base: Base
    domain: str
    miss: str = "compute"
    quantization: Quantization = "none"

    def __post_init__(self) -> None:
        if self.miss not in ("compute", "backoff"):
            raise ConfigError(f"--miss is compute or backoff, got {self.miss!r}")

    @cached_property
    def lineage(self) -> list[str]:
        """Folders of the domain's current version and those above it. Raises what finding it raises."""
        return lineage_of(self.store, self.base, self.domain)

    @cached_property
    def source(self) -> FeatureSource:
        name = f"{self.domain}-{self.miss}" + ("" if self.quantization == "none" else f"-{self.quantization}")
        return FeatureSource(name, lambda task, report: plot_features(self.lookup))

    @cached_property
    def lookup(self) -> OpenDomain:
        """Opened when features are first asked for."""
        return open_lineage(self.store, self.base, self.lineage, miss=self.miss, quantization=self.quantization)

    def about(self, task: EvalTask | None = None) -> dict[str, Any]:
        """JSON values that tell it from others; the same for every task."""
        *branches, root = (self.store.root / path for path in self.lineage)
        folders = [*(branch / "branch" for branch in branches), root / "root"]
        return {
            "base": self.base.fingerprint,
            "domain": self.domain,
            "tables": [artifact.read(folder, tables.KIND).fingerprint for folder in folders],
            "miss": self.miss,
            # Results of before there was a choice say nothing.
            **({} if self.quantization == "none" else {"quantization": self.quantization}),
        }


def hbert_body(
    base: Base, device: torch.device, at: Place = ADAPTER_AT, reduction_factor: int = REDUCTION_FACTOR
) -> Callable[[EvalTask], MakeBody]:
    """Adapters in the base's frozen upper layers."""
    return lambda task: adapter_body(base.load_upper(), reduction_factor, device=device, at=at)


def with_adapters(about: About, at: Place = ADAPTER_AT, reduction_factor: int = REDUCTION_FACTOR) -> About:
    """The same where adapters train: results depend on where they stand, and on how large they are. Those of HMI's place, and
    of its size, say nothing, as all once did.
    """
    more: dict[str, Any] = {} if at == "attention" else {"adapter_at": at}
    if reduction_factor != REDUCTION_FACTOR:
        more["reduction_factor"] = reduction_factor
    return lambda task: {**about(task), **more}


def plot_body(base: Base) -> Callable[[EvalTask], MakeBody]:
    """All of the base's upper layers."""
    return lambda task: upper_body(base)


def converted_body(base: Base, lower: WindowEncoder, halves: Collection[Half]) -> MakeBody:
    """Either half of a base, or both, over token ids."""
    upper = base.load_upper()
    return lambda: ConvertedModel(copy.deepcopy(lower), copy.deepcopy(upper), halves)


def computed_features(lower: WindowEncoder) -> Featurise:
    """PLOT features of a model without tables: every window is computed."""
    dtype = choose_dtype("auto", CPU)
    return plot_features(OpenDomain(lower.config, [], [], lower, overlay_windows=OVERLAY_WINDOWS, dtype=dtype))


@dataclass(frozen=True)
class OriginalModel:
    """The model that a base was converted from, read once, when it is needed."""

    base: Base
    folder: Path
    device: torch.device = CPU

    def check(self) -> None:
        """Raises ConfigError where the base cannot have been converted from it, DataError where it is no BERT."""
        config = self.base.config
        shape = base_config(
            self.folder,
            name=config.name,
            lower_layers=1,
            window=config.window,
            window_layers=1,
            max_tokens=config.max_tokens,
        )
        keys = ("vocab_size", "hidden_size", "num_heads", "intermediate_size")
        if shape.upper_layers < config.upper_layers or any(getattr(shape, k) != getattr(config, k) for k in keys):
            raise ConfigError(f"base {config.name} was not converted from {self.folder}: give the right --original")

    @cached_property
    def model(self) -> OriginalEncoder:
        return load_original(self.folder, self.base.config)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over its weights."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def token_ids(self) -> FeatureSource:
        return FeatureSource("tokens", lambda task, report: token_ids)

    def last_states(self) -> FeatureSource:
        """Its last hidden states."""
        return FeatureSource("original-last", lambda task, report: self._states(len(self.model.layers)))

    def cut_states(self) -> FeatureSource:
        """Its hidden states below the base's upper layers."""
        return FeatureSource(
            "original-cut", lambda task, report: self._states(len(self.model.layers) - self.base.config.upper_layers)
        )

    def full_body(self, task: EvalTask) -> MakeBody:
        """Everything trains."""
        return lambda: FullModel(copy.deepcopy(self.model))

    def adapter_body(
        self, at: Place = ADAPTER_AT, reduction_factor: int = REDUCTION_FACTOR
    ) -> Callable[[EvalTask], MakeBody]:
        """Adapters in its own frozen upper layers."""
        return lambda task: adapter_body(OriginalUpper.of(self.model), reduction_factor, device=self.device, at=at)

    def head_body(self, task: EvalTask) -> MakeBody:
        return HeadModel

    def _states(self, layers: int) -> Featurise:
        part = copy.deepcopy(self.model).to(self.device)
        part.layers = part.layers[:layers]

        def featurise(encoded: list[EncodedText]) -> list[Tensor]:
            # Texts of equal length go through attention together.
            order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
            lengths = [len(encoded[i].ids) for i in order]
            ids = torch.cat([torch.from_numpy(encoded[i].ids) for i in order]).to(self.device)
            with torch.no_grad(), computing_in(*fastest_format(self.device)):
                hidden = part(ids, lengths)[-1]
            # Rounded as PLOT rounds its vectors.
            found = dict(zip(order, hidden.to("cpu", torch.float16).split(lengths), strict=True))
            return [found[i] for i in range(len(encoded))]

        return featurise
