"""A meter of a stage's texts by tenant, for the metrics page and for the tenants' recent counts."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hplm.core.settings import Metering
from hplm.errors import HplmError
from hplm.metering.recent_counts import Counts, RecentCounts, counts_of, sweep
from hplm.metering.tenant_totals import Series, TenantTotals, TextEvent
from hplm.runtime.rate_limited_log import log_rate_limited

# Seconds between two evaluations of the events that the stage has noted.
EVALUATE_EVERY_S = 1.0
# Seconds after which the tenants with labels are chosen anew.
TURN_S = 60.0
# The most events that wait for their evaluation. More come only if the evaluating thread hangs; the oldest are then lost.
MOST_EVENTS = 1_000_000
# After these errors the tenant's name may be invented, or another's: the text counts for no tenant.
NAMELESS = frozenset({"unknown_tenant", "bad_tenant_name", "bad_input", "forbidden", "registry_unavailable"})
# The errors' statuses on the wire, by the names of `Counts`.
_RESULTS = {"UNAVAILABLE": "refused", "INVALID_ARG": "invalid", "NOT_FOUND": "invalid", "INTERNAL": "failed"}


class _Noted(NamedTuple):
    """An event as the stage notes it, which costs less than evaluating it. `result` is empty if no text ended."""

    tenant: bytes
    kind: str
    amount: float
    outcome: str = ""
    result: str = ""


class TextMeter:
    """Notes events of a stage's texts; a thread evaluates them. Any thread may note events, at half a microsecond each.

    `recent` gets the counts of tenants; the meter closes it. `wall_clock` tells unix time.
    """

    def __init__(
        self,
        stage: str,
        metering: Metering,
        recent: RecentCounts | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._totals = TenantTotals(stage, metering.tenants, metering.label)
        self._recent = recent
        self._wall_clock = wall_clock
        self._noted: deque[_Noted] = deque(maxlen=MOST_EVENTS)
        self._lock = threading.Lock()
        self._turn_s = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"{stage}-meter", daemon=True)

    def start(self) -> None:
        """Begin to evaluate events."""
        self._thread.start()

    def stop(self) -> None:
        """Evaluate what is noted and end the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self.evaluate()
        if self._recent is not None:
            self._recent.close()
            self._recent = None

    def note_part(self, tenant: bytes, part: str, seconds: float) -> None:
        """Note a part of the work on a text: `queue`, `look_up` or `compute`."""
        self._noted.append(_Noted(tenant, part, seconds))

    def note_tokens(self, tenant: bytes, tokens: int) -> None:
        """Note the tokens of a text that was looked up."""
        self._noted.append(_Noted(tenant, "tokens", tokens))

    def note_answer(self, tenant: bytes, answer: object, seconds: float, *, is_inner: bool = False) -> None:
        """Note the one answer of a text, `seconds` after the text arrived.

        With `is_inner` another model of this server asked, which counts the text for its tenant itself.
        """
        outcome, result = "ok", "ok"
        if isinstance(answer, HplmError):
            outcome, result = answer.code.lower(), _RESULTS[answer.status]
        self._noted.append(_Noted(tenant, "whole", seconds, outcome, "" if is_inner else result))

    def series(self) -> Mapping[Series, float]:
        """Return the time series of the metrics page, of all evaluated events."""
        with self._lock:
            return self._totals.series()

    def evaluate(self) -> None:
        """Count the events that were noted so far."""
        events: list[TextEvent] = []
        outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        tokens: Counter[str] = Counter()
        for _ in range(len(self._noted)):
            raw, kind, amount, outcome, result = self._noted.popleft()
            name = "" if outcome in NAMELESS else raw.decode("utf-8", "replace")
            if kind == "tokens":
                tokens[name] += int(amount)
                continue
            events.append(TextEvent(name, kind, amount, outcome))
            if name and result:
                outcomes[name][result] += 1
        with self._lock:
            self._totals.add(events)
            if time.monotonic() - self._turn_s >= TURN_S:
                self._turn_s = time.monotonic()
                self._totals.end_turn()
            if self._recent is not None and (outcomes or tokens):
                counts: dict[str, Counts] = {
                    name: counts_of(outcomes[name], tokens[name]) for name in {*outcomes, *tokens} if name
                }
                self._recent.add(counts, self._wall_clock())

    def _loop(self) -> None:
        while not self._stopped.wait(EVALUATE_EVERY_S):
            try:
                self.evaluate()
            except Exception as error:
                log_rate_limited("texts could not be counted by tenant", error)


def open_meter(stage: str, metering: Metering, store: Path, registry: str) -> TextMeter:
    """Return a started meter of a stage. If the file of recent counts cannot be made, the log says so and nothing is kept."""
    recent = None
    try:
        sweep()
        recent = RecentCounts(store, registry)
    except OSError as error:
        log_rate_limited(f"{stage}: texts of the last hour and day are not counted ({error})")
    meter = TextMeter(stage, metering, recent)
    meter.start()
    return meter
