"""A table of adapter slots and the adapters in them, by a key of tenant and version.

This is bookkeeping alone: the owner of the memory copies weights. Slot 0 is the identity adapter, never assigned to a tenant.
"""

from __future__ import annotations

from collections import OrderedDict

IDENTITY = 0


class SlotTable:
    """A fixed number of adapter slots; the least recently used unpinned slot is reused first."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"slot 0 is the identity: at least 2 slots are needed, got {num_slots}")
        self.num_slots = num_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(num_slots - 1, IDENTITY, -1))
        self._pins: dict[str, int] = {}

    def find(self, key: str) -> int | None:
        """Return the slot that holds `key`, or None."""
        return self._slot_of.get(key)

    def is_pinned(self, key: str) -> bool:
        """Return whether a batch still uses the slot of `key`."""
        return key in self._pins

    @property
    def num_unpinned(self) -> int:
        """Number of slots that could be assigned to a new key now."""
        return self.num_slots - 1 - len(self._pins)

    def assign(self, key: str) -> tuple[int, bool]:
        """Pin a slot for `key`; return it, and True if its weights must be copied there first. Pair with `release`."""
        slot = self._slot_of.get(key)
        is_new = slot is None
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._slot_of[key] = slot
        self._slot_of.move_to_end(key)
        self._pins[key] = self._pins.get(key, 0) + 1
        return slot, is_new

    def touch(self, key: str) -> None:
        """Count a use of `key`, if it has a slot, so that its slot is reused last."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)

    def release(self, key: str) -> None:
        """Undo one `assign`; the weights stay in the slot until another key needs it."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def forget(self, key: str) -> None:
        """Free the unpinned slot of `key`, because its weights are not whole."""
        assert key not in self._pins
        self._free.append(self._slot_of.pop(key))

    def _evict(self) -> int:
        victim = next((key for key in self._slot_of if key not in self._pins), None)
        assert victim is not None, "every slot is pinned: see num_unpinned"
        return self._slot_of.pop(victim)
