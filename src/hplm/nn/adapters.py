"""Adapters in device memory: slots that are filled while the device computes, and one computation for all tenants."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.adapters.packed import packed_width, widen
from hplm.adapters.slots import IDENTITY, SlotTable
from hplm.adapters.tenant import Tenant
from hplm.config import BaseConfig
from hplm.nn.encoder import Adapt
from hplm.tracing import Tracer

# Tokens of one tenant that go through one product of the batched form: longer runs are cut, shorter ones filled up.
CHUNK_TOKENS = 32
# From this many tokens on, a product of a tenant's own is as fast as a batched one (`hplm bench adapters`).
OWN_PRODUCT_TOKENS = 128


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
    """Weights of S slots, L layers: `[S, L, P]` (see `hplm.adapters.packed`); slot 0 stays zero, the identity.

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
        self._hidden = config.hidden_size
        self._num_layers = config.upper_layers
        self._device = device
        self.table = SlotTable(num_slots)
        width = packed_width(config.hidden_size, reduced_size)
        self.weights = torch.zeros(num_slots, config.upper_layers, width, device=device, dtype=dtype)
        self.loads = 0
        self.waits = 0
        self._freed = threading.Condition()
        self._filling: dict[int, Fill] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Fill | None] | None = None
        if fine_prefetch:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=self._fill_loop, args=(self._jobs,), name="hplm-swap", daemon=True).start()

    @property
    def device_bytes(self) -> int:
        """All that adapters take on the device, however many tenants there are."""
        return self.weights.numel() * self.weights.element_size()

    def close(self) -> None:
        """End the filling thread."""
        if self._jobs is not None:
            self._jobs.put(None)

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
                for slot, weights in zip(fill.slots, fill.weights, strict=True):
                    self.weights[slot, layer].copy_(weights[layer])
                fill.layer_done()
            else:
                with torch.cuda.stream(self._stream):
                    for slot, weights in zip(fill.slots, fill.weights, strict=True):
                        self.weights[slot, layer].copy_(weights[layer], non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(self._stream)
                fill.layer_done(event)
        if self._stream is not None:
            # The host memory must outlive the copies that read it.
            self._stream.synchronize()

    def batched(self, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
        """The adapters of a packed batch whose texts use `assigned`: all tenants in two products a layer.

        Runs of one slot are cut into chunks of `CHUNK_TOKENS`, which go through one batched product (HMI's baddbmm) with
        their slots' weights; a long run has a product of its own. See `reference_adapt` for the loop it stands for.
        """
        runs = _runs(assigned.slots, lengths)
        total = sum(length for _, length in runs)
        long = [(start, slot, length) for start, slot, length in _starts(runs) if length >= OWN_PRODUCT_TOKENS]
        short = [(start, slot, length) for start, slot, length in _starts(runs) if length < OWN_PRODUCT_TOKENS]
        plan = _ChunkPlan.of([run for run in short if run[1] != IDENTITY], total, self._device)

        def adapt(layer: int, attended: Tensor) -> Tensor:
            assigned.wait(layer)
            result = attended
            if plan is not None:
                result = self._apply_chunks(layer, plan, attended)
            if any(slot != IDENTITY for _, slot, _ in long):
                result = attended.clone() if plan is None else result
                for start, slot, length in long:
                    if slot != IDENTITY:
                        result[start : start + length] = self._apply(layer, slot, attended[start : start + length])
            return result

        return adapt

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

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """down `[G, r, H]`, its bias, up `[G, H, r]`, its bias, of packed rows `[G, P]`."""
        hidden, reduced = self._hidden, self.reduced_size
        down, down_bias, up, up_bias = rows.split([hidden * reduced, reduced, hidden * reduced, hidden], dim=1)
        return down.unflatten(1, (reduced, hidden)), down_bias, up.unflatten(1, (hidden, reduced)), up_bias

    def _apply(self, layer: int, slot: int, attended: Tensor) -> Tensor:
        down, down_bias, up, up_bias = (part[0] for part in self.views(self.weights[slot : slot + 1, layer]))
        attended = attended.to(self.weights.dtype)
        return attended + F.linear(F.relu(F.linear(attended, down, down_bias)), up, up_bias)

    def _apply_chunks(self, layer: int, plan: _ChunkPlan, attended: Tensor) -> Tensor:
        down, down_bias, up, up_bias = self.views(self.weights[:, layer].index_select(0, plan.slots))
        padded = attended.to(self.weights.dtype).index_select(0, plan.gather).unflatten(0, (len(plan.slots), -1))
        reduced = torch.baddbmm(down_bias[:, None], padded, down.transpose(1, 2)).relu_()
        adapted = torch.baddbmm(up_bias[:, None], reduced, up.transpose(1, 2)).add_(padded).flatten(0, 1)
        if plan.covers_all:
            return adapted.index_select(0, plan.real)
        return attended.to(adapted.dtype).index_copy(0, plan.targets, adapted.index_select(0, plan.real))


@dataclass(frozen=True)
class _ChunkPlan:
    """Which token goes to which place of `[chunks, CHUNK_TOKENS]`, and back.

    `gather` has a token for every place (fillers repeat one), `real` the places that hold a token, `targets` those tokens.
    """

    slots: Tensor
    gather: Tensor
    real: Tensor
    targets: Tensor
    covers_all: bool

    @staticmethod
    def of(runs: Sequence[tuple[int, int, int]], total: int, device: torch.device) -> _ChunkPlan | None:
        if not runs:
            return None
        width = min(CHUNK_TOKENS, max(length for _, _, length in runs))
        slots: list[int] = []
        starts: list[int] = []
        sizes: list[int] = []
        for start, slot, length in runs:
            for first in range(0, length, width):
                slots.append(slot)
                starts.append(start + first)
                sizes.append(min(width, length - first))
        steps = torch.arange(width)
        size = torch.tensor(sizes)[:, None]
        places = torch.tensor(starts)[:, None] + torch.minimum(steps, size - 1)
        real = (steps < size).flatten().nonzero().squeeze(1)
        targets = places.flatten()[real]
        covers_all = len(targets) == total
        return _ChunkPlan(
            slots=torch.tensor(slots).to(device),
            gather=places.flatten().to(device),
            real=real.to(device),
            targets=targets.to(device),
            covers_all=covers_all,
        )


def _runs(slots: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of one slot as one run: `(slot, tokens)`."""
    runs: list[tuple[int, int]] = []
    for slot, length in zip(slots, lengths, strict=True):
        if runs and runs[-1][0] == slot:
            runs[-1] = (slot, runs[-1][1] + length)
        else:
            runs.append((slot, length))
    return runs


def _starts(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """`(start, slot, tokens)` of each run."""
    start = 0
    for slot, length in runs:
        yield start, slot, length
        start += length
