"""The layers that a tenant's adapters stand in while they are trained, and the features that these layers read.

No training changes the layers of a whole base below its adapters. So they are computed once for each text, not at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.core.text import EncodedText
from hplm.engine.open_domain import Domain
from hplm.models.base import Base
from hplm.models.device import CPU, computing_in
from hplm.models.layers import UpperLayers, packed_attention, packed_positions
from hplm_builder.tenants.bodies import LastLayers, fastest_format
from hplm_builder.tenants.prepared import Featurise


class TrainedLayers(NamedTuple):
    """Layers with their texts' features: `featurise` takes them, `token_bytes` are the bytes of a token's."""

    upper: UpperLayers
    featurise: Featurise
    token_bytes: int


def plot_features(lookup: Domain) -> Featurise:
    """Return what takes the features of texts: merged window vectors, or ids and types of tokens over a whole base."""
    return lambda encoded: [torch.from_numpy(features) for features in lookup.features(encoded)]


def trained_layers(base: Base, lookup: Domain, *, all_train: bool = False) -> TrainedLayers:
    """Return the layers to train a tenant in. With `all_train`, layers without adapters are trained too.

    The layers of a whole base below its adapters become part of `featurise`, unless they are trained.
    """
    upper, config = base.load_upper(), base.config
    if not config.is_whole or all_train or config.adapted_layers == config.upper_layers:
        return TrainedLayers(upper, plot_features(lookup), lookup.token_bytes)
    last = LastLayers.of(upper)
    return TrainedLayers(
        last, _StatesBelow(upper, config.upper_layers - config.adapted_layers, lookup), 2 * config.hidden_size
    )


@dataclass(frozen=True)
class _StatesBelow:
    """Computes the hidden states `[T, H]` of texts after the `first` layers of a whole base, rounded to float16."""

    upper: UpperLayers
    first: int
    lookup: Domain

    def __call__(self, encoded: list[EncodedText]) -> list[Tensor]:
        # Sorted, because texts of equal length go through attention together.
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
        features = self.lookup.features([encoded[i] for i in order])
        lengths = [len(text) for text in features]
        with torch.no_grad(), computing_in(*fastest_format(CPU)):
            hidden = self._compute(torch.from_numpy(np.concatenate(features)), lengths)
        states = dict(zip(order, hidden.to(torch.float16).split(lengths), strict=True))
        return [states[i] for i in range(len(encoded))]

    def _compute(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden = self.upper.embed(ids, packed_positions(lengths, ids.device))
        attend = packed_attention(self.upper.config.num_heads, lengths, self.upper.relative)
        for layer in range(self.first):
            hidden = self.upper.layer(layer, hidden, attend)
        return hidden
