"""One upper layer as a function that runs without Python's interpreter lock.

A serving stub has threads that read, load and answer beside the one that computes. Each operation of torch lets go of the
lock and has to get it back, behind whatever another thread is doing: two hundred operations a layer made a busy server's
layer take two to four times as long as alone. TorchScript runs a whole function under one release of the lock. It is
deprecated, but what replaces it wants a C++ compiler where the server runs; where torch has it no more, the plain function
below does the same, slower.

The same computation, readable, is `TransformerLayer.forward` with `AdapterSlots.reference_adapt`.
"""

from __future__ import annotations

import warnings
from typing import Any, List, Optional  # noqa: UP035  TorchScript knows no others

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def adapt_planned(
    attended: Tensor,
    parts: List[Tensor],  # noqa: UP006
    own_slots: List[int],  # noqa: UP006
    own_places: List[Tensor],  # noqa: UP006
    chunk_slots: Optional[Tensor],  # noqa: UP045
    chunk_gather: Optional[Tensor],  # noqa: UP045
    chunk_real: Optional[Tensor],  # noqa: UP045
    back: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """Each text's adapter (HMI eq. 1) over its tokens, `attended` `[N, H]`, as an AdapterPlan says; `parts` of one layer."""
    adapted: List[Tensor] = []  # noqa: UP006
    for i in range(len(own_slots)):
        tokens = attended.index_select(0, own_places[i]) if len(own_places) > 0 else attended
        slot = own_slots[i]
        if slot != 0:
            reduced = torch.addmm(parts[1][slot], tokens, parts[0][slot]).relu_()
            tokens = torch.addmm(parts[3][slot], reduced, parts[2][slot]).add_(tokens)
        adapted.append(tokens)
    if chunk_slots is not None and chunk_gather is not None:
        padded = attended.index_select(0, chunk_gather).view(chunk_slots.size(0), -1, attended.size(1))
        reduced = torch.baddbmm(
            parts[1].index_select(0, chunk_slots).unsqueeze(1), padded, parts[0].index_select(0, chunk_slots)
        ).relu_()
        tokens = torch.baddbmm(
            parts[3].index_select(0, chunk_slots).unsqueeze(1), reduced, parts[2].index_select(0, chunk_slots)
        )
        tokens = tokens.add_(padded).flatten(0, 1)
        adapted.append(tokens if chunk_real is None else tokens.index_select(0, chunk_real))
    together = adapted[0] if len(adapted) == 1 else torch.cat(adapted)
    return together if back is None else together.index_select(0, back)


def _run_layer(
    hidden: Tensor,
    weights: List[Tensor],  # noqa: UP006
    eps: float,
    num_heads: int,
    counts: List[int],  # noqa: UP006
    lengths: List[int],  # noqa: UP006
    mask: Optional[Tensor],  # noqa: UP045
    parts: List[Tensor],  # noqa: UP006
    own_slots: List[int],  # noqa: UP006
    own_places: List[Tensor],  # noqa: UP006
    chunk_slots: Optional[Tensor],  # noqa: UP045
    chunk_gather: Optional[Tensor],  # noqa: UP045
    chunk_real: Optional[Tensor],  # noqa: UP045
    back: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """`hidden` `[N, H]` -> `[N, H]`. See `Attention` and `AdapterPlan` for what the others are."""
    size = hidden.size(1)
    qkv = F.linear(hidden, weights[0], weights[1])
    context = torch.empty_like(hidden)
    start = 0
    for i in range(len(counts)):
        end = start + counts[i] * lengths[i]
        run = qkv[start:end].view(counts[i], lengths[i], 3, num_heads, size // num_heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(run[0], run[1], run[2], attn_mask=mask)
        context[start:end] = found.transpose(1, 2).reshape(end - start, size)
        start = end
    attended = F.linear(context, weights[2], weights[3])
    attended = adapt_planned(attended, parts, own_slots, own_places, chunk_slots, chunk_gather, chunk_real, back)
    hidden = F.layer_norm(hidden + attended, [size], weights[4], weights[5], eps)
    inner = F.gelu(F.linear(hidden, weights[6], weights[7]))
    return F.layer_norm(hidden + F.linear(inner, weights[8], weights[9]), [size], weights[10], weights[11], eps)


class RunLayers(nn.Module):
    """`_run_layer` with the weights and the slots' parts inside: a tensor that crosses from Python takes the lock to count.

    `weights[i]` are those of upper layer i (see `layer_weights`), `parts` those of AdapterSlots, which it fills in place.
    """

    def __init__(self, weights: List[List[Tensor]], parts: List[Tensor], eps: float, num_heads: int) -> None:  # noqa: UP006
        super().__init__()
        self.weights = weights
        self.parts = [[part[layer] for part in parts] for layer in range(len(weights))]
        self.eps = eps
        self.num_heads = num_heads

    def forward(
        self,
        layer: int,
        hidden: Tensor,
        counts: List[int],  # noqa: UP006
        lengths: List[int],  # noqa: UP006
        mask: Optional[Tensor],  # noqa: UP045
        own_slots: List[int],  # noqa: UP006
        own_places: List[Tensor],  # noqa: UP006
        chunk_slots: Optional[Tensor],  # noqa: UP045
        chunk_gather: Optional[Tensor],  # noqa: UP045
        chunk_real: Optional[Tensor],  # noqa: UP045
        back: Optional[Tensor],  # noqa: UP045
    ) -> Tensor:
        """One layer: `hidden` `[N, H]` -> `[N, H]`."""
        return _run_layer(
            hidden,
            self.weights[layer],
            self.eps,
            self.num_heads,
            counts,
            lengths,
            mask,
            self.parts[layer],
            own_slots,
            own_places,
            chunk_slots,
            chunk_gather,
            chunk_real,
            back,
        )


def scripted(module: RunLayers) -> Any:
    """The module in TorchScript, or as it is where torch has that no more."""
    script = getattr(torch.jit, "script", None)
    if script is None:
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return script(module)
