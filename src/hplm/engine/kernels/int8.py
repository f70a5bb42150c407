"""Products with layers' matrices in int8: a CPU with VNNI multiplies 8-bit integers faster than floats.

Feed-forward halves are two thirds of the upper layers' matrices, and both of their inputs lie behind a LayerNorm: it gives
every token the same size, whatever a tenant's adapter did. So their scales are fixed (static quantisation), and values beyond
the ranges of `hplm.engine.kernels.int8_ranges` are clipped.

What goes into attention's two products an adapter may make as large as it likes: there each token has a scale of its own.
Finding that takes its time, and pays all the same, beside float32 and beside bfloat16 (docs/decisions.md).

The lower layers have no adapters (`hplm.engine.kernels.int8_windows`): there the scales of all products are fixed.

Scales of a batch would let a text's neighbours change its answer; neither of these does, and integer sums are exact in any
order. Weights have a scale for each output. A few channels of an input are ten times as large as the others: half of that is
put into the weights (SmoothQuant, Xiao et al. 2023). What goes into the second feed-forward product comes out of a GELU, which
knows no such factors: where a few channels of it would leave the others half of the codes or fewer, they are computed apart, in
floats (LLM.int8(), Dettmers et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hplm.errors import ConfigError
from hplm.models.layers import TransformerLayer

# How far beyond what was measured a value may lie before it is clipped.
MARGIN = 1.1
LEAST_GELU = -0.17
# What goes into the second feed-forward product is not taken for smaller.
LEAST_INNER = 0.1
# No channel is taken for narrower; where an adapter may widen one, none than this share of the mean: in a token's own scale
# it would be all that is left of that token.
LEAST_RANGE = 1e-3
LEAST_SHARE = 0.1
# As many inner channels are computed apart: two take as long, one takes a fifth less. MiniLM's windows move by 0.1 % of their
# variance with them and by 1.2 % without, hidden states of its upper layers by 0.18 and 0.33 % (attention in floats; by hand).
APART = 8
# How many times as large as the largest of the others one of them must be.
FAR = 2
# Of inputs but the second product's: `onednn::qlinear_pointwise` multiplies unsigned by signed bytes.
ZERO_POINT = 128
# Of weights' codes, and of inputs' less ZERO_POINT.
LARGEST = 127
# No token is taken for smaller, so that one of zeros has a scale.
LEAST_TOKEN = 1e-20


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of what goes into one layer's products.

    `attention`, `context` and `channels`, each `[H]`: of each input of the queries, keys and values, of attention's output,
    of the feed-forward half's first product. `inner` `[F]`: the largest, not in magnitude, of each input of its second.
    """

    attention: Tensor
    context: Tensor
    channels: Tensor
    inner: Tensor


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
class Int8StaticLinear:
    """A product with fixed scales. An input `[in]` times `factor` `[in]` is `linear`'s code, less its zero point."""

    factor: Tensor
    linear: Int8Linear


@dataclass(frozen=True)
class Int8FeedForward:
    """Of one layer. The inner channels `apart` are computed in floats: of these products they are zeros."""

    first: Int8StaticLinear
    second: Int8Linear
    apart: list[int]


@dataclass(frozen=True)
class Int8TokenLinear:
    """A product with a scale for each token: `codes` int8 `[out, in]` times `scales` `[out]` are its weights, `bias` `[out]`.

    An input `[in]` times `factor` `[in]`, over the largest magnitude of that and times LARGEST, is its code less ZERO_POINT.
    """

    factor: Tensor
    codes: Tensor
    scales: Tensor
    bias: Tensor

    def packed(self) -> list[Tensor]:
        """Factor and bias, and what `onednn::qlinear_pointwise` takes: matrix, scales and zero points of outputs.

        The scales are for inputs over their token's largest magnitude, whose codes are LARGEST times that.
        """
        zeros = torch.zeros(len(self.scales), dtype=torch.long)
        matrix = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return [self.factor, self.bias, matrix, self.scales / LARGEST, zeros]


