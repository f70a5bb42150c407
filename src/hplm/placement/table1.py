"""The models of AlpaServe's Table 1 as data, so that its experiments run without its hardware.

The table has the size and the latency of each model (one text of 2,048 tokens on a V100). The paper does not say how these
divide between a model's layers. These are our assumptions:

- The models are transformers of the usual shape for their size (hidden size and layers below), with a vocabulary of 51,200.
- A layer's time is in proportion to its products: 24 h^2 + 4 s h for a transformer layer, 2 h V for the head, for each token
  (h: hidden size, s: tokens, V: vocabulary). The embedding takes a quarter of a transformer layer, to read and to normalise.
- A layer's bytes are in proportion to its weights: 12 h^2 for a transformer layer, h V for the embedding. The head has the
  embedding's weights, and is on another device, so it has bytes of its own.
- Every second layer of a mixture of experts (MoE) has 16 experts: 4 h^2 + 16 * 8 h^2 weights. It takes twice the time of a
  plain layer, because each token goes to two experts. These models have few products for their latency, so the time goes to
  the routing in their layers. Their head and embedding are as fast as those of BERT-1.3B.
- All times add up to the table's latency, and all bytes to its size.
- A stage sends the hidden states of 2,048 tokens in 16 bits over NVLink, and half a millisecond passes until the next stage
  begins. The latency of BERT-104B contains such times already, which is ignored.
- Two all-reduces follow each layer that several devices share. At 40 GB/s they take 15 % of a layer's time, times
  2 * (1 - 1/n) for n devices. The share is nearly the same for hidden sizes of 2,048 and of 4,096.

So an even cut has a slow last stage, because the head takes as long as one or two transformer layers (Fig. 8 and 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster, uniform_cluster
from hplm.placement.partition import Cut, even_cut
from hplm.placement.served_model import IntraCost, ServedModel

TOKENS = 2048
VOCABULARY = 51_200
# Bytes that a V100 of 16 GB has for weights; the rest is for activations and the runtime (AlpaServe 6.2).
DEVICE_BYTES = 13 * 10**9
# Bytes a second from one V100 to another over NVLink, one direction of one link.
NVLINK_BYTES_PER_S = 25e9
# Seconds from the end of a stage to the beginning of the next, besides the copy.
HOP_S = 0.0005
# See the last assumption above.
INTRA_SHARE = 0.15
# Layers of a model that an even cut does not count: the embedding and the head.
UNCOUNTED_LAYERS = 1
_EMBEDDING_TIME = 0.25
_EXPERTS = 16
_MOE_TIME = 2.0
# Seconds of a batch of 1, 2, 4, 8, ... requests as multiples of one request: the texts saturate the GPU (AlpaServe 6.5).
_BATCH_GAIN = 0.05


@dataclass(frozen=True)
class Architecture:
    """A model of Table 1. `size_gb` (10^9 bytes) and `latency_ms` are the table's, the rest is assumed."""

    size_gb: float
    latency_ms: float
    layers: int
    hidden: int
    is_moe: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "BERT-1.3B": Architecture(2.4, 151, 24, 2048),
    "BERT-2.7B": Architecture(5.4, 238, 32, 2560),
    "BERT-6.7B": Architecture(13.4, 395, 32, 4096),
    "BERT-104B": Architecture(208, 4600, 80, 10_240),
    "MoE-1.3B": Architecture(2.6, 150, 16, 768, is_moe=True),
    "MoE-2.4B": Architecture(4.8, 171, 16, 1024, is_moe=True),
    "MoE-5.3B": Architecture(10.6, 234, 16, 1536, is_moe=True),
}

ModelSet = Literal["S1", "S2", "S3", "S4"]
# The number of instances of each model in the paper's sets.
MODEL_SETS: Mapping[ModelSet, Mapping[str, int]] = {
    "S1": {"BERT-1.3B": 32},
    "S2": {"BERT-6.7B": 32},
    "S3": {name: 10 for name in ARCHITECTURES if name != "BERT-104B"},
    "S4": {"BERT-104B": 4},
}


def table1_model(architecture: str, name: str | None = None) -> ServedModel:
    """Return a model of Table 1. `name` is the instance's name, by default the architecture's."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"one of {', '.join(ARCHITECTURES)} was expected, got {architecture!r}")
    shape = ARCHITECTURES[architecture]
    hidden, latency_s = shape.hidden, shape.latency_ms / 1000
    layer_weights = 12 * hidden**2
    moe = [shape.is_moe and number % 2 == 1 for number in range(shape.layers)]
    layer_parts = [_MOE_TIME if is_moe else 1.0 for is_moe in moe]
    weights = [layer_weights + (_EXPERTS - 1) * 8 * hidden**2 * is_moe for is_moe in moe]
    model_of_speed = ARCHITECTURES["BERT-1.3B"] if shape.is_moe else shape
    product_s = model_of_speed.latency_ms / 1000 / _products(model_of_speed)
    embedding_s = _EMBEDDING_TIME * _layer_products(hidden) * product_s
    head_s = _head_products(hidden) * product_s
    part_s = (latency_s - embedding_s - head_s) / sum(layer_parts)
    bytes_each = shape.size_gb * 1e9 / (sum(weights) + 2 * VOCABULARY * hidden)
    return ServedModel(
        name or architecture,
        (embedding_s, *(part_s * part for part in layer_parts), head_s),
        tuple(int(bytes_each * layer) for layer in (VOCABULARY * hidden, *weights, VOCABULARY * hidden)),
        boundary_bytes=2 * TOKENS * hidden,
        hop_s=HOP_S,
        intra=IntraCost(INTRA_SHARE),
        batch_times=tuple(1 + (1 - _BATCH_GAIN) * more for more in range(8)),
    )


def _layer_products(hidden: int) -> int:
    """Return the products of a transformer layer for each token."""
    return 24 * hidden**2 + 4 * TOKENS * hidden


def _head_products(hidden: int) -> int:
    return 2 * hidden * VOCABULARY


def _products(shape: Architecture) -> float:
    """Return the products of a whole model without experts for each token, the embedding's time as products included."""
    return (shape.layers + _EMBEDDING_TIME) * _layer_products(shape.hidden) + _head_products(shape.hidden)


def model_set(name: ModelSet) -> tuple[ServedModel, ...]:
    """Return the instances of a set, named ARCHITECTURE-1, ARCHITECTURE-2 and so on."""
    instances = []
    for architecture, count in MODEL_SETS[name].items():
        model = table1_model(architecture)
        instances += [replace(model, name=f"{architecture}-{number}") for number in range(1, count + 1)]
    return tuple(instances)


def table1_cluster(devices: int = 64, device_bytes: int = DEVICE_BYTES) -> Cluster:
    """Return the paper's testbed: nodes of 8 V100, or fewer if there are fewer devices."""
    return uniform_cluster(devices, device_bytes, NVLINK_BYTES_PER_S, per_node=8)


def cut_by_hand(model: ServedModel, layer_s: tuple[float, ...], stages: int, send_s: float) -> Cut:
    """Return the cut that gives each stage the same number of transformer layers (the manual partition of Fig. 16)."""
    return even_cut(len(layer_s), stages, UNCOUNTED_LAYERS, UNCOUNTED_LAYERS)
