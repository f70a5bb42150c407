"""Adapters in device memory: slots that are filled while the device computes, and one computation for all tenants."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hplm.adapters.packed import widen
from hplm.adapters.slots import IDENTITY, SlotTable
from hplm.adapters.tenant import Tenant
from hplm.config import BaseConfig
from hplm.nn.encoder import Adapt
from hplm.tracing import Tracer

# Tokens of one tenant that go through one product of the batched form: more are cut, fewer filled up.
CHUNK_TOKENS = 32
# From this many tokens of a tenant on, a product of its own is faster than chunks (`hplm bench adapters`).
OWN_PRODUCT_TOKENS = 64


class Fill:
    """Copying adapters into slots, layer by layer; whoever computes waits for the layer it is at."""

    def __init__(self, slots: list[int], weights: list[Tensor], num_layers: int) -> None:
        self.slots = slots
        self.weights = weights
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

    def wait(self, layer: int) -> None:
        """Until `layer` is in its slots; on CUDA, until the stream of this thread will see it so."""
        with self._changed:
            while self._done <= layer and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
        if self.events:
            torch.cuda.current_stream().wait_event(self.events[layer])

    def wait_all(self) -> None:
        self.wait(self._num_layers - 1)


@dataclass(frozen=True)
class AssignedSlots:
    """A batch's slots, one a request, pinned until released; `fills` are those still under way when it was assigned."""

    slots: tuple[int, ...]
    fills: tuple[Fill, ...]

    def wait(self, layer: int) -> None:
        for fill in self.fills:
            fill.wait(layer)


