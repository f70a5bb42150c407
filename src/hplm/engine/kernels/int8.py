"""Products with layers' matrices in int8: a CPU with VNNI multiplies 8-bit integers faster than floats.

Feed-forward halves are two thirds of the upper layers' matrices. Both of their inputs stand behind a LayerNorm, which gives
every token the same size, whatever a tenant's adapter did. So their scales are fixed (static quantisation), and values beyond
the ranges of `hplm.engine.kernels.int8_ranges` are clipped.

An adapter may make the inputs of attention's two products arbitrarily large, so each token has a scale of its own there.
Computing the scale takes time and still pays, beside float32 and beside bfloat16 (docs/decisions.md).

Lower encoders have no adapters, so the scales of all their products are fixed (`hplm.engine.windows.int8_windows` and
`hplm.engine.ngram_encoder`).

A scale for a whole batch would let a text's neighbours change its answer. Fixed scales and a token's own scale do not, and
integer sums are exact in any order. Weights have a scale for each output. A few channels of an input are ten times as large as
the others: half of that factor moves into the weights (SmoothQuant, Xiao et al. 2023). The input of the second feed-forward
product is a GELU's output, to which such factors cannot be applied. If a few of its channels would leave the others half of the
codes or fewer, those few are computed apart, in floats (LLM.int8(), Dettmers et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hplm.engine.kernels.onednn import pack_matrix
from hplm.errors import ConfigError
from hplm.models.layers import HalfLayer, TransformerLayer

# A value is clipped beyond this factor of the measured range.
MARGIN = 1.1
LEAST_GELU = -0.17  # the least value of the GELU
# Least range of the second feed-forward product's input.
LEAST_INNER = 0.1
# Least range of a channel. An adapter may widen a channel, so in the products around attention a range is also at least this
# share of the channels' mean. Otherwise the widened channel would take up the token's whole scale.
LEAST_RANGE = 1e-3
LEAST_SHARE = 0.1
# Number of inner channels computed apart. Two take as long as eight, one takes a fifth less. With eight, MiniLM's windows move
# by 0.1 % of their variance, without by 1.2 %. Hidden states of its upper layers move by 0.18 and 0.33 % (attention in floats).
APART = 8
# Channels are computed apart if the largest is more than this many times as large as the largest of the rest.
FAR = 2
# Zero point of all inputs but the second product's: `onednn::qlinear_pointwise` multiplies unsigned by signed bytes.
ZERO_POINT = 128
# Largest code of weights, and of inputs less ZERO_POINT.
LARGEST = 127
# Least magnitude of a token, so that a token of zeros has a scale.
LEAST_TOKEN = 1e-20


@dataclass(frozen=True)
class Ranges:
    """The largest magnitude of each input channel of one layer's products.

    `attention`, `context` and `channels`, each `[H]`, are the inputs of queries, keys and values, of attention's output product
    and of the feed-forward half's first product. `inner` `[F]` has the largest values, not magnitudes, of its second product.
    """

    attention: Tensor
    context: Tensor
    channels: Tensor
    inner: Tensor


@dataclass(frozen=True)
class Int8Linear:
    """A product in int8: `codes` int8 `[out, in]` times `scales` `[out]` are the weights, `bias` is `[out]`.

    An input is its code, unsigned, less `zero_point`, times `input_scale`.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    input_scale: float
    zero_point: int

    def packed(self) -> list[Tensor]:
        """Return what `onednn::qlinear_pointwise` takes: matrix in oneDNN's order, outputs' scales, zero points and bias."""
        zeros = torch.zeros(len(self.scales), dtype=torch.long)
        return [torch.ops.onednn.qlinear_prepack(self.codes, None), self.scales, zeros, self.bias]


@dataclass(frozen=True)
class Int8StaticLinear:
    """A product with fixed scales. An input `[in]` times `factor` `[in]` is `linear`'s code less its zero point."""

    factor: Tensor
    linear: Int8Linear


@dataclass(frozen=True)
class Int8FeedForward:
    """The feed-forward half of one layer. Inner channels `apart` are computed in floats, and are zeros in both products."""

    first: Int8StaticLinear
    second: Int8Linear
    apart: list[int]


@dataclass(frozen=True)
class PackedHalf:
    """A feed-forward half as `hplm.engine.kernels.int8_products.feed_forward` takes it, matrices in oneDNN's order.

    `first`: factor, rounding (see `static_codes`) and packed matrix. `second`: packed matrix. `scales` and `zeros` are those of
    the codes that go into each. `apart`: first matrix, bias and second matrix of the channels in floats; empty without them.
    """

    first: list[Tensor]
    second: list[Tensor]
    scales: tuple[float, float]
    zeros: tuple[int, int]
    apart: list[Tensor]


@dataclass(frozen=True)
class Int8TokenLinear:
    """A product with a scale for each token: `codes` int8 `[out, in]` times `scales` `[out]` are weights, `bias` is `[out]`.

    A token's codes less ZERO_POINT are its inputs `[in]` times `factor` `[in]`, scaled so that the largest is LARGEST.
    """

    factor: Tensor
    codes: Tensor
    scales: Tensor
    bias: Tensor

    def packed(self) -> list[Tensor]:
        """Return factor, bias, and what `onednn::qlinear_pointwise` takes: matrix, scales and zero points of outputs.

        The scales are those of inputs divided by their token's largest magnitude.
        """
        zeros = torch.zeros(len(self.scales), dtype=torch.long)
        matrix = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return [self.factor, self.bias, matrix, self.scales / LARGEST, zeros]


