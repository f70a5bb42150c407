"""Adapters in device memory: slots that are filled while the device computes (HMI 5.2, 6.2)."""

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

# Bottlenecks are multiples of this: in narrow products of other widths MKL rounds a token by its place, on AMD's processors.
COLUMNS = 8
# Tensors of a pool of slots.
PARTS = 4
# Where nobody says how many; on a GPU the least.
USUAL_SLOTS = 64
# Of a GPU's free memory, for the slots of all processes of a stage together.
SLOTS_SHARE = 0.1


@dataclass(frozen=True)
class FreshSlots:
    """Slots of one pool and what is to come into each: `weights[i]` `[L, P]`, as PackedAdapter has them."""

    pool: int
    slots: list[int]
    weights: list[Tensor]


class Fill:
    """Copying a batch's adapters into slots, layer by layer; whoever computes waits for the layer it is at."""

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
        """Until `layer` is in its slots; on CUDA, until the stream of this thread will see it so."""
        self._wait_for(layer)
        if self.events:
            torch.cuda.current_stream(self._device).wait_event(self.events[layer])

    def wait_all(self) -> None:
        """Until all layers are in their slots; on CUDA this thread waits, not its stream, which is the one that computes."""
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
    """A batch's slots, one a request, pinned until released; `fills` are those still under way when it was assigned.

    `places`: where in a layer each request's adapter stands.
    """

    slots: tuple[int, ...]
    places: tuple[Place, ...]
    fills: tuple[Fill, ...]

    def wait(self, layer: int) -> None:
        """Until `layer` is in all of them."""
        for fill in self.fills:
            fill.wait(layer)

    def at(self, place: Place) -> list[int]:
        """The slots again, but the identity for requests whose adapter stands elsewhere."""
        return [slot if stands == place else IDENTITY for slot, stands in zip(self.slots, self.places, strict=True)]

    @property
    def filled(self) -> bool:
        """Whether all layers are in all of them."""
        return all(fill.done for fill in self.fills)


