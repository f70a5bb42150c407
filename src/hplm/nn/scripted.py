"""The upper layers, windows through the lower ones, and filling slots, as code that runs without Python's interpreter lock.

A serving stub has threads that read, load and answer beside the one that computes. Each operation of torch lets go of the
lock and has to get it back, behind whatever another thread is doing: two hundred operations a layer made a busy server's
layer take two to four times as long as alone. TorchScript runs a whole function under one release of the lock. It is
deprecated, but what replaces it wants a C++ compiler where the server runs.

The same computation, readable, is `TransformerLayer.forward` with `AdapterSlots.reference_adapt`, and `WindowEncoder.forward`.
"""

# No `from __future__ import annotations` here: TorchScript reads the types of attributes, not their names.

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.nn.encoder import WindowEncoder, layer_weights
from hplm.nn.int8 import LARGEST, LEAST_TOKEN, ZERO_POINT, Int8Layer
from hplm.nn.int8_products import cut_off, gelu_codes, product, static_codes
from hplm.nn.int8_windows import Int8WindowLayer
from hplm.nn.onednn import can_pack, pack_matrix, rounded
from hplm.plot.windows import centre

# In a product of fewer MKL rounds a token otherwise than beside more.
LEAST_TOKENS = 4
# Numbers in a row of one head, see `float32_attention_below`.
AMX_ATTENTION = 1280
# Of `layer_weights`.
NORMS = (4, 5, 10, 11)
# Heads of other sizes would have to be filled up for attention in one call.
JOINED_HEAD_STEP = 8


class AdapterPlan(NamedTuple):
    """How the adapters of a batch are applied, in one of two ways, chosen by measurement (`hplm bench adapters`).

    Text by text, where `own_sizes` says how many tokens each of `own_slots` has, one after another: a product each over the
    tokens where they lie, fewer than LEAST_TOKENS beside their neighbours, with the slot's weights where they lie.

    Gathered, with no `own_sizes`, for where a product costs much besides its tokens: all tenants in few products a layer.
    Tokens are brought together by slot. Slots with many tokens, `own_slots`, have a product each over `own_places` (all
    tokens where there are none). The others are cut into chunks of one length that go through a batched product with
    their slots' weights (HMI's baddbmm), one for each pool of slots that has some, `chunk_pools[i]`: its chunk g is of
    the pool's slot `chunk_slots[i][g]` and takes the tokens `chunk_gather[i]`. Fillers repeat a token. `back` is where each
    token of the batch is in what comes out of all of these one after another; None where all tokens have one slot.
    """

    own_slots: list[int]
    own_sizes: list[int]
    own_places: list[Tensor]
    chunk_pools: list[int]
    chunk_slots: list[Tensor]
    chunk_gather: list[Tensor]
    back: Tensor | None


# Every token keeps what it has.
UNCHANGED = AdapterPlan([0], [], [], [], [], [], None)


def adapt_planned(given: Tensor, parts: list[Tensor], plan: AdapterPlan) -> Tensor:
    """Each text's adapter (HMI eq. 1) over its tokens, `given` `[N, H]`; `parts` of one layer, four a pool.

    May return `given` itself.
    """
    if len(plan.own_sizes) > 0:
        return _adapt_by_text(given, parts, plan.own_slots, plan.own_sizes)
    adapted: list[Tensor] = []
    for i in range(len(plan.own_slots)):
        tokens = given.index_select(0, plan.own_places[i]) if len(plan.own_places) > 0 else given
        slot = plan.own_slots[i]
        if slot != 0:
            change = torch.empty_like(tokens)
            _change(tokens, parts, slot, change)
            tokens = change.add_(tokens)
        adapted.append(tokens)
    for i in range(len(plan.chunk_pools)):
        of_pool = 4 * plan.chunk_pools[i]
        down, down_bias, up, up_bias = parts[of_pool], parts[of_pool + 1], parts[of_pool + 2], parts[of_pool + 3]
        slots = plan.chunk_slots[i]
        padded = given.index_select(0, plan.chunk_gather[i]).view(slots.size(0), -1, given.size(1))
        reduced = torch.baddbmm(
            down_bias.index_select(0, slots).unsqueeze(1), padded, down.index_select(0, slots)
        ).relu_()
        tokens = torch.baddbmm(up_bias.index_select(0, slots).unsqueeze(1), reduced, up.index_select(0, slots))
        adapted.append(tokens.add_(padded).flatten(0, 1))
    together = adapted[0] if len(adapted) == 1 else torch.cat(adapted)
    back = plan.back
    return together if back is None else together.index_select(0, back)


