"""An adapter packed for adapter slots: one row for each layer, so that one copy fetches a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError

Float32 = npt.NDArray[np.float32]
# Where in a layer an adapter stands: at the layer's input, or after the attention sub-layer as in HMI eq. 1.
Place = Literal["input", "attention"]
NAN = 0x7FC0  # bits of a NaN in bfloat16


@dataclass(frozen=True)
class Adapter:
    """Bottleneck blocks of a base's last A layers (HMI eq. 1), r bottleneck: `x + W_up relu(W_down x)`.

    `down` `[A, r, H]`, `down_bias` `[A, r]`, `up` `[A, H, r]`, `up_bias` `[A, H]`. A is the base's `adapted_layers`.
    """

    down: Float32
    down_bias: Float32
    up: Float32
    up_bias: Float32


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in one array `weights` `[A, P]`. A layer's row holds down `[H, r]`, its bias, up `[r, H]`, its bias.

    The matrices are transposed, because a batched product reads them fastest so. The type is float32, or uint16 that holds the
    bits of bfloat16, a type that numpy lacks.
    """

    weights: npt.NDArray[np.float32] | npt.NDArray[np.uint16]
    hidden_size: int
    reduced_size: int

    def __post_init__(self) -> None:
        assert self.weights.shape[1] == packed_width(self.hidden_size, self.reduced_size)


def all_finite(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> bool:
    """Return whether no number is NaN or infinite; uint16 holds bfloat16 as in PackedAdapter."""
    if values.dtype == np.uint16:
        # Only NaN and infinity have an exponent of all ones.
        return int((values.view(np.uint16) & 0x7FFF).max(initial=0)) < 0x7F80
    return bool(np.isfinite(values).all())


def packed_width(hidden: int, reduced: int) -> int:
    """Return P, the count of numbers in one layer's row."""
    return 2 * hidden * reduced + reduced + hidden


def pack(adapter: Adapter) -> PackedAdapter:
    """Pack an adapter in float32."""
    layers, reduced, hidden = adapter.down.shape
    turned = (adapter.down.transpose(0, 2, 1), adapter.down_bias, adapter.up.transpose(0, 2, 1), adapter.up_bias)
    parts = [part.reshape(layers, -1) for part in turned]
    return PackedAdapter(np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32), hidden, reduced)


def unpack(packed: PackedAdapter) -> Adapter:
    """Unpack an adapter in float32, whatever type it was packed in."""
    hidden, reduced = packed.hidden_size, packed.reduced_size
    weights = from_bfloat16(packed.weights) if packed.weights.dtype == np.uint16 else packed.weights
    layers = len(weights)
    ends = np.cumsum([reduced * hidden, reduced, hidden * reduced])
    down, down_bias, up, up_bias = np.split(weights.astype(np.float32), ends, axis=1)
    down, up = down.reshape(layers, hidden, reduced), up.reshape(layers, reduced, hidden)
    return Adapter(
        np.ascontiguousarray(down.transpose(0, 2, 1)), down_bias, np.ascontiguousarray(up.transpose(0, 2, 1)), up_bias
    )


def widen(packed: PackedAdapter, reduced_size: int) -> PackedAdapter:
    """Return the same adapter with a bottleneck of `reduced_size`. It is filled up with zeros, which change no answer.

    Raises ConfigError if the adapter's bottleneck is larger.
    """
    if packed.reduced_size == reduced_size:
        return packed
    if packed.reduced_size > reduced_size:
        raise ConfigError(
            f"an adapter's bottleneck is {packed.reduced_size}, the slots hold {reduced_size}: lower reduction_factor"
        )
    before = unpack(packed)
    layers, hidden = len(packed.weights), packed.hidden_size
    down, down_bias, up = (
        np.zeros(shape, np.float32)
        for shape in ((layers, reduced_size, hidden), (layers, reduced_size), (layers, hidden, reduced_size))
    )
    down[:, : packed.reduced_size] = before.down
    down_bias[:, : packed.reduced_size] = before.down_bias
    up[:, :, : packed.reduced_size] = before.up
    return pack(Adapter(down, down_bias, up, before.up_bias))


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even; a NaN stays a NaN."""
    exact = np.ascontiguousarray(values, np.float32)
    bits = exact.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding up would wrap the largest bits of NaN to 0.
    rounded[np.isnan(exact)] = NAN
    return rounded


def from_bfloat16(bits: npt.NDArray[Any]) -> Float32:
    """Return the exact float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