class AdapterSlots:
    """`parts`, of L layers and S slots: down `[L, S, H, r]`, its bias, up `[L, S, r, H]`, its bias; slot 0 is the identity.

    A slot goes by tenant and version. It is not overwritten while a batch has it pinned. With `fine_prefetch` a thread
    fills slots layer by layer while the caller computes (HMI 6.2), on a stream of its own where there is CUDA; without
    it `assign` returns when they are full. Safe to use from several threads.
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
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer(None, "")
        self.reduced_size = reduced_size
        self._num_layers = config.upper_layers
        self._device = device
        self.table = SlotTable(num_slots)
        self._dtype = dtype
        hidden = config.hidden_size
        # One tensor a part, all slots of a layer together: what a batch needs is gathered from each in one copy, and
        # batched products of anything less regular take twice as long.
        shapes = ((hidden, reduced_size), (reduced_size,), (reduced_size, hidden), (hidden,))
        self.parts = [
            torch.zeros(config.upper_layers, num_slots, *shape, device=device, dtype=dtype) for shape in shapes
        ]
        self.loads = 0
        self.waits = 0
        self._freed = threading.Condition()
        self._filling: dict[int, Fill] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Fill | None] | None = None
        if fine_prefetch:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._fill_loop, args=(self._jobs,), name="hplm-swap", daemon=True)
            self._thread.start()

    @property
    def device_bytes(self) -> int:
        """All that adapters take on the device, however many tenants there are."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def close(self) -> None:
        """End the filling thread."""
        if self._jobs is not None:
            self._jobs.put(None)
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
        slots: list[int] = []
        fresh: dict[int, Tensor] = {}
        packed = {tenant.key: widen(tenant.packed, self.reduced_size) for tenant in tenants}
        with self._freed:
            # All at once: two that each waited with a part pinned would wait for each other.
            while sum(not self.table.is_pinned(key) for key in packed) > self.table.num_unpinned:
                assert len(packed) < self.table.num_slots
                self.waits += 1
                self._freed.wait()
            for tenant in tenants:
                slot, is_new = self.table.assign(tenant.key)
                slots.append(slot)
                if is_new:
                    fresh[slot] = torch.from_numpy(packed[tenant.key].weights)
            fill = None
            if fresh:
                weights = [w.view(torch.bfloat16) if w.dtype == torch.uint16 else w for w in fresh.values()]
                fill = Fill(list(fresh), weights, self._num_layers)
                self._filling.update(dict.fromkeys(fresh, fill))
                self.loads += len(fresh)
            fills = tuple({id(f): f for slot in slots if (f := self._filling.get(slot))}.values())
            if fill is not None and self._jobs is not None:
                self._jobs.put(fill)
        if fill is not None and self._jobs is None:
            self._fill(fill)
        return AssignedSlots(tuple(slots), fills)

    def release(self, tenants: Sequence[Tenant]) -> None:
        """Undo one `assign`; the weights stay until the slot is needed, but a slot whose filling failed is forgotten."""
        with self._freed:
            for tenant in tenants:
                self.table.release(tenant.key)
            for tenant in tenants:
                slot = self.table.find(tenant.key)
                fill = self._filling.get(slot) if slot is not None else None
                if fill is not None and fill.failed and not self.table.is_pinned(tenant.key):
                    self.table.forget(tenant.key)
            self._freed.notify_all()

    def prefetch(self, tenants: Sequence[Tenant]) -> None:
        """Coarse prefetch: fill slots for a batch to come, as far as slots are unpinned now, and return when it is done."""
        taken: list[Tenant] = []
        with self._freed:
            for tenant in tenants:
                if self.table.find(tenant.key) is None and self.table.can_assign(tenant.key):
                    taken.append(tenant)
                    # Assigned one by one below; the count of unpinned slots bounds how many.
                    if len(taken) >= self.table.num_unpinned:
                        break
        for tenant in taken:
            with self._freed:
                if not self.table.can_assign(tenant.key):
                    return
            with self.assigned([tenant]) as slots:
                for fill in slots.fills:
                    fill.wait_all()

    def _fill_loop(self, jobs: queue.SimpleQueue[Fill | None]) -> None:
        while (fill := jobs.get()) is not None:
            self._fill(fill)

    def _fill(self, fill: Fill) -> None:
        try:
            with self._tracer.span("fill", slots=len(fill.slots)):
                self._fill_layers(fill)
        except Exception as error:
            fill.fail(error)
            return
        with self._freed:
            for slot in fill.slots:
                if self._filling.get(slot) is fill:
                    del self._filling[slot]

    def _fill_layers(self, fill: Fill) -> None:
        for layer in range(self._num_layers):
            if self._stream is None:
                self._copy_layer(fill, layer)
                fill.layer_done()
            else:
                with torch.cuda.stream(self._stream):
                    self._copy_layer(fill, layer)
                    event = torch.cuda.Event()
                    event.record(self._stream)
                fill.layer_done(event)
        if self._stream is not None:
            # The host memory must outlive the copies that read it.
            self._stream.synchronize()

    def _copy_layer(self, fill: Fill, layer: int) -> None:
        sizes = [part[0, 0].numel() for part in self.parts]
        for slot, weights in zip(fill.slots, fill.weights, strict=True):
            for part, source in zip(self.parts, weights[layer].split(sizes), strict=True):
                part[layer, slot].copy_(source.view_as(part[layer, slot]), non_blocking=True)

    def batched(self, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
        """The adapters of a batch whose texts use `assigned`, texts one after another: all tenants in few products a layer.

        Tokens are brought together by slot. Those of a slot with many have a product of their own; the others are cut
        into chunks of `CHUNK_TOKENS`, which go through one batched product with their slots' weights (HMI's baddbmm).
        `reference_adapt` is the loop it stands for.
        """
        plan = _Plan.of(assigned.slots, lengths, self._device)

        def adapt(layer: int, attended: Tensor) -> Tensor:
            assigned.wait(layer)
            attended = attended.to(self._dtype)
            parts = [
                attended.index_select(0, places)
                if slot == IDENTITY
                else self._apply(layer, slot, attended.index_select(0, places))
                for slot, places in plan.own
            ]
            if plan.chunks is not None:
                parts.append(self._apply_chunks(layer, plan.chunks, attended))
            return torch.cat(parts).index_select(0, plan.back) if plan.back is not None else torch.cat(parts)

        def adapt_alone(slot: int, layer: int, attended: Tensor) -> Tensor:
            assigned.wait(layer)
            return attended if slot == IDENTITY else self._apply(layer, slot, attended)

        return adapt if plan.alone is None else partial(adapt_alone, plan.alone)

    def reference_adapt(self, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
        """The slow twin of `batched`: a loop over tenants."""

        def adapt(layer: int, attended: Tensor) -> Tensor:
            assigned.wait(layer)
            parts = attended.split(list(lengths))
            return torch.cat(
                [
                    part if slot == IDENTITY else self._apply(layer, slot, part)
                    for slot, part in zip(assigned.slots, parts, strict=True)
                ]
            )

        return adapt

    def _apply(self, layer: int, slot: int, attended: Tensor) -> Tensor:
        down, down_bias, up, up_bias = (part[layer, slot] for part in self.parts)
        attended = attended.to(self._dtype)
        reduced = torch.addmm(down_bias, attended, down).relu_()
        return torch.addmm(up_bias, reduced, up).add_(attended)

    def _apply_chunks(self, layer: int, chunks: _Chunks, attended: Tensor) -> Tensor:
        down, down_bias, up, up_bias = (part[layer].index_select(0, chunks.slots) for part in self.parts)
        padded = attended.index_select(0, chunks.gather).unflatten(0, (len(chunks.slots), -1))
        reduced = torch.baddbmm(down_bias[:, None], padded, down).relu_()
        adapted = torch.baddbmm(up_bias[:, None], reduced, up).add_(padded).flatten(0, 1)
        return adapted if chunks.real is None else adapted.index_select(0, chunks.real)


@dataclass(frozen=True)
class _Chunks:
    """Which token goes to which place of `[chunks, width]`; fillers repeat one. `real`: the places of tokens, None if all."""

    slots: Tensor
    gather: Tensor
    real: Tensor | None

    @staticmethod
    def of(places: Sequence[tuple[int, list[int]]], device: torch.device) -> _Chunks:
        width = min(CHUNK_TOKENS, max(len(own) for _, own in places))
        slots: list[int] = []
        gather: list[int] = []
        real: list[int] = []
        for slot, own in places:
            for first in range(0, len(own), width):
                part = own[first : first + width]
                real += range(len(gather), len(gather) + len(part))
                gather += part + part[-1:] * (width - len(part))
                slots.append(slot)
        kept = None if len(real) == len(gather) else torch.tensor(real, device=device)
        return _Chunks(torch.tensor(slots, device=device), torch.tensor(gather, device=device), kept)


@dataclass(frozen=True)
class _Plan:
    """Tokens by slot: `own` with a product each, `chunks` together; `back` undoes the order. Or one slot `alone` for all."""

    alone: int | None
    own: tuple[tuple[int, Tensor], ...]
    chunks: _Chunks | None
    back: Tensor | None

    @staticmethod
    def of(slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> _Plan:
        if len(set(slots)) == 1:
            return _Plan(slots[0], (), None, None)
        places: dict[int, list[int]] = {}
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            places.setdefault(slot, []).extend(range(start, start + length))
            start += length
        own = [(s, p) for s, p in places.items() if len(p) >= OWN_PRODUCT_TOKENS or s == IDENTITY]
        short = [(s, p) for s, p in places.items() if len(p) < OWN_PRODUCT_TOKENS and s != IDENTITY]
        order = torch.tensor([place for _, part in (*own, *short) for place in part])
        back = None if bool((order[1:] > order[:-1]).all()) else order.argsort().to(device)
        return _Plan(
            None,
            tuple((slot, torch.tensor(part, device=device)) for slot, part in own),
            _Chunks.of(short, device) if short else None,
            back,
        )
