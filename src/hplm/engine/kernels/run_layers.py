"""The upper layers as they are served. The same computation, readable, is `TransformerLayer.forward`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.engine.kernels.adapt import UNCHANGED, AdapterPlan, adapt_planned, with_fillers
from hplm.engine.kernels.attention import (
    attend_at_once,
    attend_by_length,
    attends_at_once,
    ends_of,
    float32_attention_below,
)
from hplm.engine.kernels.int8 import LARGEST, LEAST_TOKEN, ZERO_POINT, Int8Layer
from hplm.engine.kernels.int8_products import cut_off, gelu_codes, product, static_codes
from hplm.engine.kernels.onednn import can_pack, pack_matrix, rounded


def pack_matrices(weights: list[list[Tensor]]) -> tuple[list[list[Tensor]], bool]:
    """Put the matrices of `layer_weights` in oneDNN's order if possible; return the weights, and whether it was possible."""
    # Device and format are those of a LayerNorm, because int8 matrices are not in `weights`.
    norm = weights[0][4]
    if not can_pack(norm.device, norm.dtype):
        return weights, False
    return [[pack_matrix(part) if part.dim() == 2 else part for part in layer] for layer in weights], True


def _of_inner(half: list[Tensor], which: list[int]) -> list[Tensor]:
    """Return a feed-forward half's weights for some inner channels alone, with a second bias of zeros."""
    first, bias, second, outer_bias = half
    return [first[which], bias[which], second[:, which], torch.zeros_like(outer_bias)]


