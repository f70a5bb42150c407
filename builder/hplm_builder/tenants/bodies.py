"""Bodies that fine-tuning trains below a head: adapters in frozen upper layers, and the comparisons of the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.packed import Adapter, Place
from hplm.models.device import CPU, choose_dtype, in_dtype
from hplm.models.layers import OriginalEncoder, UpperLayers

# The place of new tenants' adapters in a layer: docs/decisions.md has what it gives over HMI's place.
ADAPTER_AT: Place = "input"


class AdapterModel(nn.Module):
    """Frozen upper layers, of which the base's `adapted_layers` last ones have a trainable adapter `at` a place in the layer.

    `start` has the weights to go on from.
    """

    def __init__(
        self, upper: UpperLayers, reduction_factor: int, start: Adapter | None = None, at: Place = ADAPTER_AT
    ) -> None:
        super().__init__()
        self.at = at
        config = upper.config
        layers, hidden = config.adapted_layers, config.hidden_size
        self._first = config.upper_layers - layers
        reduced = config.reduced_size(reduction_factor) if start is None else start.down.shape[1]
        self._upper = [upper.requires_grad_(False)]  # in a list: not a parameter of this module
        # Small random down, zero up: training starts from the identity.
        self.down = nn.Parameter(torch.randn(layers, reduced, hidden) * hidden**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(layers, reduced))
        self.up = nn.Parameter(torch.zeros(layers, hidden, reduced))
        self.up_bias = nn.Parameter(torch.zeros(layers, hidden))
        if start is not None:
            self.load_state_dict({name: torch.tensor(array) for name, array in vars(start).items()})

    @property
    def upper(self) -> UpperLayers:
        """The frozen layers."""
        return self._upper[0]

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden: Tensor = self.upper(features, lengths, self.adapt)
        return hidden

    def layer_states(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Compute the output of each layer, as `forward` does that of the last."""
        return self.upper.states(features, lengths, self.adapt)[1:]

    def adapt(self, place: Place, layer: int, tokens: Tensor) -> Tensor:
        """Return the tokens `[N, H]`, changed by the layer's adapter if the adapter stands at `place`."""
        number = layer - self._first
        if place != self.at or number < 0:
            return tokens
        reduced = F.relu(F.linear(tokens, self.down[number], self.down_bias[number]))
        return tokens + F.linear(reduced, self.up[number], self.up_bias[number])

    def adapter(self) -> Adapter:
        """The trained weights."""
        return Adapter(*(p.detach().cpu().numpy().copy() for p in (self.down, self.down_bias, self.up, self.up_bias)))


class UpperModel(nn.Module):
    """All upper layers trainable, over the base's features."""

    def __init__(self, upper: UpperLayers) -> None:
        super().__init__()
        self.upper = upper

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden: Tensor = self.upper(features, lengths)
        return hidden


class FullModel(nn.Module):
    """The unconverted model, everything trainable, over token ids."""

    def __init__(self, original: OriginalEncoder) -> None:
        super().__init__()
        self.original = original

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.original(features, lengths)[-1]


class LastLayers(UpperLayers):
    """The last layers of a model that has not been cut, over its own hidden states below them, which have positions already."""

    @classmethod
    def of(cls, model: OriginalEncoder | UpperLayers) -> LastLayers:
        """Copy the last layers of an unconverted model or of a whole base, as many as the base has layers with adapters."""
        config = model.config
        upper = cls(replace(config, upper_layers=config.adapted_layers, adapter_layers=0))
        upper.layers.load_state_dict(model.layers[len(model.layers) - len(upper.layers) :].state_dict())
        if upper.relative is not None and model.relative is not None:
            upper.relative.load_state_dict(model.relative.state_dict())
        return upper.eval()

    def embed(self, merged: Tensor, positions: Tensor) -> Tensor:
        return merged.float()


class HeadModel(nn.Module):
    """A body without weights, because the features are last hidden states already."""

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        return features.float()


def fastest_format(device: torch.device = CPU) -> tuple[torch.dtype, torch.device]:
    """Return the number format that training on a device computes in, and the device, as `computing_in` takes them."""
    return choose_dtype("auto", device), device


def adapter_body(
    upper: UpperLayers,
    reduction_factor: int,
    start: Adapter | None = None,
    device: torch.device = CPU,
    at: Place = ADAPTER_AT,
) -> Callable[[], nn.Module]:
    """Return what makes fresh `AdapterModel`s over the same upper layers, which lie on `device`."""
    frozen = in_dtype(upper.to(device), fastest_format(device)[0])
    return lambda: AdapterModel(frozen, reduction_factor, start, at)


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's weights."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