@dataclass(frozen=True)
class Int8Layer:
    """An upper layer: the products of queries, keys and values, attention's output product, and the feed-forward half."""

    qkv: Int8TokenLinear
    attention_out: Int8TokenLinear
    half: Int8FeedForward


def check_int8(device: torch.device, *, has_vnni: bool | None = None) -> None:
    """Raise ConfigError if the device lacks fast int8. `has_vnni` is this machine's by default."""
    if device.type != "cpu":
        raise ConfigError(
            "quantization int8 is for CPUs; leave it out on a GPU (a look-up stage on the CPU may have it)"
        )
    if not (torch.cpu._is_vnni_supported() if has_vnni is None else has_vnni):
        raise ConfigError("quantization int8 wants a CPU with AVX-512 VNNI; leave it out on this one")
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise ConfigError(f"quantization int8 wants a torch with oneDNN, and {torch.__version__} is none; leave it out")


def channels_apart(ranges: Ranges) -> list[int]:
    """Return the APART largest inner channels, if the largest is more than FAR times as large as the rest; else none."""
    if len(ranges.inner) <= APART:
        return []
    largest = ranges.inner.topk(APART + 1)
    if float(largest.values[0]) <= FAR * float(largest.values[-1]):
        return []
    channels: list[int] = largest.indices[:-1].tolist()
    return channels


def widest_inner(ranges: Ranges) -> float:
    """Return the range of the inner channels that are not apart; values beyond MARGIN times this range are clipped."""
    others = ranges.inner.clone()
    others[channels_apart(ranges)] = 0
    return max(float(others.max()), LEAST_INNER)


def quantise_layer(layer: nn.Module, ranges: Ranges) -> Int8Layer:
    """Quantise a TransformerLayer in fp32."""
    assert isinstance(layer, TransformerLayer)
    return Int8Layer(
        _token_linear(layer.qkv, ranges.attention),
        _token_linear(layer.attention_out, ranges.context),
        quantise_half(layer, ranges),
    )


def quantise_half(layer: nn.Module, ranges: Ranges) -> Int8FeedForward:
    """Quantise the feed-forward half of a layer, or a block, in fp32."""
    assert isinstance(layer, HalfLayer)
    apart = channels_apart(ranges)
    stays = torch.ones(len(ranges.inner))
    stays[apart] = 0
    first = quantise_static(layer.ffn_in.weight * stays[:, None], layer.ffn_in.bias * stays, ranges.channels)
    inner_scale = (MARGIN * widest_inner(ranges) - LEAST_GELU) / 255
    zero_point = round(-LEAST_GELU / inner_scale)
    second = _linear(layer.ffn_out.weight.detach() * stays, layer.ffn_out.bias, inner_scale, zero_point)
    return Int8FeedForward(first, second, apart)


def pack_static(static: Int8StaticLinear) -> list[Tensor]:
    """Return factor, rounding (see `static_codes`) and packed matrix of a product."""
    return [static.factor, torch.tensor(static.linear.zero_point + 0.5), *static.linear.packed()]


def pack_half(layer: HalfLayer, ranges: Ranges) -> PackedHalf:
    """Quantise the feed-forward half of a layer, or a block, in fp32, and put its matrices in oneDNN's order."""
    half = quantise_half(layer, ranges)
    first, second = half.first.linear, half.second
    apart: list[Tensor] = []
    if half.apart:
        inner = layer.ffn_in
        apart = [pack_matrix(inner.weight[half.apart]), inner.bias.detach()[half.apart]]
        apart += [pack_matrix(layer.ffn_out.weight[:, half.apart])]
    return PackedHalf(
        pack_static(half.first),
        second.packed(),
        (first.input_scale, second.input_scale),
        (first.zero_point, second.zero_point),
        apart,
    )


def quantise_static(weight: Tensor, bias: Tensor, channels: Tensor) -> Int8StaticLinear:
    """Quantise a product whose inputs have the ranges `channels` `[in]`, with a margin."""
    weight = weight.detach()
    largest = (MARGIN * channels).clamp(min=LEAST_RANGE)
    smooth = _smooth(largest, weight)
    input_scale = float((largest / smooth).max()) / LARGEST
    return Int8StaticLinear(1 / (smooth * input_scale), _linear(weight * smooth, bias, input_scale, ZERO_POINT))


def _smooth(largest: Tensor, weight: Tensor) -> Tensor:
    """Return the factors `[in]` by which inputs are divided and their weights multiplied."""
    return (largest / weight.abs().amax(0).clamp(min=1e-5)).sqrt()


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights in int8, and the scale of each output."""
    scales = weight.abs().amax(1).clamp(min=1e-8) / LARGEST
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _linear(weight: Tensor, bias: Tensor, input_scale: float, zero_point: int) -> Int8Linear:
    return Int8Linear(*_codes(weight), bias.detach().float().clone(), input_scale, zero_point)


def _token_linear(linear: nn.Linear, channels: Tensor) -> Int8TokenLinear:
    weight = linear.weight.detach()
    smooth = _smooth(channels.clamp(min=max(LEAST_RANGE, LEAST_SHARE * float(channels.mean()))), weight)
    return Int8TokenLinear(1 / smooth, *_codes(weight * smooth), linear.bias.detach().float().clone())