class RunLayers(nn.Module):
    """The upper layers, with their weights, the slots' parts and the running batch inside. One batch at a time.

    A tensor that Python holds takes the interpreter's lock each time it is passed in or out. So a batch comes in once, by
    `begin`, and leaves once, by `end`. Heads that read `[CLS]` read one token of a text: after its attention, the last layer
    computes only the tokens that heads read.

    `weights[i]` are those of upper layer i (see `layer_weights`). `parts` are those of AdapterSlots, which fills them in place.
    They are of as many layers as have adapters, the last ones.
    `relative` `[heads, L, L]` are a RelativeBias's scores for the longest row. Without `pack` the matrices keep their memory,
    for callers that refill it. `int8` has each layer's matrices in int8. Of `weights` then only channels computed apart are
    used.
    """

    packed: Final[bool]
    first_adapted: Final[int]
    attends_at_once: Final[bool]
    is_int8: Final[bool]
    input_zero: Final[int]
    largest: Final[int]
    least_token: Final[float]
    int8_qkv: list[list[Tensor]]
    int8_attention_out: list[list[Tensor]]
    int8_tensors: list[list[Tensor]]
    int8_scales: list[tuple[float, float, int]]
    are_apart: list[bool]
    parts: list[list[Tensor]]
    relative: Tensor | None
    float32_below: int
    size: int
    hidden: Tensor
    counts: list[int]
    lengths: list[int]
    mask: Tensor | None
    ends: Tensor
    longest: int
    unchanged: AdapterPlan
    at_input: AdapterPlan
    at_attention: AdapterPlan
    read: Tensor | None
    at_attention_of_read: AdapterPlan
    keeps_qkv: bool
    kept: list[Tensor]

    def __init__(
        self,
        weights: list[list[Tensor]],
        parts: list[Tensor],
        eps: float,
        num_heads: int,
        relative: Tensor | None,
        *,
        pack: bool = True,
        int8: Sequence[Int8Layer] = (),
    ) -> None:
        super().__init__()
        self.relative = relative
        self.is_int8 = len(int8) > 0
        self.input_zero = ZERO_POINT
        halves = [layer.half for layer in int8]
        self.int8_tensors = [[half.first.factor, *half.first.linear.packed(), *half.second.packed()] for half in halves]
        self.int8_scales = [
            (half.first.linear.input_scale, half.second.input_scale, half.second.zero_point) for half in halves
        ]
        self.are_apart = [len(half.apart) > 0 for half in halves]
        self.largest = LARGEST
        self.least_token = LEAST_TOKEN
        self.int8_qkv = [layer.qkv.packed() for layer in int8]
        self.int8_attention_out = [layer.attention_out.packed() for layer in int8]
        unused = [torch.empty(0)] * 4
        if self.is_int8:
            weights = [
                [*unused, *layer[4:6], *(_of_inner(layer[6:10], half.apart) if half.apart else unused), *layer[10:]]
                for layer, half in zip(weights, halves, strict=True)
            ]
        self.weights, self.packed = pack_matrices(weights) if pack else (weights, False)
        adapted = parts[0].size(0)
        self.first_adapted = len(weights) - adapted
        self.parts = [[part[layer] for part in parts] for layer in range(adapted)]
        self.eps = eps
        self.num_heads = num_heads
        norm = weights[0][4]
        head_size = norm.numel() // num_heads
        self.float32_below = float32_attention_below(norm.device, head_size)
        self.attends_at_once = relative is None and attends_at_once(norm.device, norm.dtype, head_size)
        self.nothing = self.ends = torch.empty(0)
        self.longest = 0
        self.rounding = torch.tensor(ZERO_POINT + 0.5)
        self.unchanged = UNCHANGED
        self.last = len(weights) - 1
        self.begin(self.nothing, [], [], None, UNCHANGED, UNCHANGED, None, UNCHANGED)

    @torch.jit.export
    def begin(
        self,
        hidden: Tensor,
        counts: list[int],
        lengths: list[int],
        mask: Tensor | None,
        at_input: AdapterPlan,
        at_attention: AdapterPlan,
        read: Tensor | None,
        at_attention_of_read: AdapterPlan,
    ) -> None:
        """Take a batch: `hidden` `[N, H]`, an `Attention`'s fields, and an adapter plan for each place.

        `read` has the places of the tokens that heads read, int64, with the plan for them; None if heads read all tokens.
        """
        kept: list[Tensor] = []
        self.kept = kept
        self.keeps_qkv = False
        self.size = hidden.size(0)
        fillers = self._fillers(self.size)
        self.hidden = F.pad(hidden, [0, 0, 0, fillers]) if fillers > 0 else hidden
        self.counts = counts
        self.lengths = lengths
        self.mask = mask
        if self.attends_at_once and mask is None:
            self.ends = ends_of(counts, lengths, hidden.device)
            self.longest = max(lengths) if len(lengths) > 0 else 0
        self.at_input = with_fillers(at_input, fillers)
        self.at_attention = with_fillers(at_attention, fillers)
        self.read = None
        if read is not None:
            self.size = read.size(0)
            fillers = self._fillers(self.size)
            self.read = F.pad(read, [0, fillers]) if fillers > 0 else read
        self.at_attention_of_read = with_fillers(at_attention_of_read, fillers)

    @torch.jit.export
    def keep_qkv(self) -> None:
        """Keep each layer's queries, keys and values of this batch, for `kept_qkv`. Call it after `begin`."""
        self.keeps_qkv = True
        # Not an empty list to append to: TorchScript takes such a list for a constant, which all batches would share.
        self.kept = [self.nothing] * len(self.weights)

    def _fillers(self, size: int) -> int:
        return rounded(size) - size if self.packed else 0

    def forward(self, first: int, last: int) -> None:
        """Compute layers `first` to before `last`."""
        for layer in range(first, last):
            self._layer(layer)

    def _layer(self, layer: int) -> None:
        is_adapted = layer >= self.first_adapted
        hidden = self.hidden
        if is_adapted:
            hidden = adapt_planned(hidden, self.parts[layer - self.first_adapted], self.at_input)
        weights = self.weights[layer]
        size = hidden.size(1)
        if self.is_int8:
            qkv = self._int8_by_token(self.int8_qkv[layer], hidden)
        else:
            qkv = self._linear(hidden, weights[0], weights[1])
        if self.keeps_qkv:
            self.kept[layer] = qkv
        if self.attends_at_once and self.mask is None:
            context = attend_at_once(qkv, self.ends, self.longest, self.num_heads)
        else:
            context = attend_by_length(
                qkv, self.counts, self.lengths, self.num_heads, self.float32_below, self.mask, self.relative
            )
        at_attention = self.at_attention
        read = self.read
        if read is not None and layer == self.last:
            context = context.index_select(0, read)
            hidden = hidden.index_select(0, read)
            at_attention = self.at_attention_of_read
        if self.is_int8:
            attended = self._int8_by_token(self.int8_attention_out[layer], context).to(hidden.dtype)
        else:
            attended = self._linear(context, weights[2], weights[3])
        if is_adapted:
            attended = adapt_planned(attended, self.parts[layer - self.first_adapted], at_attention)
        hidden = F.layer_norm(hidden + attended, [size], weights[4], weights[5], self.eps)
        outer = self._int8_feed_forward(layer, hidden) if self.is_int8 else self._feed_forward(layer, hidden)
        self.hidden = F.layer_norm(hidden + outer, [size], weights[10], weights[11], self.eps)

    def _feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Compute the feed-forward half in floats; with int8, only its channels apart."""
        weights = self.weights[layer]
        return self._linear(self._linear_gelu(hidden, weights[6], weights[7]), weights[8], weights[9])

    def _linear(self, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, "none", [], "")
        return F.linear(tokens, weight, bias)

    def _linear_gelu(self, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, "gelu", [], "none")
        return F.gelu(F.linear(tokens, weight, bias))

    def _int8_by_token(self, linear: list[Tensor], tokens: Tensor) -> Tensor:
        """Compute an Int8TokenLinear, packed: `[N, in]` -> fp32 `[N, out]`. The slow twin is `reference.int8_by_token`."""
        scaled = tokens.float() * linear[0]
        magnitudes = scaled.abs().amax(1, keepdim=True).clamp_(min=self.least_token)
        codes = cut_off(scaled.div_(magnitudes).mul_(self.largest).add_(self.rounding))
        outputs = product(codes, 1.0, self.input_zero, linear[2:], torch.float32)
        return outputs.mul_(magnitudes).add_(linear[1])

    def _int8_feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Compute a feed-forward half in int8. The slow twin is `hplm.engine.reference.int8_feed_forward`."""
        half = self.int8_tensors[layer]
        input_scale, inner_scale, inner_zero = self.int8_scales[layer]
        codes = static_codes(hidden, half[0], self.rounding)
        inner = gelu_codes(codes, input_scale, self.input_zero, half[1:5], inner_scale, inner_zero)
        outer = product(inner, inner_scale, inner_zero, half[5:], hidden.dtype)
        return outer.add_(self._feed_forward(layer, hidden)) if self.are_apart[layer] else outer

    @torch.jit.export
    def kept_qkv(self) -> list[Tensor]:
        """Return queries, keys and values of each layer, `[N, 3 * H]`; fillers follow the batch's tokens."""
        return self.kept

    @torch.jit.export
    def end(self) -> Tensor:
        """Return the batch after all layers, `[N, H]`, or its `read` tokens `[R, H]`, and keep no tensor of it."""
        hidden = self.hidden[: self.size]
        self.begin(self.nothing, [], [], None, self.unchanged, self.unchanged, None, self.unchanged)
        return hidden