def _adapt_by_text(
    given: Tensor, parts: list[Tensor], slots: list[int], sizes: list[int], least: int = LEAST_TOKENS
) -> Tensor:
    change = torch.empty_like(given)
    start = 0
    for i in range(len(sizes)):
        end = start + sizes[i]
        if slots[i] == 0:
            change[start:end] = 0
        elif sizes[i] < least:
            # Beside its neighbours, of which nothing is taken.
            first = max(0, min(start, given.size(0) - least))
            some = given[first : first + least]
            found = torch.empty_like(some)
            _change(some, parts, slots[i], found)
            change[start:end] = found[start - first : end - first]
        else:
            _change(given[start:end], parts, slots[i], change[start:end])
        start = end
    # Fillers, which nobody reads.
    change[start:] = 0
    return change.add_(given)


def _change(tokens: Tensor, parts: list[Tensor], slot: int, change: Tensor) -> None:
    """What the adapter in `slot` adds to `tokens` `[n, H]`, into `change`.

    As chunks have it: TorchScript takes `addmm` apart, into a product and a sum that are rounded one after the other, and a
    text's answer would depend on how many of its tenant's are in the batch.
    """
    pool = slot // parts[0].size(0)
    place = slot % parts[0].size(0)
    down, down_bias, up, up_bias = (
        parts[4 * pool][place],
        parts[4 * pool + 1][place],
        parts[4 * pool + 2][place],
        parts[4 * pool + 3][place],
    )
    reduced = torch.baddbmm(down_bias.view(1, 1, -1), tokens.unsqueeze(0), down.unsqueeze(0)).relu_()
    torch.baddbmm(up_bias.view(1, 1, -1), reduced, up.unsqueeze(0), out=change.unsqueeze(0))


def _with_fillers(plan: AdapterPlan, more: int) -> AdapterPlan:
    """For a batch with `more` tokens behind its own, which get what comes first of all."""
    back = plan.back
    if more == 0 or back is None:
        return plan
    back = torch.cat([back, torch.zeros(more, dtype=torch.int64)])
    return AdapterPlan(
        plan.own_slots, plan.own_sizes, plan.own_places, plan.chunk_pools, plan.chunk_slots, plan.chunk_gather, back
    )


def float32_attention_below(device: torch.device, head_size: int) -> int:
    """Rows that are shorter attend in float32, others in the layers' own format.

    A CPU converts bfloat16 within its attention, which with short rows costs more than it saves; without AMX float32 was
    faster with all that were tried. With it rows of 20 tokens are as fast in either with heads of 64 numbers, rows of 40 with
    heads of 32, and rows of 256 are 2.7 and 2.0 times as fast in bfloat16 (one Xeon core).
    """
    if device.type != "cpu":
        return 0
    return AMX_ATTENTION // head_size if torch.cpu._is_amx_tile_supported() else sys.maxsize


