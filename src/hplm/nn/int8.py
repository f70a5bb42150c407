"""Feed-forward halves of the upper layers in int8: a CPU with VNNI multiplies 8-bit integers twice as fast as bfloat16.

They are two thirds of a layer's products, and both of their inputs lie behind a LayerNorm: it gives every token the same
size, whatever a tenant's adapter did. What an adapter changes at once, the input of attention, stays in the engine's own
format.

Scales are fixed (static quantisation): with those of a batch a text's neighbours would change its answer. Integer sums are
exact in any order. Weights have a scale for each output; the input of the first product one for each channel, half of which
is put into the weights, for a few channels are ten times as large as the others (SmoothQuant, Xiao et al. 2023). Values
beyond the ranges of `hplm.nn.int8_ranges` are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hplm.errors import ConfigError
from hplm.nn.encoder import TransformerLayer

# How far beyond what was measured a value may lie before it is clipped.
MARGIN = 1.1
LEAST_GELU = -0.17
# Of the first product's input: `onednn::qlinear_pointwise` multiplies unsigned by signed bytes.
ZERO_POINT = 128


@dataclass(frozen=True)
class Ranges:
    """Of one layer: `channels` `[H]`, the largest magnitude of each of the first product's inputs; `most`, of the second's."""

    channels: Tensor
    most: float


@dataclass(frozen=True)
class Int8Linear:
    """A product: `codes` int8 `[out, in]` times `scales` `[out]` are its weights, `bias` is `[out]`.

    An input's code, unsigned, less `zero_point`, times `input_scale` is the input.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    input_scale: float
    zero_point: int

    def packed(self) -> list[Tensor]:
        """What `onednn::qlinear_pointwise` takes of it: matrix in its order, scales, zero points and bias of outputs."""
        zeros = torch.zeros(len(self.scales), dtype=torch.long)
        return [torch.ops.onednn.qlinear_prepack(self.codes, None), self.scales, zeros, self.bias]


@dataclass(frozen=True)
class Int8FeedForward:
    """Of one layer. An input `[H]` times `factor` `[H]` is `first`'s code, less its zero point."""

    factor: Tensor
    first: Int8Linear
    second: Int8Linear


def check_int8(device: torch.device, *, has_vnni: bool | None = None) -> None:
    """Raise ConfigError where int8 would not be faster, or is not there. `has_vnni`: of this machine unless given."""
    if device.type != "cpu":
        raise ConfigError("quantization int8 is for CPUs; leave it out on a GPU")
    if not (torch.cpu._is_vnni_supported() if has_vnni is None else has_vnni):
        raise ConfigError("quantization int8 wants a CPU with AVX-512 VNNI; leave it out on this one")
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise ConfigError(f"quantization int8 wants a torch with oneDNN, and {torch.__version__} is none; leave it out")


def quantise(layer: nn.Module, ranges: Ranges) -> Int8FeedForward:
    """The feed-forward half of a TransformerLayer in fp32."""
    assert isinstance(layer, TransformerLayer)
    weight = layer.ffn_in.weight.detach()
    largest = (MARGIN * ranges.channels).clamp(min=1e-3)
    smooth = (largest / weight.abs().amax(0).clamp(min=1e-5)).sqrt()
    input_scale = float((largest / smooth).max()) / (ZERO_POINT - 1)
    inner_scale = (MARGIN * max(ranges.most, 0.1) - LEAST_GELU) / 255
    return Int8FeedForward(
        1 / (smooth * input_scale),
        _linear(weight * smooth, layer.ffn_in.bias, input_scale, ZERO_POINT),
        _linear(layer.ffn_out.weight.detach(), layer.ffn_out.bias, inner_scale, round(-LEAST_GELU / inner_scale)),
    )


def _linear(weight: Tensor, bias: Tensor, input_scale: float, zero_point: int) -> Int8Linear:
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    return Int8Linear(codes, scales, bias.detach().float().clone(), input_scale, zero_point)
