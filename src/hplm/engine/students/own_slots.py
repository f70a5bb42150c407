"""Students with own layers in device memory: slots of whole students, filled before a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hplm.adapters.slots import SlotTable
from hplm.adapters.students import own_shapes
from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig


class OwnSlots:
    """Slots of students with own layers; the least recently used student loses its slot first. Not thread-safe.

    `parts[i]` are layer i's tensors `[slots, ...]`, in the order of `layer_weights`. On a CPU the memory of unused slots is
    never touched.
    """

    def __init__(self, config: BaseConfig, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        shapes = own_shapes(config.upper_layers, config.hidden_size, config.intermediate_size)
        self.num_slots = num_slots
        self.parts: list[list[Tensor]] = [
            [torch.empty(num_slots, *shape[1:], device=device, dtype=dtype) for shape in shapes]
            for _ in range(config.upper_layers)
        ]
        # The table's first slot is the identity, which own layers do not have.
        self._table = SlotTable(num_slots + 1)
        self.loads = 0

    @contextmanager
    def assigned(self, students: Sequence[tuple[Tenant, int]]) -> Iterator[list[int]]:
        """Pin a slot for each student, a tenant and its number from 0, and fill the slots that lack it; yield the slots.

        At most `num_slots` students may differ.
        """
        slots: dict[str, int] = {}
        keys = [f"{tenant.key}#{number}" for tenant, number in students]
        for key in keys:
            # A student with a slot must not lose it to another student of the same batch.
            self._table.touch(key)
        try:
            for key, (tenant, number) in zip(keys, students, strict=True):
                if key in slots:
                    continue
                slot, is_new = self._table.assign(key)
                if is_new:
                    self._fill(key, slot - 1, tenant, number)
                slots[key] = slot - 1
            yield [slots[key] for key in keys]
        finally:
            for key in slots:
                self._table.release(key)

    def _fill(self, key: str, slot: int, tenant: Tenant, number: int) -> None:
        """Copy a student to its pinned slot. If that fails, the slot is freed."""
        own = None if tenant.students is None else tenant.students.own
        assert own is not None
        try:
            for place, tensor in enumerate(own.tensors):
                weights = torch.from_numpy(tensor[number]).view(torch.bfloat16)
                for layer, parts in enumerate(self.parts):
                    parts[place][slot].copy_(weights[layer])
        except BaseException:
            self._table.release(key)
            self._table.forget(key)
            raise
        self.loads += 1
