"""A batch of students with own layers: planned, filled into slots, computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hplm.adapters.students import MOST_OWN_BYTES, own_student_bytes
from hplm.core.settings import BaseConfig
from hplm.engine.kernels.onednn import rounded
from hplm.engine.kernels.run_own_layers import OwnPlan, RunOwnLayers
from hplm.engine.kernels.scripted import scripted
from hplm.engine.students.own_slots import OwnSlots
from hplm.models.layers import equal_runs

# Slots for students with own layers: six tenants of four students. Of two layers of MiniLM that is 170 MB in bfloat16.
OWN_SLOTS = 24


@dataclass(frozen=True)
class _Grouped:
    """The places of a batch's tokens, grouped by slot. Fillers at the end of a slot's tokens repeat the last of them.

    `slots` has the slot of each place, `ends` int32 `[S]` the end of each slot's places. Token i stands at `places[i]`, and
    place j holds token `sources[j]`.
    """

    slots: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int32]
    places: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]

    @property
    def has_fillers(self) -> bool:
        return len(self.sources) > len(self.places)


class OwnBatches:
    """Runs batches of students with own layers, in the engine's format. Products in int8 are for the base's layers alone."""

    def __init__(
        self, config: BaseConfig, num_slots: int, device: torch.device, dtype: torch.dtype, relative: Tensor | None
    ) -> None:
        self._device = device
        self.slots = OwnSlots(config, num_slots, device, dtype)
        self._layers = scripted(RunOwnLayers(self.slots.parts, config.layer_norm_eps, config.num_heads, relative))

    def run(
        self, hidden: Tensor, slots: Sequence[int], lengths: Sequence[int], counts: Sequence[int], keeps_qkv: bool
    ) -> tuple[Tensor, list[Tensor], list[int]]:
        """Compute texts one after another, sorted by slot: `[N, H]` -> `[R, H]`, the first `counts[i]` tokens of each text.

        Also return each layer's queries, keys and values if `keeps_qkv`, and the place there at which each text starts.
        """
        tokens = self._group(slots, lengths)
        plan = self._plan(tokens, slots, lengths, counts)
        with torch.inference_mode():
            if tokens.has_fillers:
                hidden = hidden.index_select(0, self._placed(tokens.sources))
            state, qkv = self._layers(hidden, plan, keeps_qkv)
        return state, qkv, tokens.places[_starts(lengths)].tolist()

    def _plan(self, tokens: _Grouped, slots: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> OwnPlan:
        first = np.split(np.arange(sum(lengths)), _starts(lengths)[1:])
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        rows = back = None
        # Texts of one length may stand apart. A call of attention for each slot would make the calls grow with the students.
        if tokens.has_fillers or len(set(lengths)) < len(list(itertools.groupby(lengths))):
            in_rows = np.concatenate([first[i] for i in order])
            rows, back = self._placed(tokens.places[in_rows]), self._placed(np.argsort(in_rows)[tokens.sources])
            lengths = [lengths[i] for i in order]
        row_counts, row_lengths = (list(column) for column in zip(*equal_runs(lengths), strict=True))
        read = np.concatenate([own[:count] for own, count in zip(first, counts, strict=True)])
        readers = self._group(slots, counts)
        return OwnPlan(
            self._placed(tokens.slots),
            torch.from_numpy(tokens.ends).to(self._device),
            self._placed(tokens.places[read][readers.sources]),
            self._placed(readers.slots),
            torch.from_numpy(readers.ends).to(self._device),
            self._placed(readers.places),
            row_counts,
            row_lengths,
            rows,
            back,
        )

    def _group(self, slots: Sequence[int], counts: Sequence[int]) -> _Grouped:
        """Group tokens of texts one after another, sorted by slot, with fillers on a CPU: oneDNN prepares each new size."""
        token_slots = np.repeat(slots, counts)
        sizes = np.bincount(token_slots, minlength=self.slots.num_slots)
        padded = sizes if self._device.type != "cpu" else np.array([rounded(size) for size in sizes.tolist()])
        ends = np.cumsum(padded)
        starts, padded_starts = np.cumsum(sizes) - sizes, ends - padded
        places = np.arange(len(token_slots)) + (padded_starts - starts)[token_slots]
        of_places = np.repeat(np.arange(self.slots.num_slots), padded)
        steps = np.minimum(np.arange(len(of_places)) - padded_starts[of_places], sizes[of_places] - 1)
        return _Grouped(of_places, ends.astype(np.int32), places, starts[of_places] + steps)

    def _placed(self, places: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(places).to(self._device)


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths[:-1]])


def takes_own(config: BaseConfig) -> bool:
    """Return whether a base's layers are small enough for students with own layers, see `hplm.adapters.students`."""
    return own_student_bytes(config.upper_layers, config.hidden_size, config.intermediate_size) <= MOST_OWN_BYTES