class AdapterSlots:
    """Slots for adapters of each width there may be, a pool of `num_slots` each: the usual width, and where that is more,
    `reduced_size`. So the usual ones cost no more where there are wide ones beside them.

    `parts`, of each pool four, of L layers and S slots: down `[L, S, H, r]`, its bias, up `[L, S, r, H]`, its bias. r are the
    `sizes`: as asked for, or so much larger that a token's neighbours do not change its bits. Slot s of pool p is called
    p * S + s; slot 0 is the identity.
    A slot goes by tenant and version. It is not overwritten while a batch has it pinned. With `fine_prefetch` a thread
    fills slots layer by layer while the caller computes (HMI 6.2), where there is CUDA on a stream of its own, the first layer
    and then all others (see `pieces`); without it whoever finds them empty fills them: `assign` those of its batch, `prefetch`
    those of one to come. Safe to use from several threads.
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
        tracer: Tracer | None = None,
    ) -> None:
        """`keep_bfloat16`: no finer format is asked for, so that is how adapters are `fitted`."""
        self._tracer = tracer or Tracer(None, "")
        self._keeps_bfloat16 = keep_bfloat16
        hidden = config.hidden_size
        self.sizes = pool_sizes(config, reduced_size)
        self.num_slots = num_slots
        self._num_layers = config.upper_layers
        self._device = device
        self.tables = [SlotTable(num_slots) for _ in self.sizes]
        self._dtype = dtype
        # One tensor a part, all slots of a layer together: what a batch needs is gathered from each in one copy, and
        # batched products of anything less regular take twice as long. On a CPU, slots that nobody needs are never touched.
        self.parts = [
            torch.empty(config.upper_layers, num_slots, *shape, device=device, dtype=dtype)
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
        """What slots take on the device, however many tenants there are; a GPU has the tenants of a fill twice meanwhile."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def fitted(self, packed: PackedAdapter) -> PackedAdapter:
        """As wide as the slots that it goes to, and no finer than asked for. Raises ConfigError where it is wider than any."""
        packed = widen(packed, self.sizes[self._pool_of(packed)])
        if not self._keeps_bfloat16 or packed.weights.dtype == np.uint16:
            return packed
        return replace(packed, weights=torch.from_numpy(packed.weights).bfloat16().view(torch.uint16).numpy())

    def staged(self, packed: PackedAdapter) -> PackedAdapter:
        """The same weights where slots are filled from fastest: pinned memory where there is CUDA, else where they are."""
        if self._stream is None:
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
        """The slot that holds a tenant, or None."""
        pool = self._pool_of(tenant.packed)
        slot = self.tables[pool].find(tenant.key)
        return None if slot is None else pool * self.num_slots + slot

    def close(self) -> None:
        """End the filling thread; a batch that outlasts it fills its slots itself."""
        with self._freed:
            jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.put(None)
            self._thread.join()

    @contextmanager
    def assigned(self, tenants: Sequence[Tenant]) -> Iterator[AssignedSlots]:
        """Pin a slot for the tenant of each request, and see that its adapter is on its way there."""
        found = self.assign(tenants)
        try:
            yield found
        finally:
            self.release(tenants)

    def assign(self, tenants: Sequence[Tenant]) -> AssignedSlots:
        """Pair with `release`. At most `num_slots - 1` distinct tenants; waits while others have too many slots pinned.

        Raises ConfigError where an adapter is larger than the slots; nothing is pinned then.
        """
        wanted = self._pools_of(tenants)
        with self._freed:
            missing = {tenant.key: tenant for tenant in tenants if self.find(tenant) is None}
        # Without the lock, for where they were not fitted before they come this takes as long as a layer.
        packed = self._fitted(missing.values())
        with self._freed:
            # All at once: two that each waited with a part pinned would wait for each other.
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
        """Of the narrowest slots that hold it, else of the widest."""
        return 0 if packed.reduced_size <= self.sizes[0] else len(self.sizes) - 1

    def _pools_of(self, tenants: Sequence[Tenant]) -> dict[str, int]:
        """Each tenant's pool, once."""
        return {tenant.key: self._pool_of(tenant.packed) for tenant in tenants}

    def _fitted(self, tenants: Iterable[Tenant]) -> dict[str, PackedAdapter]:
        return {tenant.key: self.fitted(tenant.packed) for tenant in tenants}

    def _has_room(self, wanted: Mapping[str, int]) -> bool:
        """Whether all of `wanted`, keys with their pools, can be pinned now."""
        missing = [0] * len(self.tables)
        for key, pool in wanted.items():
            missing[pool] += not self.tables[pool].is_pinned(key)
        # More than there are would wait for ever.
        assert max(missing) < self.num_slots
        return all(count <= table.num_unpinned for count, table in zip(missing, self.tables, strict=True))

    def _pin(
        self, tenants: Sequence[Tenant], wanted: Mapping[str, int], packed: Mapping[str, PackedAdapter]
    ) -> tuple[AssignedSlots, Fill | None]:
        """Under the lock, with as many slots unpinned as it takes; and what the caller is to fill where no thread does.

        `packed` lacks those that had a slot a moment ago.
        """
        slots: list[int] = []
        fresh = [FreshSlots(pool, [], []) for pool in range(len(self.tables))]
        for key, pool in wanted.items():
            # Whoever has a slot must not lose it to another of the same batch.
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
        if fresh := [one for one in fresh if one.slots]:
            # One for all pools, so that layers are there in the order in which they are computed.
            fill = Fill(fresh, self._num_layers, self._device)
            for one in fresh:
                self._filling.update((one.pool * self.num_slots + slot, fill) for slot in one.slots)
                self.loads += len(one.slots)
            if self._jobs is not None:
                self._jobs.put(fill)
            else:
                own = fill
        fills = tuple({id(f): f for slot in slots if (f := self._filling.get(slot))}.values())
        return AssignedSlots(tuple(slots), tuple(tenant.card.adapter_at for tenant in tenants), fills), own

    def release(self, tenants: Sequence[Tenant]) -> None:
        """Undo one `assign`; the weights stay until the slot is needed, but a slot whose filling failed is forgotten."""
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
        """Coarse prefetch: fill slots for a batch to come, as far as slots are unpinned now, and return when it is done.

        Does nothing while a batch waits for slots: what comes later must not keep them from what comes now.
        """
        wanted = self._pools_of(tenants)
        with self._freed:
            if self._batches_waiting:
                return
            taken: list[Tenant] = []
            missing = {tenant.key: tenant for tenant in tenants if self.find(tenant) is None}
            for pool, table in enumerate(self.tables):
                of_pool = [key for key, own in wanted.items() if own == pool]
                resident = sum(key not in missing and not table.is_pinned(key) for key in of_pool)
                # What is there already and wanted next is not pushed out for what is not.
                room = max(0, table.num_unpinned - resident)
                taken += [missing[key] for key in of_pool if key in missing][:room]
                for key in of_pool:
                    table.touch(key)
            assigned, own = self._pin(taken, self._pools_of(taken), self._fitted(taken))
        try:
            if own is not None:
                # Without the lock: a batch that begins now need not wait for what is copied for the next.
                self._fill(own)
            for fill in assigned.fills:
                fill.wait_all()
        finally:
            self.release(taken)

    def _fill_loop(self, jobs: queue.SimpleQueue[Fill | None]) -> None:
        while (fill := jobs.get()) is not None:
            self._fill(fill)

    def _fill(self, fill: Fill) -> None:
        try:
            with self._tracer.span("fill", slots=sum(len(one.slots) for one in fill.fresh)):
                self._fill_layers(fill)
        except BaseException as error:
            fill.fail(error)
            return
        finally:
            # The thread holds its last fill until the next one: weights of tenants long gone would stay in memory.
            fill.fresh.clear()
        with self._freed:
            for slot in [slot for slot, other in self._filling.items() if other is fill]:
                del self._filling[slot]

    def _fill_layers(self, fill: Fill) -> None:
        if self._stream is None:
            for layer in range(self._num_layers):
                for one in fill.fresh:
                    # All slots in one call: each call takes the lock that computing needs.
                    self._fill_slots(self._parts_of(one.pool), layer, one.weights, one.slots)
                fill.layer_done()
            return
        with torch.cuda.stream(self._stream):
            # Before any layer: this copy waits for all that the stream has been given.
            places = [torch.tensor(one.slots, device=self._device) for one in fill.fresh]
            staged = [place_for(one.weights, self._device) for one in fill.fresh]
            for first, last in pieces(self._num_layers):
                for one, there, room in zip(fill.fresh, places, staged, strict=True):
                    self._fill_slots(self._parts_of(one.pool), first, last, one.weights, there, room)
                event = torch.cuda.Event()
                event.record(self._stream)
                for _ in range(first, last):
                    fill.layer_done(event)
        # The host memory must outlive the copies that read it.
        self._stream.synchronize()

    def _parts_of(self, pool: int) -> list[Tensor]:
        return self.parts[PARTS * pool : PARTS * (pool + 1)]

    def reference_adapt(self, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
        """The slow twin of what `RunLayers` does with its plans: a loop over texts."""

        def adapt(place: Place, layer: int, given: Tensor) -> Tensor:
            assigned.wait(layer)
            parts = given.split(list(lengths))
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
) -> int:
    """`wanted`, else USUAL_SLOTS; on a GPU as many as SLOTS_SHARE of its free memory holds, shared by `instances` processes."""
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return USUAL_SLOTS
    free, _ = torch.cuda.mem_get_info(device)
    widths = (packed_width(config.hidden_size, size) for size in pool_sizes(config, reduced_size))
    slot_bytes = config.upper_layers * sum(widths) * dtype.itemsize
    return max(USUAL_SLOTS, int(SLOTS_SHARE * free / instances / slot_bytes))


def pool_sizes(config: BaseConfig, reduced_size: int) -> list[int]:
    """Bottlenecks of the slots of each pool, narrow ones first."""
    usual = config.reduced_size(REDUCTION_FACTOR)
    return sorted({slot_size(min(usual, reduced_size)), slot_size(reduced_size)})


def slot_size(reduced_size: int) -> int:
    """The bottleneck of slots for adapters of `reduced_size`."""
    return -(-reduced_size // COLUMNS) * COLUMNS
