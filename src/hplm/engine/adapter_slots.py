"""Adapters in device memory: adapter slots that are filled while the device computes (HMI 5.2, 6.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.packed import PackedAdapter, Place, packed_width, widen
from hplm.adapters.slots import IDENTITY, SlotTable
from hplm.adapters.tenant import Tenant
from hplm.core.settings import REDUCTION_FACTOR, BaseConfig
from hplm.engine.kernels.scripted import scripted
from hplm.engine.slot_fill import fill_slots, fill_slots_from_pinned, pieces, place_for
from hplm.models.layers import Adapt
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.tracing import Tracer

# A slot's bottleneck is a multiple of this. On AMD's processors, MKL rounds narrow products of other widths by a token's place.
COLUMNS = 8
# Tensors of a pool of slots.
PARTS = 4
# Default number of slots of a pool; on a GPU the least.
USUAL_SLOTS = 64
# Share of a GPU's free memory for the slots of all processes of a stage together.
SLOTS_SHARE = 0.1


@dataclass(frozen=True)
class FreshSlots:
    """Slots of one pool that need weights: `weights[i]` `[A, P]` for `slots[i]`, as PackedAdapter has them."""

    pool: int
    slots: list[int]
    weights: list[Tensor]


class Fill:
    """The copying of a batch's adapters into slots, layer by layer. The computing thread waits for each layer that it needs.

    Layers are numbered from the first layer that has an adapter.
    """

    def __init__(self, fresh: list[FreshSlots], num_layers: int, device: torch.device) -> None:
        self.fresh = fresh
        self._device = device
        self._done = 0
        self._num_layers = num_layers
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.events: list[torch.cuda.Event] = []

    def layer_done(self, event: torch.cuda.Event | None = None) -> None:
        with self._changed:
            if event is not None:
                self.events.append(event)
            self._done += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def done(self) -> bool:
        return self._done == self._num_layers and self._error is None

    def wait(self, layer: int) -> None:
        """Wait until `layer` is in its slots. On CUDA this thread's stream waits."""
        self._wait_for(layer)
        if self.events:
            torch.cuda.current_stream(self._device).wait_event(self.events[layer])

    def wait_all(self) -> None:
        """Wait until all layers are in their slots. On CUDA this thread waits, not its stream, because the stream computes."""
        self._wait_for(self._num_layers - 1)
        if self.events:
            self.events[-1].synchronize()

    def _wait_for(self, layer: int) -> None:
        with self._changed:
            while self._done <= layer and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error


@dataclass(frozen=True)
class AssignedSlots:
    """The slots of a batch, one for each request, pinned until released. `fills` were still running at the assignment.

    `places`: where in a layer each request's adapter stands.
    """

    slots: tuple[int, ...]
    places: tuple[Place, ...]
    fills: tuple[Fill, ...]

    def wait(self, layer: int) -> None:
        """Wait until `layer`, counted from the first layer with an adapter, is in all slots."""
        for fill in self.fills:
            fill.wait(layer)

    def at(self, place: Place) -> list[int]:
        """Return the slots of requests whose adapter stands at `place`, and the identity for all other requests."""
        return [slot if stands == place else IDENTITY for slot, stands in zip(self.slots, self.places, strict=True)]

    @property
    def filled(self) -> bool:
        """Whether all layers are in all slots."""
        return all(fill.done for fill in self.fills)


