"""Transformer layers, the upper layers of a base, and the whole pretrained model that a base is converted from.

The model is cut at one layer, as in SkipBERT (HMI 3.2.1): a lower encoder (`hplm.models.lower`) stands below the cut, and
positions are added at the cut. Shapes: N tokens of all texts packed, H hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.packed import Place
from hplm.core.settings import BaseConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Adapt = Callable[[Place, int, Tensor], Tensor]
TOKEN_TYPES = 2  # the first and the second text of a pair


class HalfLayer(nn.Module):
    """The half of a layer that computes each token alone: two products with a GELU between them, then LayerNorm."""

    def make_feed_forward(self, config: BaseConfig) -> None:
        """Make the modules of this half. A subclass calls it, because the order of modules decides their random weights."""
        self.ffn_in = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation: nn.Module = nn.GELU()
        self.ffn_out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Compute `[..., H]` -> `[..., H]`."""
        changed: Tensor = self.ffn_norm(hidden + self.ffn_out(self.activation(self.ffn_in(hidden))))
        return changed


class FeedForward(HalfLayer):
    """A residual feed-forward block: the half of a BERT layer behind attention."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.make_feed_forward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.feed_forward(hidden)


class TransformerLayer(HalfLayer):
    """One post-LayerNorm BERT layer; the caller's `attend` computes attention."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.make_feed_forward(config)

    def forward(self, hidden: Tensor, attend: Attend, adapt: Callable[[Place, Tensor], Tensor] | None = None) -> Tensor:
        """Compute `hidden`, `[..., H]`. `adapt` is called at each place where an adapter may stand."""
        return self.feed_forward(self.attention_half(hidden, attend, adapt))

    def attention_half(
        self, hidden: Tensor, attend: Attend, adapt: Callable[[Place, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Compute the output of the attention sub-layer, `[..., H]`, after its LayerNorm."""
        if adapt is not None:
            hidden = adapt("input", hidden)
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        attended = self.attention_out(attend(query, key, value))
        if adapt is not None:
            attended = adapt("attention", attended)
        normalised: Tensor = self.attention_norm(hidden + attended)
        return normalised


def layer_weights(layer: nn.Module) -> list[Tensor]:
    """Return a TransformerLayer's tensors in the order in which RunLayers and RunWindows take them."""
    assert isinstance(layer, TransformerLayer)
    parts = (layer.qkv, layer.attention_out, layer.attention_norm, layer.ffn_in, layer.ffn_out, layer.ffn_norm)
    return [tensor.detach() for part in parts for tensor in (part.weight, part.bias)]


class RelativeBias(nn.Module):
    """Scores that a head adds for the distance from query to key (MPNet, T5), the same in every layer."""

    FARTHEST = 128  # tokens; from this distance on all distances share a bucket

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.scores = nn.Embedding(config.relative_buckets, config.num_heads)

    def forward(self, length: int) -> Tensor:
        """Compute the scores `[heads, length, length]`, query before key."""
        places = torch.arange(length, device=self.scores.weight.device)
        scores: Tensor = self.scores(self.buckets(places[None, :] - places[:, None]))
        return scores.permute(2, 0, 1).contiguous()

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the buckets of keys that stand `distance` after their query.

        Half of the buckets are for each direction. Each near distance has a bucket of its own.
        """
        each = self.scores.num_embeddings // 2
        near = each // 2
        far = distance.abs()
        # Beyond the near distances buckets grow by a constant factor.
        steps = torch.log(far.clamp(min=1) / near) / math.log(self.FARTHEST / near) * (each - near)
        bucket = torch.where(far < near, far, (near + steps.long()).clamp(max=each - 1))
        return bucket + each * (distance > 0)


def relative_bias(config: BaseConfig) -> RelativeBias | None:
    """Return the module of a model with relative positions, else None."""
    return RelativeBias(config) if config.relative_buckets else None


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
        """Compute the input of the first upper layer from merged vectors `[..., H]` and positions `[...]`."""
        hidden: Tensor = self.merge_norm(merged.float() + self.position_embeddings(positions))
        return hidden

    def forward(self, merged: Tensor, lengths: Sequence[int], adapt: Adapt | None = None) -> Tensor:
        """Compute hidden states `[N, H]` from `merged`, texts one after another with `lengths` summing to N.

        `merged` are the merged vectors `[N, H]`; in a whole base the ids and types of tokens `[N, 2]`, see WholeLayers.

        `adapt(place, layer_index, tokens)` returns the tokens `[N, H]`, changed in texts whose adapter stands at that place.
        """
        return self.states(merged, lengths, adapt)[-1]

    def states(self, merged: Tensor, lengths: Sequence[int], adapt: Adapt | None = None) -> list[Tensor]:
        """Compute the input of the first upper layer and the output of each layer, as `forward` does."""
        states = [self.embed(merged, packed_positions(lengths, merged.device))]
        attend = packed_attention(self.config.num_heads, lengths, self.relative)
        for index in range(len(self.layers)):
            states.append(self.layer(index, states[-1], attend, adapt))
        return states

    def layer(self, index: int, hidden: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        """Compute one upper layer, `[N, H]` -> `[N, H]`, over tokens in any layout that `attend` takes."""
        changed: Tensor = self.layers[index](hidden, attend, None if adapt is None else _bind(adapt, index))
        return changed


class WholeLayers(UpperLayers):
    """All layers of a whole base, which read the ids and types of tokens `[N, 2]` in place of merged vectors.

    `words` `[V, H]` are the word embeddings in any format. No training changes them, and a base keeps them in a file of their
    own, which processes share. So they are no part of the state.
    """

    words: Tensor

    def __init__(self, config: BaseConfig, words: Tensor) -> None:
        super().__init__(config)
        self.register_buffer("words", words, persistent=False)
        self.type_embeddings = nn.Embedding(config.token_types, config.hidden_size) if config.token_types else None

    def embed(self, merged: Tensor, positions: Tensor) -> Tensor:
        """Compute the input of the first layer from ids and types `[..., 2]` and positions `[...]`."""
        ids, types = merged.unbind(-1)
        embedded = F.embedding(ids, self.words).float()
        if self.type_embeddings is not None:
            embedded = embedded + self.type_embeddings(types)
        return super().embed(embedded, positions)


def _bind(adapt: Adapt, index: int) -> Callable[[Place, Tensor], Tensor]:
    return lambda place, tokens: adapt(place, index, tokens)


def packed_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the positions 0, 1, ... of each text, one text after another: `[N]`."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def packed_attention(num_heads: int, lengths: Sequence[int], relative: RelativeBias | None = None) -> Attend:
    """Return attention within each text of a packed batch `[N, H]`, without padding. Equal neighbours share a call."""
    runs = equal_runs(lengths)
    bias = relative(max(lengths)) if relative is not None else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = [count * length for count, length in runs]
        parts = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return torch.cat([_attend_run(num_heads, count, length, q, k, v, bias) for (count, length), q, k, v in parts])

    return attend


def equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return `(count, length)` of each run of neighbours of equal length."""
    return [(len([*run]), length) for length, run in itertools.groupby(lengths)]


def _attend_run(
    num_heads: int, count: int, length: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor:
    shape = (count, length, num_heads, -1)
    query, key, value = (part.reshape(shape).transpose(1, 2) for part in (query, key, value))
    mask = None if bias is None else bias[None, :, :length, :length].to(query.dtype)
    if query.requires_grad and query.device.type == "cpu":
        context = plain_attention(query, key, value, mask)
    else:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return context.transpose(1, 2).reshape(count * length, -1)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute what `scaled_dot_product_attention` does, with a backward that is faster on a CPU."""
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ value


class OriginalEncoder(nn.Module):
    """The pretrained model before conversion: absolute positions from the start, every layer over the whole text.

    `token_types` `[2, H]` has what is added to tokens of the first and of the second text of a pair. The rows are equal in a
    model that tells the texts apart by separators alone.
    """

    def __init__(self, config: BaseConfig, num_layers: int) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_tokens, config.hidden_size)
        self.token_types = nn.Parameter(torch.zeros(TOKEN_TYPES, config.hidden_size))
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative = relative_bias(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(num_layers))

    def forward(self, ids: Tensor, lengths: Sequence[int], types: Tensor | None = None) -> list[Tensor]:
        """Compute the hidden states `[N, H]` after each layer from packed `ids` `[N]`.

        `types` `[N]` are the token types, 0 or 1. None: all are 0.
        """
        hidden = self.embed(ids, lengths, types)
        attend = packed_attention(self.config.num_heads, lengths, self.relative)
        states = []
        for layer in self.layers:
            hidden = layer(hidden, attend)
            states.append(hidden)
        return states

    def embed(self, ids: Tensor, lengths: Sequence[int], types: Tensor | None = None) -> Tensor:
        """Compute the input of the first layer `[N, H]` from packed `ids` and `types` as `forward` takes them."""
        positions = self.position_embeddings(packed_positions(lengths, ids.device))
        typed = self.token_types[0] if types is None else F.embedding(types, self.token_types)
        embedded: Tensor = self.embedding_norm(self.word_embeddings(ids) + positions + typed)
        return embedded
