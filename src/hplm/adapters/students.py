"""Students of a tenant: shallow models over one trunk that answer together (Student Parallelism, section 3.1).

The representation of the first k students is the sum of their pooled last hidden states, each times its alpha. One head reads
the sum, for every k. Students share the trunk's layers and differ by adapters (form `shared`), or have layers of their own
(form `own`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hplm.adapters.packed import Adapter, Float32, PackedAdapter, all_finite, pack, packed_width, unpack
from hplm.errors import ConfigError

Form = Literal["shared", "own"]
# Most bytes of one student's own layers, so that a host cache holds a few hundred students. Two layers of MiniLM are 7.1 MB.
MOST_OWN_BYTES = 8_000_000
# The tensors of a layer, in the order of `hplm.models.layers.layer_weights`.
OWN_TENSORS = (
    "qkv.weight",
    "qkv.bias",
    "attention_out.weight",
    "attention_out.bias",
    "attention_norm.weight",
    "attention_norm.bias",
    "ffn_in.weight",
    "ffn_in.bias",
    "ffn_out.weight",
    "ffn_out.bias",
    "ffn_norm.weight",
    "ffn_norm.bias",
)
_ADAPTER_PARTS = ("down", "down_bias", "up", "up_bias")


@dataclass(frozen=True)
class OwnLayers:
    """The layers of m students: `tensors[i]` is OWN_TENSORS[i] of all students and layers, `[m, N, ...]`.

    uint16 holds the bits of bfloat16, see `hplm.adapters.packed`. N is the number of the trunk's layers.
    """

    tensors: tuple[npt.NDArray[np.uint16], ...]

    @property
    def num_layers(self) -> int:
        """N, the number of layers of a student."""
        return int(self.tensors[0].shape[1])

    @property
    def hidden_size(self) -> int:
        return int(self.tensors[0].shape[-1])

    @property
    def intermediate_size(self) -> int:
        return int(self.tensors[OWN_TENSORS.index("ffn_in.bias")].shape[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all students."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Students:
    """The m students of a tenant.

    `alphas` `[m]` are their weights in the sum; the first is 1, so that the first student alone is an ordinary tenant.
    `packed`: m adapters of the form `shared`, the first is `Tenant.packed`; empty for `own`. `own`: None for `shared`.
    `scores`: the score on dev of each prefix k = 1..m.
    """

    alphas: Float32
    packed: tuple[PackedAdapter, ...]
    own: OwnLayers | None
    scores: tuple[float, ...]

    @property
    def count(self) -> int:
        """m, the number of students."""
        return len(self.alphas)

    @property
    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        own = () if self.own is None else self.own.tensors
        return all(map(all_finite, (self.alphas, *(one.weights for one in self.packed), *own)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all students in host memory, without those of the first adapter, which is also the tenant's."""
        own = 0 if self.own is None else self.own.num_bytes
        return self.alphas.nbytes + sum(one.weights.nbytes for one in self.packed[1:]) + own


def no_adapter(hidden_size: int) -> PackedAdapter:
    """Return the `Tenant.packed` of a tenant whose students have own layers: an adapter of no layers."""
    return PackedAdapter(np.zeros((0, packed_width(hidden_size, 1)), np.float32), hidden_size, 1)


def own_shapes(num_layers: int, hidden_size: int, intermediate_size: int) -> list[tuple[int, ...]]:
    """Return the shape of each of OWN_TENSORS for one student, `[N, ...]`."""
    hidden, inner = hidden_size, intermediate_size
    matrices = ((3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,), (hidden,), (hidden,))
    feed_forward = ((inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,))
    return [(num_layers, *shape) for shape in (*matrices, *feed_forward)]


def own_student_bytes(num_layers: int, hidden_size: int, intermediate_size: int) -> int:
    """Return the bytes of one student of the form `own`, in bfloat16."""
    return 2 * sum(int(np.prod(shape)) for shape in own_shapes(num_layers, hidden_size, intermediate_size))


def check_own_bytes(num_layers: int, hidden_size: int, intermediate_size: int) -> None:
    """Raise ConfigError if a student with own layers of this size is larger than MOST_OWN_BYTES."""
    if (size := own_student_bytes(num_layers, hidden_size, intermediate_size)) > MOST_OWN_BYTES:
        raise ConfigError(
            f"a student with its own {num_layers} layers has {size / 1e6:.1f} MB, at most {MOST_OWN_BYTES / 1e6:.0f} MB are "
            "allowed: choose the form shared, or a smaller trunk"
        )


def arrays_of(students: Students) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a tenant's file. The first adapter is not among them, because it is also the tenant's.

    Raises ConfigError if own layers are too large.
    """
    arrays: dict[str, npt.NDArray[Any]] = {
        "students.alphas": students.alphas.astype(np.float32),
        "students.scores": np.array(students.scores, np.float64),
    }
    for number, packed in enumerate(students.packed[1:], 1):
        adapter = vars(unpack(packed))
        arrays |= {f"students.{number}.adapter.{part}": adapter[part] for part in _ADAPTER_PARTS}
    if students.own is not None:
        own = students.own
        check_own_bytes(own.num_layers, own.hidden_size, own.intermediate_size)
        arrays |= {f"own.{name}": tensor for name, tensor in zip(OWN_TENSORS, own.tensors, strict=True)}
    return arrays


def parse(arrays: Mapping[str, npt.NDArray[Any]], count: int, first: PackedAdapter | None) -> Students:
    """Parse the arrays of a tenant with `count` students; `first` is its adapter, or None if the students have own layers.

    Raises KeyError or ValueError if arrays are missing or do not fit.
    """
    alphas, scores = arrays["students.alphas"], arrays["students.scores"]
    check_alphas(alphas, count)
    if scores.shape != (count,):
        raise ValueError(f"scores of shape {scores.shape} of {count} students")
    if first is None:
        return Students(alphas, (), _parse_own(arrays, count), tuple(scores.tolist()))
    others = [
        Adapter(*(arrays[f"students.{number}.adapter.{part}"] for part in _ADAPTER_PARTS)) for number in range(1, count)
    ]
    wanted = [array.shape for array in vars(unpack(first)).values()]
    for number, adapter in enumerate(others, 1):
        if [array.shape for array in vars(adapter).values()] != wanted:
            raise ValueError(f"the adapter of student {number} has another shape than the first student's")
    return Students(alphas, (first, *map(pack, others)), None, tuple(scores.tolist()))


def check_alphas(alphas: npt.NDArray[Any], count: int) -> None:
    """Raise ValueError if these are not the alphas of `count` students."""
    if alphas.shape != (count,) or alphas.dtype != np.float32 or alphas[0] != 1:
        raise ValueError(f"alphas {alphas!r} of {count} students")


def _parse_own(arrays: Mapping[str, npt.NDArray[Any]], count: int) -> OwnLayers:
    own = OwnLayers(tuple(arrays[f"own.{name}"] for name in OWN_TENSORS))
    if own.tensors[0].ndim != 4:
        raise ValueError(f"own.{OWN_TENSORS[0]} of shape {own.tensors[0].shape}")
    wanted = own_shapes(own.num_layers, own.hidden_size, own.intermediate_size)
    for name, tensor, shape in zip(OWN_TENSORS, own.tensors, wanted, strict=True):
        if tensor.shape != (count, *shape) or tensor.dtype != np.uint16:
            raise ValueError(
                f"own.{name} of shape {tensor.shape} and type {tensor.dtype}, not {(count, *shape)} in uint16"
            )
    return own
