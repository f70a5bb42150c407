"""The two halves of an hBERT: a window encoder (what PLOT stores) and the upper layers (what the device computes).

Both are plain BERT layers (post-LayerNorm) cut at one point, with n-gram windows below the cut and positions added at
it, as in SkipBERT (HMI 3.2.1). Shapes: W windows, N tokens of all requests packed, H hidden size, n window length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.packed import Place
from hplm.core.settings import BaseConfig
from hplm.plot.windows import centre

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Adapt = Callable[[Place, int, Tensor], Tensor]


class TransformerLayer(nn.Module):
    """One post-LayerNorm BERT layer; how tokens see each other (`attend`) is the caller's."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.ffn_in = nn.Linear(hidden, inner)
        self.activation: nn.Module = nn.GELU()
        self.ffn_out = nn.Linear(inner, hidden)
        self.ffn_norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, hidden: Tensor, attend: Attend, adapt: Callable[[Place, Tensor], Tensor] | None = None) -> Tensor:
        """`hidden`: `[..., H]`. `adapt` is asked at each place that an adapter may stand at."""
        if adapt is not None:
            hidden = adapt("input", hidden)
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        attended = self.attention_out(attend(query, key, value))
        if adapt is not None:
            attended = adapt("attention", attended)
        hidden = self.attention_norm(hidden + attended)
        return self.ffn_norm(hidden + self.ffn_out(self.activation(self.ffn_in(hidden))))


def layer_weights(layer: nn.Module) -> list[Tensor]:
    """What RunLayers and RunWindows take of a TransformerLayer, in their order."""
    assert isinstance(layer, TransformerLayer)
    parts = (layer.qkv, layer.attention_out, layer.attention_norm, layer.ffn_in, layer.ffn_out, layer.ffn_norm)
    return [tensor.detach() for part in parts for tensor in (part.weight, part.bias)]


class RelativeBias(nn.Module):
    """What a head adds to its scores for how far the key is from the query (MPNet, T5), the same in every layer."""

    FARTHEST = 128  # from there on all distances share a bucket

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.scores = nn.Embedding(config.relative_buckets, config.num_heads)

    def forward(self, length: int) -> Tensor:
        """`[heads, length, length]`, query before key."""
        places = torch.arange(length, device=self.scores.weight.device)
        found: Tensor = self.scores(self.buckets(places[None, :] - places[:, None]))
        return found.permute(2, 0, 1).contiguous()

    def buckets(self, distance: Tensor) -> Tensor:
        """Of keys `distance` behind their query: half of them for each direction, one for each near distance."""
        each = self.scores.num_embeddings // 2
        near = each // 2
        far = distance.abs()
        # Beyond the near ones a bucket covers as many times the distance as the one before it.
        steps = torch.log(far.clamp(min=1) / near) / math.log(self.FARTHEST / near) * (each - near)
        bucket = torch.where(far < near, far, (near + steps.long()).clamp(max=each - 1))
        return bucket + each * (distance > 0)


def relative_bias(config: BaseConfig) -> RelativeBias | None:
    """None for a model without."""
    return RelativeBias(config) if config.relative_buckets else None


class WindowEncoder(nn.Module):
    """The lower layers over n-gram windows without absolute positions: token ids -> gated vectors.

    A window shorter than n (at the edges of a text, or a bigram or unigram of the back-off) holds `[PAD]` in the places
    it lacks; those are masked. The centre is always seen, so no window is empty.
    """

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.window_position = nn.Parameter(torch.zeros(config.window, config.hidden_size))
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative = relative_bias(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.window_layers))
        # The gate is elementwise, one per place in the window; zeros make it 1, so an unconverted base passes through.
        self.gate_weight = nn.Parameter(torch.zeros(config.window, config.hidden_size, config.hidden_size))
        self.gate_bias = nn.Parameter(torch.zeros(config.window, config.hidden_size))
        # All of it as one function, once `hplm.engine.lower_layers.pack` was asked for it; the layers are gone then.
        self.packed: nn.Module | None = None

    def forward(self, windows: Tensor) -> Tensor:
        """`windows`: int64 `[W, n]` of token ids -> gated vectors `[W, n, H]`."""
        if self.packed is not None:
            with torch.autocast(windows.device.type, enabled=False):
                packed: Tensor = self.packed(windows)
                return packed
        config = self.config
        seen = windows != config.pad_id
        seen[:, centre(config.window)] = True
        bias = torch.zeros(windows.shape, device=windows.device).masked_fill_(~seen, float("-inf"))[:, None, :, None]
        if self.relative is not None:
            bias = bias + self.relative(config.window).permute(1, 2, 0)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Products of 3 x 3 are too small for a matrix kernel: elementwise is a fifth faster on a CPU.
            heads = (len(windows), config.window, config.num_heads, -1)
            query, key, value = query.view(heads), key.view(heads), value.view(heads)
            scores = (query[:, :, None] * key[:, None]).sum(-1) * query.shape[-1] ** -0.5
            weights = (scores + bias.to(scores.dtype)).softmax(2)
            # Place by place it is summed in half the time of all at once.
            found = weights[:, :, 0, :, None] * value[:, None, 0]
            for place in range(1, config.window):
                found = found.addcmul_(weights[:, :, place, :, None], value[:, None, place])
            return found.flatten(2)

        hidden: Tensor = self.embedding_norm(self.word_embeddings(windows) + self.window_position)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        gate = torch.einsum("wnh,nkh->wnk", hidden, self.gate_weight)
        return 2 * torch.sigmoid(gate + self.gate_bias) * hidden

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.packed is not None:
            # Without this, a state would lack the layers and nobody would know.
            raise TypeError("matrices in oneDNN's order cannot be saved: save the module before it is packed")
        super()._save_to_state_dict(*args)


