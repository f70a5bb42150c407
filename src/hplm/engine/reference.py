"""Slow and obvious twins of fast code: one request at a time, fp32, no packing, dictionary look-up, plain loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.packed import from_bfloat16
from hplm.adapters.students import OWN_TENSORS
from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig
from hplm.engine import lower_layers as lowers
from hplm.engine.kernels.int8 import (
    LARGEST,
    LEAST_TOKEN,
    Int8Linear,
    Int8StaticLinear,
    Int8TokenLinear,
    Ranges,
    quantise_half,
    quantise_static,
)
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.models.base import Base
from hplm.models.layers import Attend, HalfLayer, TransformerLayer, UpperLayers
from hplm.models.lower import LowerEncoder
from hplm.plot import table as tables
from hplm.plot.keys import bits
from hplm.plot.ngrams import centre
from hplm.plot.table import PlotTable
from hplm.store.layout import Store
from hplm.tasks.task import Logits, Tokens
from hplm.tasks.task_loader import task_named

Vectors = npt.NDArray[np.float16]
Stored = Mapping[tuple[int, ...], Vectors]


def level(table: PlotTable) -> Stored:
    """Return a table as the dictionary that `merged` looks up."""
    if table.grams is not None:
        grams = [tuple(gram) for gram in table.grams.tolist()]
    else:
        width = bits(table.vocab_size)
        places = [width * (table.size - 1 - place) for place in range(table.size)]
        grams = [tuple((key >> place) & ((1 << width) - 1) for place in places) for key in table.keys.tolist()]
    return {gram: np.array(value) for gram, value in zip(grams, table.values, strict=True)}


def lineage(
    store: Store, base: Base, folders: Sequence[Path | str], miss: str
) -> tuple[list[Stored], LowerEncoder | None]:
    """Return the `levels` and `lower` that `merged` takes for a domain version, its own folder first and its root's last.

    A version without a table ends the levels.
    """
    places = []
    root = store.root / folders[-1]
    for folder in folders[:-1]:
        if not (store.root / folder / "branch").is_dir():
            assert miss == "compute", f"{folder} has no table"
            break
        places.append(store.root / folder / "branch")
    else:
        places.append(root / "root")
    if miss == "backoff":
        places += [root / "bigram", root / "unigram"] if base.config.window > 2 else [root / "unigram"]
    levels = [level(tables.load(place, fingerprint=base.fingerprint)) for place in places]
    if miss == "backoff":
        return levels, None
    return levels, lowers.load_lower(base) if len(folders) == 1 else lowers.load(
        store.root / folders[0] / "lower", base
    )


def merged(ids: Sequence[int], config: BaseConfig, levels: Sequence[Stored], lower: LowerEncoder | None) -> Tensor:
    """Return the hidden states `[T, H]` of one text: the first level that has an n-gram answers, else `lower` computes it.

    `levels` map an n-gram, bigram or unigram to its vectors. A shorter one stands for the n-gram cut to its centre.
    """
    n = config.window
    sums = torch.zeros(len(ids), config.hidden_size)
    counts = torch.zeros(len(ids))
    for t in range(len(ids)):
        around = range(t - centre(n), t - centre(n) + n)
        vectors = answer([ids[i] if 0 <= i < len(ids) else config.pad_id for i in around], levels, lower)
        for token, vector in enumerate(vectors, t - centre(len(vectors))):
            if 0 <= token < len(ids):
                sums[token] += torch.from_numpy(vector.astype(np.float32))
                counts[token] += 1
    return sums / counts[:, None]


def answer(ngram: list[int], levels: Sequence[Stored], lower: LowerEncoder | None) -> Vectors:
    """Return the vectors `[any, H]` of an n-gram or of its centre."""
    for level in levels:
        if not level:
            continue
        size = len(next(iter(level)))
        start = centre(len(ngram)) - centre(size)
        if (key := tuple(ngram[start : start + size])) in level:
            return level[key]
    assert lower is not None, f"no level has {ngram}"
    with torch.inference_mode():
        vectors: Vectors = lower(torch.tensor([ngram]))[0].to(torch.float16).numpy()
        return vectors


def ngram_encoder(ngram: Sequence[int], lower: NgramEncoder) -> npt.NDArray[np.float64]:
    """Compute the vector `[H]` of one n-gram as `NgramEncoder.compute` does, place by place in fp64."""
    weights = {name: tensor.double().numpy() for name, tensor in lower.state_dict().items()}
    hidden = weights["bias"]
    for place, token in enumerate(ngram):
        if token != lower.config.pad_id or place == centre(len(ngram)):
            hidden = hidden + weights[f"places.{place}.weight"] @ weights["word_embeddings.weight"][token]

    def norm(name: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scaled = (values - values.mean()) / np.sqrt(values.var() + lower.config.layer_norm_eps)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    hidden = norm("embedding_norm", hidden)
    for block in range(lower.config.window_layers):
        name = f"blocks.{block}"
        inner = weights[f"{name}.ffn_in.weight"] @ hidden + weights[f"{name}.ffn_in.bias"]
        inner = np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in inner])
        hidden = norm(
            f"{name}.ffn_norm", hidden + weights[f"{name}.ffn_out.weight"] @ inner + weights[f"{name}.ffn_out.bias"]
        )
    return hidden


def int8_ngram_encoder(ngrams: Tensor, lower: NgramEncoder, ranges: Sequence[Ranges]) -> Tensor:
    """Compute vectors `[W, H]` of n-grams `[W, n]` with the blocks' products in int8, multiplied in fp64."""
    with torch.inference_mode():
        hidden = lower.embed(ngrams)
        for block, measured in zip(lower.blocks, ranges, strict=True):
            assert isinstance(block, HalfLayer)
            hidden = block.ffn_norm(hidden + int8_feed_forward(block, measured, hidden))
    return hidden


