"""Slow twins of TCB's Algorithms 1 and 2, and of the gathering of texts for a call."""

from __future__ import annotations

from collections.abc import Sequence

from hplm.scheduling.gathering import Call, CallFiller, GatheredText, GatherLimits
from hplm.scheduling.policy import Batch, Budget, Filler, Waiting


def das(waiting: Sequence[Waiting], budget: Budget, eta: float, q: float) -> tuple[Filler, list[Waiting]]:
    """Return the filled rows, and the requests that were chosen for their utility: the slow twin of `policies.Das`."""
    filler = Filler(budget)
    all_dominant: list[Waiting] = []
    left = list(waiting)
    for row in range(budget.rows):
        # Not in the paper: a batch may also be full by its number of requests.
        most = budget.max_requests - filler.count
        if sum(request.tokens for request in left) <= budget.row_tokens and len(left) <= most:
            dominant = sorted(left, key=lambda r: (r.tokens, r.arrived_s, r.id))
            all_dominant += [request for request in dominant if filler.put(row, request)]
        else:
            by_utility = sorted(left, key=lambda r: (-r.utility, r.arrived_s, r.id))
            saturating = 0
            while (
                sum(request.tokens for request in by_utility[: saturating + 1]) <= budget.row_tokens
                and saturating < most
            ):
                saturating += 1
            dominant = by_utility[: max(1, int(eta * saturating))]
            all_dominant += [request for request in dominant if filler.put(row, request)]
            mean = sum(request.utility for request in dominant) / len(dominant)
            others = [request for request in by_utility if request not in dominant]
            urgent = [request for request in others if request.utility >= q * mean]
            for request in sorted(urgent, key=lambda r: (r.deadline_s, r.arrived_s, r.id)):
                filler.put(row, request)
            for request in others:
                if request not in urgent:
                    filler.put(row, request)
        left = [request for request in left if request not in filler.rows[row]]
    return filler, all_dominant


def slotted_das(waiting: Sequence[Waiting], budget: Budget, eta: float, q: float) -> Batch:
    """Return the batch of Algorithm 2, which cuts the rows of `das` into slots: the slow twin of `policies.SlottedDas`."""
    filler, dominant = das(waiting, budget, eta, q)
    slot_tokens = max((request.tokens for request in dominant), default=0)
    rows = []
    for row in filler.rows:
        slots: list[list[Waiting]] = [[] for _ in range(max(1, budget.row_tokens // max(1, slot_tokens)))]
        for request in row:
            for slot in slots:
                if sum(other.tokens for other in slot) + request.tokens <= slot_tokens:
                    slot.append(request)
                    break
        rows.append(tuple(request for request in row if any(request in slot for slot in slots)))
    return Batch(tuple(row for row in rows if row), slot_tokens)


def gather(waiting: Sequence[GatheredText], now_s: float, limits: GatherLimits) -> Call:
    """Return the call that `gathering.GatherQueue.take` makes of these texts."""

    def older(text: GatheredText) -> int:
        """Return how many texts of the same tenant are older."""
        own = [other for other in waiting if other.tenant == text.tenant]
        return sum((other.arrived_s, other.id) < (text.arrived_s, text.id) for other in own)

    filler = CallFiller(limits, now_s)
    for text in sorted(waiting, key=lambda text: (older(text), text.arrived_s, text.id)):
        if not filler.is_full:
            filler.show(text)
    return filler.call
