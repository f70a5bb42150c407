"""The layers of one student: adapters in the trunk's frozen layers (`shared`), or layers of the student's own (`own`)."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hplm.adapters.packed import Place
from hplm.adapters.students import Form
from hplm.models.layers import Adapt, Attend, TransformerLayer, UpperLayers, packed_attention, packed_positions
from hplm_builder.tenants.bodies import AdapterModel, adapter_body


class StudentBody(nn.Module):
    """A student over the features of the trunk. Its output is the hidden states `[N, H]` of its last layer."""

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.middle_and_last(features, lengths)[1]

    @abstractmethod
    def middle_and_last(self, features: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute the hidden states that imitate the ensemble so far (eq. 3), and those of the last layer, both `[N, H]`."""

    @abstractmethod
    def next_student(self) -> StudentBody:
        """Return a copy, from which the next student begins."""


class SharedStudent(StudentBody):
    """A student of the form `shared`: the trunk's frozen layers with adapters of its own."""

    def __init__(self, adapters: AdapterModel) -> None:
        super().__init__()
        self.adapters = adapters

    def middle_and_last(self, features: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        upper = self.adapters.upper
        hidden, attend = _begin(upper, features, lengths)
        return run_layers(upper.layers, hidden, attend, self.adapters.adapt)

    def next_student(self) -> SharedStudent:
        made = AdapterModel(self.adapters.upper, 1, self.adapters.adapter(), self.adapters.at)
        return SharedStudent(made)


class OwnStudent(StudentBody):
    """A student of the form `own`: layers of its own over the trunk's frozen embeddings."""

    def __init__(self, upper: UpperLayers, layers: nn.ModuleList) -> None:
        super().__init__()
        self._upper = [upper.requires_grad_(False)]  # in a list: not a part of this module
        self.layers = copy.deepcopy(layers).float().requires_grad_(True)

    def middle_and_last(self, features: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        hidden, attend = _begin(self._upper[0], features, lengths)
        return run_layers(self.layers, hidden, attend)

    def next_student(self) -> OwnStudent:
        return OwnStudent(self._upper[0], self.layers)

    def round_as_served(self) -> None:
        """Round all weights to bfloat16, in which they are stored and served."""
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(weight.bfloat16())


def first_student(upper: UpperLayers, form: Form, reduction_factor: int, at: Place) -> Callable[[], StudentBody]:
    """Return what makes fresh first students over `upper`, the layers of the trunk."""
    if form == "shared":
        make_adapters = adapter_body(upper, reduction_factor, at=at)

        def shared() -> StudentBody:
            adapters = make_adapters()
            assert isinstance(adapters, AdapterModel)
            return SharedStudent(adapters)

        return shared
    return lambda: OwnStudent(upper, upper.layers)


def run_layers(
    layers: nn.ModuleList, hidden: Tensor, attend: Attend, adapt: Adapt | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the layers; return the output of layer ceil(N/2), which eq. 3 is about, and that of the last layer.

    A single layer has no layer before the last. There eq. 3 is about the output of the layer's attention sub-layer, and the
    feed-forward sub-layer corrects it.
    """
    middle = hidden
    for index, layer in enumerate(layers):
        assert isinstance(layer, TransformerLayer)
        attended = layer.attention_half(hidden, attend, None if adapt is None else _bound(adapt, index))
        hidden = layer.feed_forward(attended)
        if index + 1 == math.ceil(len(layers) / 2):
            middle = hidden if len(layers) > 1 else attended
    return middle, hidden


def _begin(upper: UpperLayers, features: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Attend]:
    """Return the input of the first layer, and attention within each text."""
    hidden = upper.embed(features, packed_positions(lengths, features.device))
    return hidden, packed_attention(upper.config.num_heads, lengths, upper.relative)


def _bound(adapt: Adapt, index: int) -> Callable[[Place, Tensor], Tensor]:
    return lambda place, tokens: adapt(place, index, tokens)
