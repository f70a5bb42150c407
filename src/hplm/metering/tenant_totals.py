"""Counts and times of texts by tenant label, as the counters and histograms of a metrics page."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hplm.core.settings import TenantLabel
from hplm.metering.busiest import BusiestTenants

# The label of all tenants without a label of their own.
OTHER = "other"
# Upper ends of the buckets of all histograms, in seconds.
BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# The metrics and their descriptions.
FAMILIES = {"hplm_tenant_texts_total": "Texts by tenant and outcome"} | {
    f"hplm_tenant_{part}_seconds_{suffix}": f"Seconds {what}: {of}"
    for part, what in (
        ("queue", "that texts waited in a stage's queue"),
        ("look_up", "of the batch that looked a text up"),
        ("compute", "of the batch that computed a text"),
        ("request", "from a text's arrival to its answer or error"),
    )
    for suffix, of in (("bucket", "texts up to `le`"), ("sum", "sum"), ("count", "texts"))
}
_ENDS = (*(f"{end:g}" for end in BUCKETS_S), "+Inf")


class TextEvent(NamedTuple):
    """One text that has its answer, or one part of a stage's work on a text.

    `tenant` is empty if the text is of no known tenant. `kind` is the part (`queue`, `look_up`, `compute`), or `whole` for
    the time from arrival to answer. `outcome` is `ok` or an error's code in lower case; parts have none.
    """

    tenant: str
    kind: str
    seconds: float
    outcome: str = ""


class Series(NamedTuple):
    """A time series: the name of its metric, and its labels."""

    metric: str
    labels: tuple[tuple[str, str], ...]


class _Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * len(_ENDS)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def series(self, metric: str, labels: tuple[tuple[str, str], ...]) -> Iterator[tuple[Series, float]]:
        """Yield buckets that each hold the texts of the buckets before, the sum and the count, as Prometheus has them."""
        *_, total = cumulative = list(accumulate(self._counts))
        for end, count in zip(_ENDS, cumulative, strict=True):
            yield Series(f"{metric}_bucket", (*labels, ("le", end))), float(count)
        yield Series(f"{metric}_sum", labels), self._sum_s
        yield Series(f"{metric}_count", labels), float(total)


class _LabelTotals:
    """The counts and times of one label since the start of the process."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._times: dict[tuple[str, str], _Times] = {}

    def add(self, event: TextEvent) -> None:
        is_whole = event.kind == "whole"
        if is_whole:
            self._outcomes[event.outcome] += 1
        result = ("ok" if event.outcome == "ok" else "error") if is_whole else ""
        key = event.kind, result
        if (times := self._times.get(key)) is None:
            times = self._times[key] = _Times()
        times.add(max(0.0, event.seconds))

    def series(self, labels: tuple[tuple[str, str], ...]) -> Iterator[tuple[Series, float]]:
        for outcome, count in self._outcomes.items():
            yield Series("hplm_tenant_texts_total", (*labels, ("outcome", outcome))), float(count)
        for (kind, result), times in self._times.items():
            name = "request" if kind == "whole" else kind
            of_result = (("result", result),) if result else ()
            yield from times.series(f"hplm_tenant_{name}_seconds", (*labels, *of_result))


class TenantTotals:
    """Totals of a stage by tenant, with labels for the busiest `most` tenants. Not safe to use from several threads.

    An event counts once: under its tenant's label if the tenant has a label when the event is added, else under OTHER. The
    totals of a tenant that loses its label are shown for one more turn, so that its last texts are seen. Then the totals are
    kept, and the tenant's counters go on from there if it gets a label again. So no counter ever goes down, and no text
    counts twice. Only tenants that had a label are kept.
    """

    def __init__(self, stage: str, most: int, form: TenantLabel = "name") -> None:
        self._stage = stage
        self._form = form
        self._busiest = BusiestTenants(most)
        self._totals: dict[str, _LabelTotals] = {OTHER: _LabelTotals()}
        # Tenants that lost their labels at the end of the last turn.
        self._leaving: set[str] = set()

    def add(self, events: Sequence[TextEvent]) -> None:
        """Count events. Each name that is not empty must be of a tenant that exists, because names are kept."""
        # A look-up stage ends refused texts only, so texts that left its queue count too.
        counted = (event.tenant for event in events if event.tenant and event.kind in ("whole", "queue"))
        self._busiest.add(Counter(counted))
        labelled, totals = self._busiest.labelled, self._totals
        for event in events:
            label = self._label(event.tenant) if event.tenant in labelled else OTHER
            if (of_label := totals.get(label)) is None:
                of_label = totals[label] = _LabelTotals()
            of_label.add(event)

    def end_turn(self) -> None:
        """Choose the tenants with labels anew, see BusiestTenants."""
        before = set(self._busiest.labelled)
        self._busiest.end_turn()
        self._leaving = before - set(self._busiest.labelled)

    def series(self) -> Mapping[Series, float]:
        """Return the values of the time series of tenants with labels, of those that have just lost theirs, and of the rest."""
        shown = [OTHER, *map(self._label, {*self._busiest.labelled, *self._leaving})]
        return {
            series: value
            for label in shown
            if label in self._totals
            for series, value in self._totals[label].series((("stage", self._stage), ("tenant", label)))
        }

    def _label(self, tenant: str) -> str:
        if self._form == "hash":
            return hashlib.sha256(tenant.encode()).hexdigest()[:12]
        # A tenant may have the name of the label for all others.
        return f"{tenant} (tenant)" if tenant == OTHER else tenant