def upper(encoder: UpperLayers, hidden: Tensor, tenant: Tenant | None, seen: list[Tensor] | None = None) -> Tensor:
    """Compute the last hidden states `[T, H]` of one text, with its tenant's adapter in each layer that has one.

    `hidden` is the text's input of the first layer: merged vectors `[T, H]`, or in a whole base ids and types `[T, 2]`.
    The attention weights `[heads, T, T]` of each layer are added to `seen`.
    """
    with torch.inference_mode():
        state = encoder.embed(hidden, torch.arange(len(hidden)))
        heads = encoder.config.num_heads
        bias = torch.zeros(heads, 1, 1) if encoder.relative is None else encoder.relative(len(hidden))
        first_adapted = encoder.config.upper_layers - encoder.config.adapted_layers
        for index, layer in enumerate(encoder.layers, -first_adapted):
            assert isinstance(layer, TransformerLayer)
            adapter_at = tenant.card.adapter_at if tenant is not None and index >= 0 else None
            if tenant is not None and adapter_at == "input":
                state = adapt(tenant, index, state)
            weights = attention_weights(layer, state, bias)
            if seen is not None:
                seen.append(weights)
            attended = layer.attention_out(attention(layer, state, weights))
            if tenant is not None and adapter_at == "attention":
                attended = adapt(tenant, index, attended)
            state = layer.attention_norm(state + attended)
            state = layer.ffn_norm(state + layer.ffn_out(F.gelu(layer.ffn_in(state))))
        return state


def attention_weights(layer: TransformerLayer, state: Tensor, bias: Tensor) -> Tensor:
    """Compute attention weights head by head: softmax of scaled products and `bias` `[heads, T, T]`, query before key."""
    query, key, _ = (part.chunk(len(bias), -1) for part in layer.qkv(state).chunk(3, dim=-1))
    heads = zip(query, key, bias, strict=True)
    return torch.stack([((q @ k.T) / math.sqrt(q.shape[-1]) + b).softmax(-1) for q, k, b in heads])


