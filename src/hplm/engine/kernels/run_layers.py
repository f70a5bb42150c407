"""The upper layers as they are served. The same computation, readable, is `TransformerLayer.forward`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.engine.kernels.adapt import UNCHANGED, AdapterPlan, adapt_planned, with_fillers
from hplm.engine.kernels.attention import attend_at_once, attends_at_once, ends_of, float32_attention_below
from hplm.engine.kernels.int8 import LARGEST, LEAST_TOKEN, ZERO_POINT, Int8Layer
from hplm.engine.kernels.int8_products import cut_off, gelu_codes, product, static_codes
from hplm.engine.kernels.onednn import can_pack, pack_matrix, rounded


def pack_matrices(weights: list[list[Tensor]]) -> tuple[list[list[Tensor]], bool]:
    """Weights of `layer_weights` with matrices in oneDNN's own order where it has one, and whether it has."""
    # A LayerNorm's: matrices may be in integers, and not here.
    norm = weights[0][4]
    if not can_pack(norm.device, norm.dtype):
        return weights, False
    return [[pack_matrix(one) if one.dim() == 2 else one for one in layer] for layer in weights], True


def _of_inner(half: list[Tensor], which: list[int]) -> list[Tensor]:
    """Those of a feed-forward half's weights that some inner channels have; the second bias is not theirs."""
    first, bias, second, outer_bias = half
    return [first[which], bias[which], second[:, which], torch.zeros_like(outer_bias)]


class RunLayers(nn.Module):
    """The upper layers, with weights, slots' parts and the batch under way inside.

    A tensor that Python holds and nobody else takes the interpreter's lock each time it is lent out and comes back: so a
    batch is handed in once, by `begin`, and out once, by `end`. Heads that read `[CLS]` read one token of a text: after its
    attention, the last layer goes on with what is read alone. `weights[i]` are those of upper layer i (see
    `layer_weights`), `parts` those of AdapterSlots, which it fills in place. `relative` `[heads, L, L]` is what a RelativeBias
    gives for the longest row. Without `pack` the matrices stay where they are, for whoever fills them anew. `int8` has each
    layer's matrices in integers, which then are not used of `weights`, but for inner channels apart. One batch at a time.
    """

    packed: Final[bool]
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
        self.parts = [[part[layer] for part in parts] for layer in range(len(weights))]
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
        """Take a batch: `hidden` `[N, H]`. See `Attention` for what the others are; a plan for each place of adapters.

        `read`: those of the N tokens that heads read, int64, and the plan for them; None where all are read.
        """
        self.size = hidden.size(0)
        more = self._fillers(self.size)
        self.hidden = F.pad(hidden, [0, 0, 0, more]) if more > 0 else hidden
        self.counts = counts
        self.lengths = lengths
        self.mask = mask
        if self.attends_at_once and mask is None:
            self.ends = ends_of(counts, lengths, hidden.device)
            self.longest = max(lengths) if len(lengths) > 0 else 0
        self.at_input = with_fillers(at_input, more)
        self.at_attention = with_fillers(at_attention, more)
        self.read = None
        if read is not None:
            self.size = read.size(0)
            more = self._fillers(self.size)
            self.read = F.pad(read, [0, more]) if more > 0 else read
        self.at_attention_of_read = with_fillers(at_attention_of_read, more)

    def _fillers(self, size: int) -> int:
        return rounded(size) - size if self.packed else 0

    def forward(self, first: int, last: int) -> None:
        """Layers `first` to before `last`."""
        for layer in range(first, last):
            self._layer(layer)

    def _layer(self, layer: int) -> None:
        hidden = adapt_planned(self.hidden, self.parts[layer], self.at_input)
        weights = self.weights[layer]
        size = hidden.size(1)
        if self.is_int8:
            qkv = self._int8_by_token(self.int8_qkv[layer], hidden)
        else:
            qkv = self._linear(hidden, weights[0], weights[1])
        if self.attends_at_once and self.mask is None:
            context = attend_at_once(qkv, self.ends, self.longest, self.num_heads)
        else:
            context = self._attend(qkv)
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
        attended = adapt_planned(attended, self.parts[layer], at_attention)
        hidden = F.layer_norm(hidden + attended, [size], weights[4], weights[5], self.eps)
        outer = self._int8_feed_forward(layer, hidden) if self.is_int8 else self._feed_forward(layer, hidden)
        self.hidden = F.layer_norm(hidden + outer, [size], weights[10], weights[11], self.eps)

    def _attend(self, qkv: Tensor) -> Tensor:
        """Rows of each length in one call: `qkv` `[N, 3 * H]` -> `[N, H]`."""
        size = qkv.size(1) // 3
        context = torch.empty([qkv.size(0), size], dtype=qkv.dtype, device=qkv.device)
        start = 0
        for i in range(len(self.counts)):
            end = start + self.counts[i] * self.lengths[i]
            rows = qkv[start:end]
            if self.lengths[i] < self.float32_below:
                rows = rows.float()
            run = rows.view(self.counts[i], self.lengths[i], 3, self.num_heads, size // self.num_heads).permute(
                2, 0, 3, 1, 4
            )
            found = F.scaled_dot_product_attention(
                run[0], run[1], run[2], attn_mask=self._mask(self.lengths[i], rows.dtype)
            )
            context[start:end] = found.transpose(1, 2).reshape(end - start, size)
            start = end
        # What nobody reads must be numbers all the same.
        context[start:] = 0
        return context

    def _mask(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of rows of `length`, in `dtype`, or which of them count."""
        mask = self.mask
        relative = self.relative
        if relative is None:
            return mask
        bias = relative[:, :length, :length].unsqueeze(0).to(dtype)
        return bias if mask is None else bias.masked_fill(mask.logical_not(), float("-inf"))

    def _feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """What of the half is in floats."""
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

    def _int8_by_token(self, given: list[Tensor], tokens: Tensor) -> Tensor:
        """`[N, in]` -> fp32 `[N, out]`, `given` by `Int8TokenLinear.packed`. Slow twin: `reference.int8_by_token`."""
        scaled = tokens.float() * given[0]
        most = scaled.abs().amax(1, keepdim=True).clamp_(min=self.least_token)
        codes = cut_off(scaled.div_(most).mul_(self.largest).add_(self.rounding))
        found = product(codes, 1.0, self.input_zero, given[2:], torch.float32)
        return found.mul_(most).add_(given[1])

    def _int8_feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """The slow twin is `hplm.engine.reference.int8_feed_forward`."""
        given = self.int8_tensors[layer]
        input_scale, inner_scale, inner_zero = self.int8_scales[layer]
        codes = static_codes(hidden, given[0], self.rounding)
        inner = gelu_codes(codes, input_scale, self.input_zero, given[1:5], inner_scale, inner_zero)
        outer = product(inner, inner_scale, inner_zero, given[5:], hidden.dtype)
        return outer.add_(self._feed_forward(layer, hidden)) if self.are_apart[layer] else outer

    @torch.jit.export
    def end(self) -> Tensor:
        """The batch after all layers, `[N, H]`, or of `read` `[R, H]`; nothing of it is kept."""
        hidden = self.hidden[: self.size]
        self.begin(self.nothing, [], [], None, self.unchanged, self.unchanged, None, self.unchanged)
        return hidden
