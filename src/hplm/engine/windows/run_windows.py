"""Windows through the lower layers as they are served. The same computation, readable, is `WindowEncoder.compute`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.engine.kernels.int8_products import feed_forward, product, static_codes
from hplm.engine.kernels.onednn import pack_matrix
from hplm.engine.windows.int8_windows import Int8WindowLayer
from hplm.models.layers import layer_weights
from hplm.plot.ngrams import centre

if TYPE_CHECKING:
    from hplm.engine.windows.encoder import WindowEncoder

# Places of the norms' tensors among those of `layer_weights`.
NORMS = (4, 5, 10, 11)


def _packed_weights(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors of `layer_weights`: matrices in oneDNN's order, they and their biases in `dtype`, norms unchanged."""
    return [
        tensor if place in NORMS else pack_matrix(tensor.to(dtype)) if tensor.dim() == 2 else tensor.to(dtype)
        for place, tensor in enumerate(layer_weights(layer))
    ]


class RunWindows(nn.Module):
    """`WindowEncoder.compute` with matrices in oneDNN's order, in one call: `windows` int64 `[W, n]` -> `[W, n, H]`.

    Products are computed in `dtype`, or in int8 if `int8` has each layer's codes. `relative`: `[n, n, heads]`.
    """

    is_int8: Final[bool]
    int8_products: list[list[list[Tensor]]]
    int8_scales: list[list[tuple[float, float]]]
    int8_zeros: list[list[tuple[int, int]]]
    int8_apart: list[list[Tensor]]
    layers: list[list[Tensor]]
    gate: list[Tensor]
    relative: Tensor | None

    def __init__(self, lower: "WindowEncoder", dtype: torch.dtype, int8: Sequence[Int8WindowLayer] = ()) -> None:
        super().__init__()
        config, norm, relative = lower.config, lower.embedding_norm, lower.relative
        self.words = lower.word_embeddings.weight.detach()
        self.position = lower.window_position.detach()
        self.norm = [norm.weight.detach(), norm.bias.detach()]
        self.is_int8 = len(int8) > 0
        self.int8_products = [[layer.qkv, layer.out, layer.half.first, layer.half.second] for layer in int8]
        self.int8_scales = [[layer.scales, layer.half.scales] for layer in int8]
        self.int8_zeros = [[layer.zeros, layer.half.zeros] for layer in int8]
        self.int8_apart = [layer.half.apart for layer in int8]
        self.layers = [layer.norms for layer in int8] or [_packed_weights(layer, dtype) for layer in lower.layers]
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
        is_token = windows != self.pad_id
        is_token[:, self.centre] = True
        mask = torch.zeros(windows.shape).masked_fill_(is_token.logical_not(), float("-inf"))
        bias = mask.unsqueeze(1).unsqueeze(3)
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
        """Compute a layer in int8; the slow twin is `hplm.engine.reference.int8_window_layer`."""
        products, weights = self.int8_products[layer], self.layers[layer]
        scales, zeros = self.int8_scales[layer][0], self.int8_zeros[layer][0]
        codes = static_codes(hidden, products[0][0], products[0][1])
        context = self._attend(product(codes, scales[0], zeros[0], products[0][2:], torch.float32), bias)
        codes = static_codes(context, products[1][0], products[1][1])
        attended = product(codes, scales[1], zeros[1], products[1][2:], torch.float32)
        hidden = F.layer_norm(hidden + attended, [self.size], weights[0], weights[1], self.eps)
        outer = feed_forward(
            hidden,
            products[2],
            products[3],
            self.int8_scales[layer][1],
            self.int8_zeros[layer][1],
            self.int8_apart[layer],
        )
        return F.layer_norm(outer, [self.size], weights[2], weights[3], self.eps)

    def _attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """Attend within each window, elementwise as in `WindowEncoder.compute`."""
        places = qkv.size(1)
        heads = qkv.view(qkv.size(0), places, 3, self.num_heads, -1)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = (query.unsqueeze(2) * key.unsqueeze(1)).sum(-1) * query.size(3) ** -0.5
        weights = (scores + bias.to(scores.dtype)).softmax(2)
        context = weights[:, :, 0].unsqueeze(3) * value[:, 0].unsqueeze(1)
        for place in range(1, places):
            context = context.addcmul_(weights[:, :, place].unsqueeze(3), value[:, place].unsqueeze(1))
        return context.flatten(2)

    def _linear(self, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens.to(self.dtype), weight, bias, "none", [], "")
