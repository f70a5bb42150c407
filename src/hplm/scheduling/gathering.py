"""When texts of several requests go to a base's model in one call, and which texts those are."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hplm.scheduling.batch_pacing import Rate


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """The limits of a call: the numbers of its `texts` and of their bytes, and the range of their deadlines.

    The longest remaining time of a call's texts is at most `deadline_ratio` times the shortest, so that one timeout serves
    all texts. A text that is larger than `size_bytes` goes alone.
    """

    texts: int = 64
    size_bytes: int = 1 << 20
    deadline_ratio: float = 1.25


@dataclass(frozen=True, slots=True)
class GatheredText:
    """A text or pair that waits for a call. Times are of one clock; `due_s` is infinite without a deadline.

    Texts of one call have the same `form`: the number of texts, and the inputs and outputs of the call. A text that `is_alone`
    has a call of its own.
    """

    id: int
    tenant: str
    form: tuple[int, ...]
    size_bytes: int
    arrived_s: float
    due_s: float
    is_alone: bool = False


class Call(NamedTuple):
    """The texts of the next call, and the texts that were met on the way whose deadline has passed."""

    texts: tuple[GatheredText, ...]
    late: tuple[GatheredText, ...]


class CallFiller:
    """Fills one call with texts, which are shown in their order. The first text in time decides which texts fit."""

    def __init__(self, limits: GatherLimits, now_s: float) -> None:
        self._limits = limits
        self._now_s = now_s
        self._size_bytes = 0
        self._shortest_s = self._longest_s = 0.0
        self.texts: list[GatheredText] = []
        self.late: list[GatheredText] = []

    @property
    def is_full(self) -> bool:
        """Whether no further text can be in the call."""
        return len(self.texts) == self._limits.texts or bool(self.texts and self.texts[0].is_alone)

    def show(self, text: GatheredText) -> bool:
        """Take a text into the call, or among the late texts. Return False if it has to wait for another call."""
        left_s = text.due_s - self._now_s
        if left_s <= 0:
            self.late.append(text)
            return True
        if not self.texts:
            self._shortest_s = self._longest_s = left_s
        elif not self._fits(text, left_s):
            return False
        self._shortest_s, self._longest_s = min(self._shortest_s, left_s), max(self._longest_s, left_s)
        self._size_bytes += text.size_bytes
        self.texts.append(text)
        return True

    def _fits(self, text: GatheredText, left_s: float) -> bool:
        """Return whether the text may be in the call beside the texts that are in it."""
        shortest_s, longest_s = min(self._shortest_s, left_s), max(self._longest_s, left_s)
        return (
            not text.is_alone
            and text.form == self.texts[0].form
            and self._size_bytes + text.size_bytes <= self._limits.size_bytes
            and longest_s <= self._limits.deadline_ratio * shortest_s
        )

    @property
    def call(self) -> Call:
        """The call as it is filled now."""
        return Call(tuple(self.texts), tuple(self.late))


class GatherQueue:
    """The texts that wait for calls of one model. Not safe to use from several threads.

    Tenants take turns: the oldest text of each tenant comes first, then the second oldest of each, and so on, so that the
    texts of a flood wait behind one text of every other tenant. `hplm.scheduling.reference.gather` is the slow twin of
    `take`.
    """

    def __init__(self, capacity: int, gather_s: float, limits: GatherLimits) -> None:
        """`capacity`: the most texts that wait. `gather_s`: seconds that a text waits for others, if enough are expected."""
        self._capacity = capacity
        self._gather_s = gather_s
        self._limits = limits
        self._rate = Rate(gather_s)
        # Each tenant's texts in the order of arrival.
        self._tenants: dict[str, list[GatheredText]] = {}
        self._count = 0
        self._call_from_s = math.inf

    def __len__(self) -> int:
        return self._count

    def offer(self, text: GatheredText, now_s: float) -> GatheredText | None:
        """Queue a text that comes now. Return the text that the queue refuses for it, which may be this text, if it is full.

        In a full queue, the tenant that has most texts loses its newest text.
        """
        is_worth_a_wait = self._rate.add(1, now_s)
        if not self._count:
            self._call_from_s = now_s + self._gather_s if is_worth_a_wait else now_s
        refused = None
        if self._count >= self._capacity:
            own = len(self._tenants.get(text.tenant, ()))
            tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
            if own + 1 >= len(self._tenants[tenant]):
                return text
            refused = self._tenants[tenant][-1]
            self.remove([refused])
        self._insert(text)
        return refused

    def put_back(self, texts: Collection[GatheredText]) -> None:
        """Queue texts once more whose call has failed, in their old places. They are never refused."""
        for text in texts:
            self._insert(text)
        if texts:
            self._call_from_s = -math.inf

    def may_call_from_s(self, *, is_idle: bool) -> float:
        """Return the time from which a call may begin, infinity if no text waits.

        `is_idle`: no call of this model is under way. Then a wait would only delay the first text.
        """
        if not self._count:
            return math.inf
        return -math.inf if is_idle or self._count >= self._limits.texts else self._call_from_s

    def take(self, now_s: float) -> Call:
        """Take the next call's texts out of the queue, together with late texts that stand before them."""
        filler = CallFiller(self._limits, now_s)
        turns = [(0, texts[0].arrived_s, texts[0].id, texts) for texts in self._tenants.values()]
        heapq.heapify(turns)
        while turns and not filler.is_full:
            turn, _, _, texts = heapq.heappop(turns)
            filler.show(texts[turn])
            if turn + 1 < len(texts):
                following = texts[turn + 1]
                heapq.heappush(turns, (turn + 1, following.arrived_s, following.id, texts))
        self.remove([*filler.texts, *filler.late])
        # The texts that are left have waited for a call already.
        self._call_from_s = -math.inf
        return filler.call

    def late(self, now_s: float) -> list[GatheredText]:
        """Take all texts out of the queue whose deadline has passed."""
        late = [text for texts in self._tenants.values() for text in texts if text.due_s <= now_s]
        self.remove(late)
        return late

    def oldest(self) -> list[GatheredText]:
        """Return all texts in the order of arrival."""
        return sorted((text for texts in self._tenants.values() for text in texts), key=_age)

    def remove(self, texts: Sequence[GatheredText]) -> None:
        """Take these texts out of the queue; texts that are not in it are ignored."""
        ids = {text.id for text in texts}
        for tenant in {text.tenant for text in texts}:
            before = self._tenants.get(tenant, [])
            left = [text for text in before if text.id not in ids]
            self._count -= len(before) - len(left)
            if left:
                self._tenants[tenant] = left
            else:
                self._tenants.pop(tenant, None)

    def _insert(self, text: GatheredText) -> None:
        insort(self._tenants.setdefault(text.tenant, []), text, key=_age)
        self._count += 1


def _age(text: GatheredText) -> tuple[float, int]:
    return text.arrived_s, text.id