class UpperLayers(nn.Module):
    """Position embeddings, LayerNorm and the upper layers, over packed tokens."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.config = config
        self.position_embeddings = nn.Embedding(config.max_tokens, config.hidden_size)
        self.merge_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative = relative_bias(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.upper_layers))

    def embed(self, merged: Tensor, positions: Tensor) -> Tensor:
        """Merged window vectors `[..., H]` and positions `[...]` -> the input of the first upper layer."""
        hidden: Tensor = self.merge_norm(merged + self.position_embeddings(positions))
        return hidden

    def forward(self, merged: Tensor, lengths: Sequence[int], adapt: Adapt | None = None) -> Tensor:
        """`merged`: `[N, H]`, texts one after another with `lengths` summing to N -> hidden states `[N, H]`.

        `adapt(place, layer_index, tokens)` returns the tokens `[N, H]`, of every text whose adapter stands there changed by it.
        """
        return self.states(merged, lengths, adapt)[-1]

    def states(self, merged: Tensor, lengths: Sequence[int], adapt: Adapt | None = None) -> list[Tensor]:
        """The input of the first upper layer and the output of each, as `forward` computes them."""
        states = [self.embed(merged, packed_positions(lengths, merged.device))]
        attend = packed_attention(self.config.num_heads, lengths, self.relative)
        for index in range(len(self.layers)):
            states.append(self.layer(index, states[-1], attend, adapt))
        return states

    def layer(self, index: int, hidden: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        """One upper layer over tokens laid out in any way that `attend` knows: `[N, H]` -> `[N, H]`."""
        changed: Tensor = self.layers[index](hidden, attend, None if adapt is None else _bind(adapt, index))
        return changed


def _bind(adapt: Adapt, index: int) -> Callable[[Place, Tensor], Tensor]:
    return lambda place, tokens: adapt(place, index, tokens)


def packed_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """0, 1, ... of each text, one after another: `[N]`."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def packed_attention(num_heads: int, lengths: Sequence[int], relative: RelativeBias | None = None) -> Attend:
    """Attention within each text of a packed batch `[N, H]`: neighbours of equal length go in one call, nothing is padded."""
    runs = equal_runs(lengths)
    bias = relative(max(lengths)) if relative is not None else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = [count * length for count, length in runs]
        parts = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return torch.cat([_attend_run(num_heads, count, length, q, k, v, bias) for (count, length), q, k, v in parts])

    return attend


def equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of equal length: `(count, length)` of each run."""
    return [(len([*run]), length) for length, run in itertools.groupby(lengths)]


def _attend_run(
    num_heads: int, count: int, length: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor:
    shape = (count, length, num_heads, -1)
    query, key, value = (part.reshape(shape).transpose(1, 2) for part in (query, key, value))
    mask = None if bias is None else bias[None, :, :length, :length].to(query.dtype)
    if query.requires_grad and query.device.type == "cpu":
        found = plain_attention(query, key, value, mask)
    else:
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return found.transpose(1, 2).reshape(count * length, -1)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As `scaled_dot_product_attention`. On a CPU its backward is slower than that of these products."""
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ value


class OriginalEncoder(nn.Module):
    """The pretrained model as it came: absolute positions from the start, every layer over the whole text."""

    def __init__(self, config: BaseConfig, num_layers: int) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_tokens, config.hidden_size)
        self.token_type = nn.Parameter(torch.zeros(config.hidden_size))
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative = relative_bias(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(num_layers))

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Packed `ids` `[N]` -> the hidden states `[N, H]` after each layer."""
        positions = self.position_embeddings(packed_positions(lengths, ids.device))
        embedded = self.word_embeddings(ids) + positions + self.token_type
        hidden = self.embedding_norm(embedded)
        attend = packed_attention(self.config.num_heads, lengths, self.relative)
        states = []
        for layer in self.layers:
            hidden = layer(hidden, attend)
            states.append(hidden)
        return states


def merge_windows(vectors: Tensor, exists: Tensor) -> Tensor:
    """Mean over the windows that exist of each token's vectors (HMI eq. 2): `[N, n, H]`, `[N, n]` -> `[N, H]`.

    Window t's vector at place i belongs to token t + i - centre. The roll never crosses texts: a window that reaches
    over its text's edge does not exist there.
    """
    n = vectors.shape[1]
    kept = vectors * exists.unsqueeze(-1)
    total = sum(torch.roll(kept[:, i], i - centre(n), 0) for i in range(n))
    count = sum(torch.roll(exists[:, i].to(vectors.dtype), i - centre(n), 0) for i in range(n))
    assert isinstance(total, Tensor)
    assert isinstance(count, Tensor)
    return total / count.unsqueeze(-1)