def attention(layer: TransformerLayer, state: Tensor, weights: Tensor) -> Tensor:
    """Compute attention head by head, by its weights `[heads, T, T]`: `[T, H]`."""
    values = layer.qkv(state).chunk(3, dim=-1)[2].chunk(len(weights), -1)
    return torch.cat([own @ value for own, value in zip(weights, values, strict=True)], dim=-1)


def importance(encoder: UpperLayers, hidden: Tensor, tenant: Tenant) -> npt.NDArray[np.float32]:
    """Return the importance of each token `[T]`: the attention that it receives, of all layers, heads and queries."""
    seen: list[Tensor] = []
    upper(encoder, hidden, tenant, seen)
    received: npt.NDArray[np.float32] = sum(weights.sum((0, 1)) for weights in seen).numpy()  # type: ignore[union-attr]
    return received


def word_importances(importance: npt.NDArray[np.float32], tokens: Tokens) -> list[tuple[int, int, float]]:
    """Return what `hplm.cascade.dispatch.word_importances` does, word by word."""
    mean = float(np.mean([value for value, (_, _, word) in zip(importance, tokens, strict=True) if word >= 0]))
    words = []
    for number in dict.fromkeys(int(word) for word in tokens[:, 2] if word >= 0):
        own = [i for i, word in enumerate(tokens[:, 2]) if word == number]
        words.append((int(tokens[own[0], 0]), int(tokens[own[-1], 1]), max(float(importance[i]) for i in own) / mean))
    return words


def adapt(tenant: Tenant, layer: int, tokens: Tensor) -> Tensor:
    """Apply the tenant's adapter (HMI eq. 1) of `layer`, counted from the first layer that has one."""
    adapter = tenant.adapter
    down, down_bias = torch.from_numpy(adapter.down[layer]), torch.from_numpy(adapter.down_bias[layer])
    up, up_bias = torch.from_numpy(adapter.up[layer]), torch.from_numpy(adapter.up_bias[layer])
    return tokens + F.relu(tokens @ down.T + down_bias) @ up.T + up_bias


def logits(encoder: UpperLayers, hidden: Tensor, tenant: Tenant) -> Tensor:
    """Return the head's outputs: `[1, labels]`, or `[T, n * labels]` if the task reads tokens."""
    last = upper(encoder, hidden, tenant)
    if not task_named(tenant.card.task).reads_tokens:
        last = _pool(tenant, last)
    return last @ torch.from_numpy(tenant.head.weight).T + torch.from_numpy(tenant.head.bias)


def students(encoder: UpperLayers, hidden: Tensor, tenant: Tenant, count: int) -> Tensor:
    """Return the logits `[1, labels]` of a tenant's first `count` students, computed one after another."""
    assert tenant.students is not None
    summed = torch.zeros(1, tenant.head.weight.shape[1])
    for number in range(count):
        if tenant.students.own is None:
            member = Tenant(tenant.card, tenant.students.packed[number], tenant.head)
            last = upper(encoder, hidden, member)
        else:
            last = upper(own_layers(encoder, tenant, number), hidden, None)
        summed += float(tenant.students.alphas[number]) * _pool(tenant, last)
    return summed @ torch.from_numpy(tenant.head.weight).T + torch.from_numpy(tenant.head.bias)


def own_layers(encoder: UpperLayers, tenant: Tenant, number: int) -> UpperLayers:
    """Return `encoder` with the own layers of a tenant's student, by its number from 0, in fp32."""
    assert tenant.students is not None
    assert tenant.students.own is not None
    student = copy.deepcopy(encoder)
    for index, layer in enumerate(student.layers):
        for name, tensor in zip(OWN_TENSORS, tenant.students.own.tensors, strict=True):
            layer.get_parameter(name).data = torch.from_numpy(from_bfloat16(tensor[number, index]))
    return student


