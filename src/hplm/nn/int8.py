"""Feed-forward halves of the upper layers in int8: a CPU with VNNI multiplies 8-bit integers twice as fast as bfloat16.

They are two thirds of a layer's products, and both of their inputs lie behind a LayerNorm, so what they can be is known from
the base: no tenant's adapter can drive them far out of the range that was measured. What an adapter does change at once, the
input of attention, stays in the engine's own format.

Ranges are fixed (static quantisation): those of a batch would let a text's neighbours change its answer. Integer sums are
exact in any order. Weights have a scale for each output; the input of the first product one for each channel, part of which
is put into the weights, for a few channels are ten times as large as the others (SmoothQuant, Xiao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.errors import ConfigError
from hplm.nn.base import Base
from hplm.nn.encoder import TransformerLayer, UpperEncoder, merge_windows
from hplm.plot.windows import windows
from hplm.text import TextEncoder

# What ranges are measured on beside strings of any of the vocabulary's tokens, for bases of other languages.
TEXTS = (
    "The council voted 7 to 2 on Tuesday to repair the old bridge before winter.",
    "A moving, beautifully acted film that never quite earns its final scene.",
    "Patients treated with 20 mg of the inhibitor showed a 35 % lower risk of relapse (p < 0.01).",
    "hi, my card was charged twice for the same order, can you please refund one of them?",
    "We propose a method for learning sentence representations from unlabelled text.",
    "Mutations of the BRCA1 gene are associated with hereditary breast and ovarian cancer.",
    "what's the weather going to be like in Lisbon this weekend",
    "lol that was the WORST ending ever!!! do not watch it :(",
    "Quarterly revenue rose to $4.2 billion, up from $3.9 billion a year earlier.",
    "This work extends the results of Smith et al. (2009) to the non-linear case.",
    "Set a timer for twenty-five minutes, then remind me to call my sister.",
    "Aspirin irreversibly inhibits cyclooxygenase and thereby the synthesis of thromboxane A2.",
    "It rained.",
    "The defendant shall deliver the goods within thirty (30) days of the date of this agreement.",
    "def area(r): return 3.14159 * r ** 2  # of a circle",
    "No, I have not been able to log in since the update; the page says 'error 503'.",
    "In 1868 the family moved to Vienna, where her father taught mathematics at a secondary school.",
    "Breaking: earthquake of magnitude 6.1 off the coast, no tsunami warning so far https://example.org",
    "Preheat the oven to 180 degrees, whisk three eggs with the sugar and fold in the flour.",
    "Funny, sad and wise.",
    "The receptor antagonist reduced dopamine-induced locomotion in mice but not in rats.",
    "How do I transfer money from my savings account to my brother's account abroad?",
    "Named entity recognition and relation extraction were evaluated on the ACE 2005 corpus.",
    "Huntington's disease is caused by an expanded CAG repeat in the HTT gene.",
)
STRINGS, STRING_TOKENS = 24, 32
# How far beyond what was measured a value may lie before it is clipped.
MARGIN = 1.1
LEAST_GELU = -0.17
# `onednn::qlinear_pointwise` multiplies unsigned by signed bytes.
MIDDLE = 128


@dataclass(frozen=True)
class Ranges:
    """Of one layer: `channels` `[H]`, the largest magnitude of each of the first product's inputs; `most`, of the second's."""

    channels: Tensor
    most: float


class Int8Weights(NamedTuple):
    """Of one layer, as `RunLayers` takes them.

    `tensors`: `to_codes` `[H]`, an input times which is its code less MIDDLE; then of each product its packed matrix, the
    scales, zero points and bias of its outputs. `input_scale` and `inner_scale` are what one step of an input's code is
    worth, `inner_zero` is the code of 0 in the second product's input.
    """

    tensors: list[Tensor]
    input_scale: float
    inner_scale: float
    inner_zero: int


def check_int8(device: torch.device) -> None:
    """Raise ConfigError where int8 would not be faster, or is not there."""
    if device.type != "cpu":
        raise ConfigError("quantization int8 is for CPUs; leave it out on a GPU")
    if not torch.cpu._is_vnni_supported() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise ConfigError("quantization int8 wants a CPU with AVX-512 VNNI; leave it out on this one")


def measure_ranges(base: Base, upper: UpperEncoder) -> list[Ranges]:
    """Ranges of each upper layer, of no tenant, on TEXTS and on random strings of tokens. Under two seconds of one core."""
    config = base.config
    texts = [one.ids for one in TextEncoder(base.tokenizer_path, config.max_tokens).encode(list(TEXTS))]
    rng = np.random.default_rng(0)
    length = min(STRING_TOKENS, config.max_tokens)
    texts += [rng.integers(0, config.vocab_size, length).astype(np.int64) for _ in range(STRINGS)]
    lengths = [len(ids) for ids in texts]
    grams, exists = windows(np.concatenate(texts), lengths, config.window, config.pad_id)
    seen: list[Tensor] = []
    layers = [layer for layer in upper.layers if isinstance(layer, TransformerLayer)]
    hooks = [
        product.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for layer in layers
        for product in (layer.ffn_in, layer.ffn_out)
    ]
    try:
        with torch.inference_mode():
            upper(merge_windows(base.load_lower()(torch.from_numpy(grams)), torch.from_numpy(exists)), lengths)
    finally:
        for hook in hooks:
            hook.remove()
    return [Ranges(given.abs().amax(0), float(inner.max())) for given, inner in zip(seen[::2], seen[1::2], strict=True)]


def quantise(layer: nn.Module, ranges: Ranges) -> Int8Weights:
    """The feed-forward half of `layer`, in fp32, as int8."""
    assert isinstance(layer, TransformerLayer)
    first, second = layer.ffn_in.weight.detach(), layer.ffn_out.weight.detach()
    largest = (MARGIN * ranges.channels).clamp(min=1e-3)
    # Half of what makes channels unequal goes into the weights.
    smooth = (largest / first.abs().amax(0).clamp(min=1e-5)).sqrt()
    input_scale = float((largest / smooth).max()) / (MIDDLE - 1)
    inner_scale = (MARGIN * max(ranges.most, 0.1) - LEAST_GELU) / 255
    inner_zero = round(-LEAST_GELU / inner_scale)
    tensors = [1 / (smooth * input_scale)]
    for weight, linear in ((first * smooth, layer.ffn_in), (second, layer.ffn_out)):
        scales = weight.abs().amax(1).clamp(min=1e-8) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        tensors += [torch.ops.onednn.qlinear_prepack(codes, None), scales, zeros, linear.bias.detach().float().clone()]
    return Int8Weights(tensors, input_scale, inner_scale, inner_zero)


def reference_feed_forward(layer: TransformerLayer, ranges: Ranges, hidden: Tensor) -> Tensor:
    """The slow twin of `RunLayers`' int8 half: the same codes, multiplied in fp64. `hidden` `[N, H]` -> `[N, H]`."""
    weights = quantise(layer, ranges)
    to_codes, inner_scale, zero = weights.tensors[0], weights.inner_scale, weights.inner_zero
    smooth = 1 / (to_codes * weights.input_scale)

    def product(codes: Tensor, step: float, weight: Tensor, bias: Tensor) -> Tensor:
        scales = weight.abs().amax(1).clamp(min=1e-8) / 127
        return (codes.double() @ (weight / scales[:, None]).round().double().T) * scales * step + bias

    codes = (hidden.float() * to_codes + MIDDLE + 0.5).clamp(0, 255).floor() - MIDDLE
    inner = F.gelu(product(codes, weights.input_scale, layer.ffn_in.weight * smooth, layer.ffn_in.bias))
    codes = (inner / inner_scale + zero).round().clamp(0, 255) - zero
    return product(codes, inner_scale, layer.ffn_out.weight, layer.ffn_out.bias).float()