def attends_at_once(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether rows of all lengths attend in one call a layer: on a GPU that has a kernel for it, where a call for each length
    would be some 30 a layer.
    """
    if device.type != "cuda" or head_size % JOINED_HEAD_STEP:
        return False
    try:
        attend_at_once(torch.zeros(2, 3 * head_size, dtype=dtype, device=device), ends_of([2], [1], device), 1, 1)
    except RuntimeError as error:
        logging.getLogger(__name__).warning("rows attend length by length, which is slower here: %s", error)
        return False
    return True


def ends_of(counts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """Where rows end, `counts[i]` of `lengths[i]` tokens one after another, and 0 first: int32 `[rows + 1]`."""
    ends = [0]
    for i in range(len(counts)):
        for _ in range(counts[i]):
            ends.append(ends[-1] + lengths[i])
    return torch.tensor(ends, dtype=torch.int32, device=device)


def attend_at_once(qkv: Tensor, ends: Tensor, longest: int, num_heads: int) -> Tensor:
    """Attention of rows one after another, each to itself: `qkv` `[N, 3 * H]` -> `[N, H]`; `ends` by `ends_of`."""
    parts = qkv.view(1, qkv.size(0), 3, num_heads, -1)
    # 80 us a call where flash attention took 90 (64 rows of 22 tokens, H100, by hand), and there for float32 too.
    found = torch.ops.aten._efficient_attention_forward(
        parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], None, ends, ends, longest, longest, 0.0, 0
    )[0]
    return found.reshape(qkv.size(0), -1)


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
        self.at_input = _with_fillers(at_input, more)
        self.at_attention = _with_fillers(at_attention, more)
        self.read = None
        if read is not None:
            self.size = read.size(0)
            more = self._fillers(self.size)
            self.read = F.pad(read, [0, more]) if more > 0 else read
        self.at_attention_of_read = _with_fillers(at_attention_of_read, more)

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
        """`[N, in]` -> fp32 `[N, out]`, `given` by `Int8TokenLinear.packed`. Slow twin: `hplm.nn.reference.int8_by_token`."""
        scaled = tokens.float() * given[0]
        most = scaled.abs().amax(1, keepdim=True).clamp_(min=self.least_token)
        codes = cut_off(scaled.div_(most).mul_(self.largest).add_(self.rounding))
        found = product(codes, 1.0, self.input_zero, given[2:], torch.float32)
        return found.mul_(most).add_(given[1])

    def _int8_feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """The slow twin is `hplm.nn.reference.int8_feed_forward`."""
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


def _packed_weights(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Those of `layer_weights`: matrices in oneDNN's order and their biases in `dtype`, norms as they are."""
    return [
        one if place in NORMS else pack_matrix(one.to(dtype)) if one.dim() == 2 else one.to(dtype)
        for place, one in enumerate(layer_weights(layer))
    ]


class RunWindows(nn.Module):
    """`WindowEncoder.forward` with matrices in oneDNN's order, all of it in one call: `windows` int64 `[W, n]` -> `[W, n, H]`.

    Products are computed in `dtype`, or as `int8` has it of each layer. `relative`: `[n, n, heads]`.
    """

    is_int8: Final[bool]
    int8_products: list[list[list[Tensor]]]
    int8_scales: list[list[float]]
    int8_zeros: list[list[int]]
    layers: list[list[Tensor]]
    gate: list[Tensor]
    relative: Tensor | None

    def __init__(self, lower: WindowEncoder, dtype: torch.dtype, int8: Sequence[Int8WindowLayer] = ()) -> None:
        super().__init__()
        config, norm, relative = lower.config, lower.embedding_norm, lower.relative
        self.words = lower.word_embeddings.weight.detach()
        self.position = lower.window_position.detach()
        self.norm = [norm.weight.detach(), norm.bias.detach()]
        self.is_int8 = len(int8) > 0
        self.int8_products = [layer.products for layer in int8]
        self.int8_scales = [layer.scales for layer in int8]
        self.int8_zeros = [layer.zeros for layer in int8]
        self.layers = [one.weights for one in int8] or [_packed_weights(layer, dtype) for layer in lower.layers]
        self.dtype = dtype
        self.gate = [pack_matrix(weight.to(dtype)) for weight in lower.gate_weight]
        self.gate_bias = lower.gate_bias.detach()
        self.relative = None if relative is None else relative(config.window).detach().permute(1, 2, 0)
        self.eps = config.layer_norm_eps
        self.num_heads = config.num_heads
        self.size = config.hidden_size
        self.pad_id = config.pad_id
        self.centre = centre(config.window)

    def forward(self, windows: Tensor) -> Tensor:
        seen = windows != self.pad_id
        seen[:, self.centre] = True
        unseen = torch.zeros(windows.shape).masked_fill_(seen.logical_not(), float("-inf"))
        bias = unseen.unsqueeze(1).unsqueeze(3)
        relative = self.relative
        if relative is not None:
            bias = bias + relative
        words = F.embedding(windows, self.words)
        hidden = F.layer_norm(words + self.position, [self.size], self.norm[0], self.norm[1], self.eps)
        for layer in range(len(self.layers)):
            hidden = self._int8_layer(layer, hidden, bias) if self.is_int8 else self._layer(layer, hidden, bias)
        gates: list[Tensor] = []
        for place in range(len(self.gate)):
            gates.append(self._linear(hidden[:, place], self.gate[place], None))
        return 2 * torch.sigmoid(torch.stack(gates, 1) + self.gate_bias) * hidden

    def _layer(self, layer: int, hidden: Tensor, bias: Tensor) -> Tensor:
        weights = self.layers[layer]
        attended = self._linear(
            self._attend(self._linear(hidden, weights[0], weights[1]), bias), weights[2], weights[3]
        )
        hidden = F.layer_norm(hidden + attended, [self.size], weights[4], weights[5], self.eps)
        inner = hidden.to(self.dtype)
        inner = torch.ops.mkldnn._linear_pointwise(inner, weights[6], weights[7], "gelu", [], "none")
        outer = self._linear(inner, weights[8], weights[9])
        return F.layer_norm(hidden + outer, [self.size], weights[10], weights[11], self.eps)

    def _int8_layer(self, layer: int, hidden: Tensor, bias: Tensor) -> Tensor:
        """`hplm.nn.reference.int8_window_layer`."""
        products, scales, zeros = self.int8_products[layer], self.int8_scales[layer], self.int8_zeros[layer]
        weights = self.layers[layer]
        codes = static_codes(hidden, products[0][0], products[0][1])
        context = self._attend(product(codes, scales[0], zeros[0], products[0][2:], torch.float32), bias)
        codes = static_codes(context, products[1][0], products[1][1])
        attended = product(codes, scales[1], zeros[1], products[1][2:], torch.float32)
        hidden = F.layer_norm(hidden + attended, [self.size], weights[0], weights[1], self.eps)
        codes = static_codes(hidden, products[2][0], products[2][1])
        inner = gelu_codes(codes, scales[2], zeros[2], products[2][2:], scales[3], zeros[3])
        found = product(inner, scales[3], zeros[3], products[3], torch.float32).add_(hidden)
        if len(weights) > 4:
            apart = torch.ops.mkldnn._linear_pointwise(hidden, weights[4], weights[5], "none", [], "")
            found.add_(torch.ops.mkldnn._linear_pointwise(F.gelu(apart), weights[6], None, "none", [], ""))
        return F.layer_norm(found, [self.size], weights[2], weights[3], self.eps)

    def _attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """See `WindowEncoder.forward`."""
        places = qkv.size(1)
        heads = qkv.view(qkv.size(0), places, 3, self.num_heads, -1)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = (query.unsqueeze(2) * key.unsqueeze(1)).sum(-1) * query.size(3) ** -0.5
        weights = (scores + bias.to(scores.dtype)).softmax(2)
        found = weights[:, :, 0].unsqueeze(3) * value[:, 0].unsqueeze(1)
        for place in range(1, places):
            found = found.addcmul_(weights[:, :, place].unsqueeze(3), value[:, place].unsqueeze(1))
        return found.flatten(2)

    def _linear(self, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens.to(self.dtype), weight, bias, "none", [], "")


def fill_slots(parts: list[Tensor], layer: int, weights: list[Tensor], slots: list[int]) -> None:
    """One layer of adapters: `weights[i]` `[L, P]`, as PackedAdapter has them, to slot `slots[i]` of a pool's `parts`."""
    for i in range(len(weights)):
        row = weights[i][layer]
        start = 0
        for part in parts:
            place = part[layer, slots[i]]
            end = start + place.numel()
            place.copy_(row[start:end].view_as(place))
            start = end


def place_for(weights: list[Tensor], device: torch.device) -> Tensor:
    """`staged` of `fill_slots_from_pinned`, in the finest of their formats."""
    dtype = weights[0].dtype
    for one in weights:
        dtype = torch.promote_types(dtype, one.dtype)
    return torch.empty((len(weights), *weights[0].shape), dtype=dtype, device=device)


def pieces(layers: int) -> list[tuple[int, int]]:
    """Which layers a GPU's slots get at once: the first for who computes to begin with, then all others."""
    return [(first, last) for first, last in ((0, 1), (1, layers)) if first < last]


def fill_slots_from_pinned(
    parts: list[Tensor], first: int, last: int, weights: list[Tensor], places: Tensor, staged: Tensor
) -> None:
    """As `fill_slots`, layers `first` to before `last` to the slots `places` of a GPU, through `staged` there, `[n, L, P]`.

    A copy a tenant: each costs more than its bytes. They read `weights` after this returns. `staged` by `place_for`.
    """
    for i in range(len(weights)):
        staged[i, first:last].copy_(weights[i][first:last], non_blocking=True)
    start = 0
    for part in parts:
        slots = part[first:last]
        end = start + part[0, 0].numel()
        given = staged[:, first:last, start:end].to(part.dtype).transpose(0, 1)
        slots.index_copy_(1, places, given.unflatten(2, part[0, 0].size()))
        start = end


def scripted(code: RunLayers | RunWindows | Callable[..., object]) -> Any:
    """The module or function in TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)