def _pool(tenant: Tenant, last: Tensor) -> Tensor:
    """Return the row `[1, H]` that the head reads: `[CLS]`, or the mean of all tokens."""
    return last[:1] if tenant.card.pooling == "cls" else last.mean(0, keepdim=True)


def answered(encoder: UpperLayers, hidden: Tensor, tenant: Tenant, tokens: Tokens) -> Logits:
    """Compute the logits that an answer is read from: `[1, labels]`, for a tagging `[T, labels]`."""
    outputs: Logits = logits(encoder, hidden, tenant).numpy()
    return word_logits(outputs, len(tenant.card.labels), tokens)


def word_logits(outputs: Logits, num_labels: int, tokens: Tokens) -> Logits:
    """Compute what `hplm.tasks.words.word_logits` does, word by word."""
    window = outputs.shape[1] // num_labels
    if window == 1:
        return outputs
    result = np.zeros((len(outputs), num_labels), np.float32)
    numbers = list(dict.fromkeys(int(number) for number in tokens[:, 2] if number >= 0))
    for at, number in enumerate(numbers):
        for place in range(window):
            beside = at + place - window // 2
            if 0 <= beside < len(numbers):
                columns = slice(place * num_labels, (place + 1) * num_labels)
                result[tokens[:, 2] == number] += outputs[tokens[:, 2] == numbers[beside], columns].mean(0)
    return result


def int8_feed_forward(layer: HalfLayer, ranges: Ranges, hidden: Tensor) -> Tensor:
    """Compute a feed-forward half as `kernels.int8` does, its integers multiplied in fp64: `[N, H]` -> `[N, H]`."""
    half = quantise_half(layer, ranges)
    inner = F.gelu(_int8_static(half.first, hidden))
    codes = (inner / half.second.input_scale + half.second.zero_point).round().clamp(0, 255)
    apart = F.gelu(F.linear(hidden.float(), layer.ffn_in.weight[half.apart], layer.ffn_in.bias[half.apart]))
    return _int8_product(half.second, codes).float() + apart @ layer.ffn_out.weight[:, half.apart].T


def int8_window_layer(layer: TransformerLayer, ranges: Ranges, hidden: Tensor, attend: Attend) -> Tensor:
    """Compute a window layer as `windows.int8_windows` does, its integers multiplied in fp64: `[W, n, H]` -> `[W, n, H]`."""

    def product(linear: nn.Linear, channels: Tensor, tokens: Tensor) -> Tensor:
        return _int8_static(quantise_static(linear.weight, linear.bias, channels), tokens).float()

    query, key, value = product(layer.qkv, ranges.attention, hidden).chunk(3, dim=-1)
    attended = product(layer.attention_out, ranges.context, attend(query, key, value))
    hidden = layer.attention_norm(hidden + attended)
    return layer.ffn_norm(hidden + int8_feed_forward(layer, ranges, hidden))


def int8_by_token(linear: Int8TokenLinear, tokens: Tensor) -> Tensor:
    """Compute a product around attention as `hplm.engine.kernels.int8` does, token by token: `[N, in]` -> `[N, out]`."""
    weights = linear.codes.double() * linear.scales[:, None]
    rows = []
    for token in tokens.double() * linear.factor:
        scale = max(float(token.abs().max()), LEAST_TOKEN) / LARGEST
        rows.append(weights @ (token / scale).round() * scale + linear.bias)
    return torch.stack(rows).float()


def _int8_static(static: Int8StaticLinear, tokens: Tensor) -> Tensor:
    codes = (tokens.float() * static.factor + static.linear.zero_point + 0.5).clamp(0, 255).floor()
    return _int8_product(static.linear, codes)


def _int8_product(linear: Int8Linear, codes: Tensor) -> Tensor:
    sums = (codes.double() - linear.zero_point) @ linear.codes.double().T
    return sums * linear.scales * linear.input_scale + linear.bias
