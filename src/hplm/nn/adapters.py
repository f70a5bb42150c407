"""Adapters in device memory, and applying each text's own to a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.adapters.slots import IDENTITY, SlotTable
from hplm.adapters.tenant import Adapter, Tenant
from hplm.config import BaseConfig
from hplm.nn.encoder import Adapt


class AdapterSlots:
    """Weights of S slots, L layers: `down` `[S, L, r, H]`, `up` `[S, L, H, r]` and their biases; slot 0 stays zero.

    An adapter with a smaller bottleneck than `reduced_size` is filled up with zeros, which change nothing.
    """

    def __init__(
        self, config: BaseConfig, num_slots: int, reduced_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        layers, hidden = config.upper_layers, config.hidden_size
        self.table = SlotTable(num_slots)
        self.down = torch.zeros(num_slots, layers, reduced_size, hidden, device=device, dtype=dtype)
        self.down_bias = torch.zeros(num_slots, layers, reduced_size, device=device, dtype=dtype)
        self.up = torch.zeros(num_slots, layers, hidden, reduced_size, device=device, dtype=dtype)
        self.up_bias = torch.zeros(num_slots, layers, hidden, device=device, dtype=dtype)

    def assign(self, tenant: Tenant) -> int:
        """Pin a slot for a tenant and see that its adapter is there. Pair with `release`; nothing is pinned on failure."""
        slot, is_new = self.table.assign(tenant.card.name)
        if is_new:
            try:
                self._load(slot, tenant.adapter)
            except BaseException:
                self.table.release(tenant.card.name)
                self.table.forget(tenant.card.name)
                raise
        return slot

    def release(self, tenant: Tenant) -> None:
        """Undo one `assign`; the weights stay until the slot is needed."""
        self.table.release(tenant.card.name)

    def _load(self, slot: int, adapter: Adapter) -> None:
        assert slot != IDENTITY
        reduced = adapter.down.shape[1]
        for target in (self.down, self.down_bias, self.up, self.up_bias):
            target[slot].zero_()
        self.down[slot, :, :reduced] = torch.from_numpy(adapter.down)
        self.down_bias[slot, :, :reduced] = torch.from_numpy(adapter.down_bias)
        self.up[slot, :, :, :reduced] = torch.from_numpy(adapter.up)
        self.up_bias[slot] = torch.from_numpy(adapter.up_bias)

    def batched(self, slots: Sequence[int], lengths: Sequence[int]) -> Adapt:
        """The adapters of a packed batch whose texts use `slots`: neighbours with one slot are one product."""
        runs: list[tuple[int, int]] = []
        for slot, length in zip(slots, lengths, strict=True):
            if runs and runs[-1][0] == slot:
                runs[-1] = (slot, runs[-1][1] + length)
            else:
                runs.append((slot, length))

        def adapt(layer: int, attended: Tensor) -> Tensor:
            parts = attended.split([length for _, length in runs])
            return torch.cat(
                [
                    part if slot == IDENTITY else self._apply(layer, slot, part)
                    for (slot, _), part in zip(runs, parts, strict=True)
                ]
            )

        return adapt

    def _apply(self, layer: int, slot: int, attended: Tensor) -> Tensor:
        reduced = F.relu(F.linear(attended, self.down[slot, layer], self.down_bias[slot, layer]))
        return attended + F.linear(reduced, self.up[slot, layer], self.up_bias[slot, layer])