@dataclass(frozen=True)
class Int8Layer:
    """Of an upper layer: queries, keys and values, what their attention goes through, and the feed-forward half."""

    qkv: Int8TokenLinear
    attention_out: Int8TokenLinear
    half: Int8FeedForward


def check_int8(device: torch.device, *, has_vnni: bool | None = None) -> None:
    """Raise ConfigError where int8 would not be faster, or is not there. `has_vnni`: of this machine unless given."""
    if device.type != "cpu":
        raise ConfigError("quantization int8 is for CPUs; leave it out on a GPU (hbert_plot, on the CPU, may have it)")
    if not (torch.cpu._is_vnni_supported() if has_vnni is None else has_vnni):
        raise ConfigError("quantization int8 wants a CPU with AVX-512 VNNI; leave it out on this one")
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise ConfigError(f"quantization int8 wants a torch with oneDNN, and {torch.__version__} is none; leave it out")


def channels_apart(ranges: Ranges) -> list[int]:
    """The largest APART of the inner channels, where one is more than FAR times as large as the rest; or none."""
    if len(ranges.inner) <= APART:
        return []
    largest = ranges.inner.topk(APART + 1)
    if float(largest.values[0]) <= FAR * float(largest.values[-1]):
        return []
    found: list[int] = largest.indices[:-1].tolist()
    return found


def widest_inner(ranges: Ranges) -> float:
    """Of the inner channels that are not apart; beyond MARGIN times this a value is clipped."""
    others = ranges.inner.clone()
    others[channels_apart(ranges)] = 0
    return max(float(others.max()), LEAST_INNER)


def quantise_layer(layer: nn.Module, ranges: Ranges) -> Int8Layer:
    """A TransformerLayer in fp32."""
    assert isinstance(layer, TransformerLayer)
    return Int8Layer(
        _token_linear(layer.qkv, ranges.attention),
        _token_linear(layer.attention_out, ranges.context),
        quantise_half(layer, ranges),
    )


def quantise_half(layer: nn.Module, ranges: Ranges) -> Int8FeedForward:
    """The feed-forward half of a TransformerLayer in fp32."""
    assert isinstance(layer, TransformerLayer)
    apart = channels_apart(ranges)
    stays = torch.ones(len(ranges.inner))
    stays[apart] = 0
    first = quantise_static(layer.ffn_in.weight * stays[:, None], layer.ffn_in.bias * stays, ranges.channels)
    inner_scale = (MARGIN * widest_inner(ranges) - LEAST_GELU) / 255
    zero_point = round(-LEAST_GELU / inner_scale)
    second = _linear(layer.ffn_out.weight.detach() * stays, layer.ffn_out.bias, inner_scale, zero_point)
    return Int8FeedForward(first, second, apart)


def quantise_static(weight: Tensor, bias: Tensor, channels: Tensor) -> Int8StaticLinear:
    """A product whose inputs are no larger than `channels` `[in]`, and a margin."""
    weight = weight.detach()
    largest = (MARGIN * channels).clamp(min=LEAST_RANGE)
    smooth = _smooth(largest, weight)
    input_scale = float((largest / smooth).max()) / LARGEST
    return Int8StaticLinear(1 / (smooth * input_scale), _linear(weight * smooth, bias, input_scale, ZERO_POINT))


def _smooth(largest: Tensor, weight: Tensor) -> Tensor:
    """What each input is divided by and its weights are multiplied with: `[in]`."""
    return (largest / weight.abs().amax(0).clamp(min=1e-5)).sqrt()


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in int8, and the scale of each output."""
    scales = weight.abs().amax(1).clamp(min=1e-8) / LARGEST
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _linear(weight: Tensor, bias: Tensor, input_scale: float, zero_point: int) -> Int8Linear:
    return Int8Linear(*_codes(weight), bias.detach().float().clone(), input_scale, zero_point)


def _token_linear(linear: nn.Linear, channels: Tensor) -> Int8TokenLinear:
    weight = linear.weight.detach()
    smooth = _smooth(channels.clamp(min=max(LEAST_RANGE, LEAST_SHARE * float(channels.mean()))), weight)
    return Int8TokenLinear(1 / smooth, *_codes(weight * smooth), linear.bias.detach().float().clone())
