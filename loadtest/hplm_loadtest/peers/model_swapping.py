"""Serves more models than fit in memory: decides which model to load, which to evict, and whose requests run next.

A thread of its own loads the next model while another model computes.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hplm.runtime.thread_priority import be_nice

Item = TypeVar("Item")


@dataclass(frozen=True)
class Resident:
    """A model in memory. `oldest`: the number of its oldest waiting request, None if no request waits."""

    key: str
    oldest: int | None
    pinned: bool


def model_to_evict(residents: Sequence[Resident], wanted: int) -> str | None:
    """Return the model to evict for a model whose oldest request has the number `wanted`; None means to wait.

    residents: the models in memory, least recently used first. A model without waiting requests is evicted first. Otherwise the
    model whose oldest request came last is evicted, if that request came after `wanted`. So models in memory are preferred, but
    every request is answered in the end.
    """
    free = [resident for resident in residents if not resident.pinned]
    last = max(free, key=lambda resident: math.inf if resident.oldest is None else resident.oldest, default=None)
    if last is None or (last.oldest is not None and last.oldest < wanted):
        return None
    return last.key


class WaitingRequests(Generic[Item]):
    """The waiting requests of each model, first come, first served."""

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[int, Item]]] = {}
        self._count = 0

    def add(self, key: str, item: Item) -> None:
        self._items.setdefault(key, deque()).append((self._count, item))
        self._count += 1

    def take(self, key: str, max_items: int) -> list[Item]:
        """Remove and return the oldest requests of a model, at most `max_items`."""
        queue = self._items[key]
        items = [queue.popleft()[1] for _ in range(min(max_items, len(queue)))]
        if not queue:
            del self._items[key]
        return items

    def oldest(self, key: str) -> int | None:
        """Return the number of a model's oldest request, None if no request waits."""
        return self._items[key][0][0] if key in self._items else None

    def first(self, accept: Callable[[str], bool]) -> str | None:
        """Return the accepted model whose oldest request has waited longest, None if there is none."""
        accepted = [(queue[0][0], key) for key, queue in self._items.items() if accept(key)]
        return min(accepted)[1] if accepted else None


@dataclass
class _Place:
    """A place in memory with a model. The model stays while it is `fresh`, before its first batch, and while a batch runs."""

    number: int
    ready: bool = False
    fresh: bool = True
    running: bool = False

    @property
    def pinned(self) -> bool:
        return self.fresh or self.running


class SwapWorker(Generic[Item]):
    """Two threads that serve many models with `num_places` places in memory.

    load(place, key): loads a model into a place. run(place, items): answers requests of the place's model. fail(items, error):
    answers requests if `load` or `run` raised. Calls for one place never overlap.
    """

    def __init__(
        self,
        num_places: int,
        load: Callable[[int, str], None],
        run: Callable[[int, list[Item]], None],
        fail: Callable[[list[Item], Exception], None],
        *,
        batch_requests: int,
        nice: int = 0,
    ) -> None:
        self._load, self._run, self._fail = load, run, fail
        self._batch_requests = batch_requests
        self._nice = nice
        self._changed = threading.Condition()
        self._waiting: WaitingRequests[Item] = WaitingRequests()
        self._free = list(range(num_places))[::-1]
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run_thread, args=(target,), name=f"peer-{name}", daemon=True)
            for name, target in (("load", self._load_loop), ("compute", self._compute_loop))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, waiting: Sequence[tuple[str, Item]]) -> None:
        """Queue requests `(model, item)`."""
        with self._changed:
            for key, item in waiting:
                self._waiting.add(key, item)
            self._changed.notify_all()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the running batch. Waiting requests get no answer."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run_thread(self, target: Callable[[], None]) -> None:
        if self._nice:
            be_nice(self._nice, threading.current_thread().name)
        target()

    def _load_loop(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (key := self._take_place()) is None:
                    self._changed.wait()
                if self._stopping:
                    return
                assert key is not None
                place = self._places[key]
            try:
                self._load(place.number, key)
            except Exception as error:
                self._drop(key, error)
                continue
            with self._changed:
                place.ready = True
                self._changed.notify_all()

    def _take_place(self) -> str | None:
        """Give a place to the absent model that has waited longest, and return the model; None if no place is free."""
        key = self._waiting.first(lambda key: key not in self._places)
        if key is None:
            return None
        if not self._free:
            wanted = self._waiting.oldest(key)
            assert wanted is not None
            residents = [Resident(k, self._waiting.oldest(k), place.pinned) for k, place in self._places.items()]
            evicted = model_to_evict(residents, wanted)
            if evicted is None:
                return None
            self._free.append(self._places.pop(evicted).number)
        self._places[key] = _Place(self._free.pop())
        return key

    def _drop(self, key: str, error: Exception) -> None:
        with self._changed:
            self._free.append(self._places.pop(key).number)
            items = self._waiting.take(key, 1 << 30)
        self._fail(items, error)

    def _compute_loop(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (key := self._waiting.first(self._is_ready)) is None:
                    self._changed.wait()
                if self._stopping:
                    return
                assert key is not None
                place = self._places[key]
                place.running, place.fresh = True, False
                self._places.move_to_end(key)
                items = self._waiting.take(key, self._batch_requests)
            try:
                self._run(place.number, items)
            except Exception as error:
                self._fail(items, error)
            with self._changed:
                place.running = False
                self._changed.notify_all()

    def _is_ready(self, key: str) -> bool:
        return key in self._places and self._places[key].ready