class AdapterSlots:
    """Adapter slots in device memory, in a pool of `num_slots` for each width. Safe to use from several threads.

    A pool has the usual width. If `reduced_size` is more, another pool has that width. So narrow adapters cost no more beside
    wide ones. A pool of A layers and S slots has four of `parts`: down `[A, S, H, r]`, its bias, up `[A, S, r, H]`, its bias.
    The A layers are the last ones of the base, those that have adapters.
    r is the pool's width in `sizes`: the requested width, rounded up so that a token's neighbours do not change its bits.
    Slot s of pool p has the number p * S + s. Slot 0 is the identity.

    A slot belongs to a tenant's version. It is not overwritten while a batch has it pinned. With `fine_prefetch` a thread fills
    slots layer by layer while the caller computes (HMI 6.2). On CUDA it does so on a stream of its own, the first layer and
    then all others (see `pieces`). Without `fine_prefetch` the callers fill slots: `assign` the slots of its batch, `prefetch`
    those of a later batch.
    """

    def __init__(
        self,
        config: BaseConfig,
        num_slots: int,
        reduced_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fine_prefetch: bool = True,
        keep_bfloat16: bool = False,
        layers: range | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Allocate the slots. With `keep_bfloat16` adapters are `fitted` to bfloat16, because no finer format is needed.

        With `layers` the slots hold the adapters of these layers of the base alone, see `in_layers`. There may be none.
        """
        self._tracer = tracer or Tracer(None, "")
        self._keeps_bfloat16 = keep_bfloat16
        hidden = config.hidden_size
        self.sizes = pool_sizes(config, reduced_size)
        self.num_slots = num_slots
        self.rows = adapter_rows(config, layers)
        self._num_layers = len(self.rows)
        self._first_layer = config.upper_layers - config.adapted_layers
        self._device = device
        self.tables = [SlotTable(num_slots) for _ in self.sizes]
        self._dtype = dtype
        # A part is one tensor of all slots, so that one copy gathers a batch's adapters. Batched products over less regular
        # memory take twice as long. On a CPU the memory of unused slots is never touched.
        self.parts = [
            torch.empty(self._num_layers, num_slots, *shape, device=device, dtype=dtype)
            for size in self.sizes
            for shape in ((hidden, size), (size,), (size, hidden), (hidden,))
        ]
        for part in self.parts:
            part[:, IDENTITY] = 0
        self.loads = 0
        self._batches_waiting = 0
        self._freed = threading.Condition()
        self._filling: dict[int, Fill] = {}
        self._fill_slots = scripted(fill_slots if device.type == "cpu" else fill_slots_from_pinned)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Fill | None] | None = None
        if fine_prefetch:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._fill_loop, args=(self._jobs,), name="hplm-swap", daemon=True)
            self._thread.start()

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots on the device, for any number of tenants. During a fill a GPU holds its tenants twice."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def fitted(self, packed: PackedAdapter) -> PackedAdapter:
        """Return the adapter as wide as its slots, no finer than needed. Raises ConfigError if it is wider than all slots."""
        packed = widen(packed, self.sizes[self._pool_of(packed)])
        if not self._keeps_bfloat16 or packed.weights.dtype == np.uint16:
            return packed
        return replace(packed, weights=torch.from_numpy(packed.weights).bfloat16().view(torch.uint16).numpy())

    def in_layers(self, packed: PackedAdapter) -> PackedAdapter:
        """Return a base's adapter in the layers of these slots."""
        if len(self.rows) == len(packed.weights):
            return packed
        # A copy, because a part of the array would keep all of it in memory.
        return replace(packed, weights=packed.weights[self.rows.start : self.rows.stop].copy())

    def staged(self, packed: PackedAdapter) -> PackedAdapter:
        """Return the same weights in the memory from which slots are filled fastest: pinned with CUDA, else unchanged."""
        if self._stream is None or not self._num_layers:
            return packed
        try:
            pinned = torch.from_numpy(packed.weights).pin_memory()
        except RuntimeError as error:
            log_rate_limited(
                f"no memory could be pinned ({error}): weights are copied to the device more slowly; lower host_cache_mb"
            )
            return packed
        return replace(packed, weights=pinned.numpy())

    def find(self, tenant: Tenant) -> int | None:
        """Return the slot that holds a tenant, or None."""
        pool = self._pool_of(tenant.packed)
        slot = self.tables[pool].find(tenant.key)
        return None if slot is None else pool * self.num_slots + slot

    def close(self) -> None:
        """End the filling thread. Batches after that fill their slots themselves."""
        with self._freed:
            jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.put(None)
            self._thread.join()

    @contextmanager
    def assigned(self, tenants: Sequence[Tenant]) -> Iterator[AssignedSlots]:
        """Pin a slot for the tenant of each request, and start to fill it if it lacks the adapter."""
        assigned = self.assign(tenants)
        try:
            yield assigned
        finally:
            self.release(tenants)

    def assign(self, tenants: Sequence[Tenant]) -> AssignedSlots:
        """Pin slots for at most `num_slots - 1` distinct tenants; wait while other batches pin too many. Pair with `release`.

        If an adapter is larger than the slots, it raises ConfigError and pins no slot. Without a layer that has adapters no
        slot is needed, so each request has the identity.
        """
        if not self._num_layers:
            return AssignedSlots((IDENTITY,) * len(tenants), tuple(tenant.card.adapter_at for tenant in tenants), ())
        wanted = self._pools_of(tenants)
        with self._freed:
            missing = {tenant.key: tenant for tenant in tenants if self.find(tenant) is None}
        # Without the lock, because fitting takes as long as a layer.
        packed = self._fitted(missing.values())
        with self._freed:
            # All slots are pinned together: two batches that each pinned a part would wait for each other.
            while not self._has_room(wanted):
                self._batches_waiting += 1
                try:
                    self._freed.wait()
                finally:
                    self._batches_waiting -= 1
            assigned, own = self._pin(tenants, wanted, packed)
        if own is not None:
            self._fill(own)
        return assigned

    def _pool_of(self, packed: PackedAdapter) -> int:
        """Return the pool of the narrowest slots that hold the adapter, else of the widest."""
        return 0 if packed.reduced_size <= self.sizes[0] else len(self.sizes) - 1

    def _pools_of(self, tenants: Sequence[Tenant]) -> dict[str, int]:
        """Return each tenant's pool by key."""
        return {tenant.key: self._pool_of(tenant.packed) for tenant in tenants}

    def _fitted(self, tenants: Iterable[Tenant]) -> dict[str, PackedAdapter]:
        return {tenant.key: self.fitted(tenant.packed) for tenant in tenants}

    def _has_room(self, wanted: Mapping[str, int]) -> bool:
        """Return whether all of `wanted`, keys with their pools, can be pinned now."""
        missing = [0] * len(self.tables)
        for key, pool in wanted.items():
            missing[pool] += not self.tables[pool].is_pinned(key)
        # A batch of more tenants than slots would wait for ever.
        assert max(missing) < self.num_slots
        return all(count <= table.num_unpinned for count, table in zip(missing, self.tables, strict=True))

    def _pin(
        self, tenants: Sequence[Tenant], wanted: Mapping[str, int], packed: Mapping[str, PackedAdapter]
    ) -> tuple[AssignedSlots, Fill | None]:
        """Pin slots; return them, and a fill that the caller must do if no thread fills slots.

        The caller holds the lock, and `_has_room` was true. `packed` lacks tenants that had a slot a moment ago.
        """
        slots: list[int] = []
        fresh = [FreshSlots(pool, [], []) for pool in range(len(self.tables))]
        for key, pool in wanted.items():
            # A tenant with a slot must not lose it to another tenant of the same batch.
            self.tables[pool].touch(key)
        for tenant in tenants:
            pool = wanted[tenant.key]
            slot, is_new = self.tables[pool].assign(tenant.key)
            slots.append(pool * self.num_slots + slot)
            if is_new:
                fitted = packed.get(tenant.key) or self.fitted(tenant.packed)
                weights = torch.from_numpy(fitted.weights)
                fresh[pool].slots.append(slot)
                fresh[pool].weights.append(weights.view(torch.bfloat16) if weights.dtype == torch.uint16 else weights)
        own = None
        if fresh := [of_pool for of_pool in fresh if of_pool.slots]:
            # One fill for all pools, so that layers arrive in the order of computing.
            fill = Fill(fresh, self._num_layers, self._device)
            for of_pool in fresh:
                self._filling.update((of_pool.pool * self.num_slots + slot, fill) for slot in of_pool.slots)
                self.loads += len(of_pool.slots)
            if self._jobs is not None:
                self._jobs.put(fill)
            else:
                own = fill
        fills = tuple({id(f): f for slot in slots if (f := self._filling.get(slot))}.values())
        return AssignedSlots(tuple(slots), tuple(tenant.card.adapter_at for tenant in tenants), fills), own

    def release(self, tenants: Sequence[Tenant]) -> None:
        """Undo one `assign`. Weights stay until another tenant needs the slot; a slot whose fill failed is freed."""
        if not self._num_layers:
            return
        with self._freed:
            for tenant in tenants:
                self.tables[self._pool_of(tenant.packed)].release(tenant.key)
            for tenant in tenants if self._filling else ():
                slot, table = self.find(tenant), self.tables[self._pool_of(tenant.packed)]
                fill = self._filling.get(slot) if slot is not None else None
                if fill is not None and fill.failed and not table.is_pinned(tenant.key):
                    table.forget(tenant.key)
            self._freed.notify_all()

    def prefetch(self, tenants: Sequence[Tenant]) -> None:
        """Fill slots for a later batch as far as slots are unpinned now (coarse prefetch), and return when they are filled.

        While a batch waits for slots it does nothing, because a later batch must not take its slots.
        """
        if not self._num_layers:
            return
        wanted = self._pools_of(tenants)
        with self._freed:
            if self._batches_waiting:
                return
            chosen: list[Tenant] = []
            missing = {tenant.key: tenant for tenant in tenants if self.find(tenant) is None}
            for pool, table in enumerate(self.tables):
                of_pool = [key for key, own in wanted.items() if own == pool]
                resident = sum(key not in missing and not table.is_pinned(key) for key in of_pool)
                # Tenants that are resident and wanted must not be evicted for tenants that are missing.
                room = max(0, table.num_unpinned - resident)
                chosen += [missing[key] for key in of_pool if key in missing][:room]
                for key in of_pool:
                    table.touch(key)
            assigned, own = self._pin(chosen, self._pools_of(chosen), self._fitted(chosen))
        try:
            if own is not None:
                # Without the lock, so that a batch that begins now does not wait for this copy.
                self._fill(own)
            for fill in assigned.fills:
                fill.wait_all()
        finally:
            self.release(chosen)

    def _fill_loop(self, jobs: queue.SimpleQueue[Fill | None]) -> None:
        while (fill := jobs.get()) is not None:
            self._fill(fill)

    def _fill(self, fill: Fill) -> None:
        try:
            with self._tracer.span("fill", slots=sum(len(of_pool.slots) for of_pool in fill.fresh)):
                self._fill_layers(fill)
        except BaseException as error:
            fill.fail(error)
            return
        finally:
            # The thread refers to its last fill until the next comes, which would keep dropped tenants' weights in memory.
            fill.fresh.clear()
        with self._freed:
            for slot in [slot for slot, other in self._filling.items() if other is fill]:
                del self._filling[slot]

    def _fill_layers(self, fill: Fill) -> None:
        if self._stream is None:
            for layer in range(self._num_layers):
                for of_pool in fill.fresh:
                    # One call for all slots, because each call takes the lock that computing needs.
                    self._fill_slots(self._parts_of(of_pool.pool), layer, of_pool.weights, of_pool.slots)
                fill.layer_done()
            return
        with torch.cuda.stream(self._stream):
            # Before any layer, because this copy waits for all earlier work of the stream.
            places = [torch.tensor(of_pool.slots, device=self._device) for of_pool in fill.fresh]
            staged = [place_for(of_pool.weights, self._device) for of_pool in fill.fresh]
            for first, last in pieces(self._num_layers):
                for of_pool, slots, room in zip(fill.fresh, places, staged, strict=True):
                    self._fill_slots(self._parts_of(of_pool.pool), first, last, of_pool.weights, slots, room)
                event = torch.cuda.Event()
                event.record(self._stream)
                for _ in range(first, last):
                    fill.layer_done(event)
        # Wait here, because the host memory must outlive the copies that read it.
        self._stream.synchronize()

    def _parts_of(self, pool: int) -> list[Tensor]:
        return self.parts[PARTS * pool : PARTS * (pool + 1)]

    def reference_adapt(self, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
        """Return the slow twin of the adapters in `RunLayers`: a loop over texts."""

        def adapt(place: Place, number: int, tokens: Tensor) -> Tensor:
            layer = number - self._first_layer
            if layer < 0:
                return tokens
            assigned.wait(layer)
            parts = tokens.split(list(lengths))
            return torch.cat(
                [
                    part if slot == IDENTITY else self._apply(layer, slot, part)
                    for slot, part in zip(assigned.at(place), parts, strict=True)
                ]
            )

        return adapt

    def _apply(self, layer: int, slot: int, tokens: Tensor) -> Tensor:
        pool, place = divmod(slot, self.num_slots)
        down, down_bias, up, up_bias = (part[layer, place] for part in self._parts_of(pool))
        tokens = tokens.to(self._dtype)
        reduced = torch.addmm(down_bias, tokens, down).relu_()
        return torch.addmm(up_bias, reduced, up).add_(tokens)


def choose_slots(
    wanted: int | None,
    config: BaseConfig,
    reduced_size: int,
    device: torch.device,
    dtype: torch.dtype,
    instances: int = 1,
    layers: range | None = None,
) -> int:
    """Return `wanted` slots, or by default USUAL_SLOTS, on a GPU at least.

    A GPU's default fills SLOTS_SHARE of its free memory, shared by `instances` processes. `layers` as in AdapterSlots.
    """
    if wanted is not None:
        return wanted
    rows = len(adapter_rows(config, layers))
    if device.type != "cuda" or not rows:
        return USUAL_SLOTS
    free, _ = torch.cuda.mem_get_info(device)
    widths = (packed_width(config.hidden_size, size) for size in pool_sizes(config, reduced_size))
    slot_bytes = rows * sum(widths) * dtype.itemsize
    return max(USUAL_SLOTS, int(SLOTS_SHARE * free / instances / slot_bytes))


def adapter_rows(config: BaseConfig, layers: range | None) -> range:
    """Return the rows of a base's adapters that belong to `layers`; None means all layers. There may be no row."""
    if layers is None:
        return range(config.adapted_layers)
    first_adapted = config.upper_layers - config.adapted_layers
    return range(max(0, layers.start - first_adapted), max(0, layers.stop - first_adapted))


def pool_sizes(config: BaseConfig, reduced_size: int) -> list[int]:
    """Return the bottleneck of the slots of each pool, narrow ones first."""
    usual = config.reduced_size(REDUCTION_FACTOR)
    return sorted({slot_size(min(usual, reduced_size)), slot_size(reduced_size)})


def slot_size(reduced_size: int) -> int:
    """Return the bottleneck of slots for adapters of `reduced_size`."""
    return -(-reduced_size // COLUMNS) * COLUMNS
