"""Serving more models than fit in memory: which is swapped in, which goes, whose requests run next.

The next model is loaded in a thread of its own while one computes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hplm.runtime.thread_priority import be_nice

Item = TypeVar("Item")


@dataclass(frozen=True)
class Resident:
    """A model in memory as the policy sees it. `oldest`: the number of its oldest waiting request, None without one."""

    key: str
    oldest: int | None
    pinned: bool


def victim(residents: Sequence[Resident], wanted: int) -> str | None:
    """Which model makes room for one whose oldest request has the number `wanted`; `residents` least recently used first.

    Models nobody waits for go first. Else the one whose oldest request came last goes, where it came after `wanted`: so
    resident models are preferred, but no request is passed over for ever. None: wait.
    """
    free = [resident for resident in residents if not resident.pinned]
    for resident in free:
        if resident.oldest is None:
            return resident.key
    waited = [(resident.oldest, resident.key) for resident in free if resident.oldest is not None]
    if not waited:
        return None
    oldest, key = max(waited)
    return key if oldest > wanted else None


class Waiting(Generic[Item]):
    """Waiting requests by model, first come, first served within each."""

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[int, Item]]] = {}
        self._count = 0

    def add(self, key: str, item: Item) -> None:
        self._items.setdefault(key, deque()).append((self._count, item))
        self._count += 1

    def take(self, key: str, most: int) -> list[Item]:
        """The oldest `most` requests of a model."""
        line = self._items[key]
        taken = [line.popleft()[1] for _ in range(min(most, len(line)))]
        if not line:
            del self._items[key]
        return taken

    def oldest(self, key: str) -> int | None:
        """The number of a model's oldest request."""
        return self._items[key][0][0] if key in self._items else None

    def first(self, accept: Callable[[str], bool]) -> str | None:
        """Of the models that are accepted, the one that has waited longest."""
        found = [(line[0][0], key) for key, line in self._items.items() if accept(key)]
        return min(found)[1] if found else None


@dataclass
class _Place:
    """A model's place: `fresh` until its first batch begins, `running` while one does; either pins the model to it."""

    number: int
    ready: bool = False
    fresh: bool = True
    running: bool = False

    @property
    def pinned(self) -> bool:
        return self.fresh or self.running


class SwapWorker(Generic[Item]):
    """`num_places` models at once. `load(place, key)` fills a place; `run(place, items)` answers requests of its model.

    `fail(items, error)` answers where either raised. Neither is called twice at once for one place.
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
        self._waiting: Waiting[Item] = Waiting()
        self._free = list(range(num_places))[::-1]
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._prefer, args=(name, target), name=f"peer-{name}", daemon=True)
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
        """What runs is finished; what waits is not answered."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _prefer(self, name: str, target: Callable[[], None]) -> None:
        if self._nice:
            be_nice(self._nice, f"peer-{name}")
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
        """Give the longest waiting absent model a place, if one can be had now."""
        key = self._waiting.first(lambda key: key not in self._places)
        if key is None:
            return None
        if not self._free:
            wanted = self._waiting.oldest(key)
            assert wanted is not None
            residents = [Resident(k, self._waiting.oldest(k), place.pinned) for k, place in self._places.items()]
            leaves = victim(residents, wanted)
            if leaves is None:
                return None
            self._free.append(self._places.pop(leaves).number)
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
