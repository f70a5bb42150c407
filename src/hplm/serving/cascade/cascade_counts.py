"""Counters for the metrics of a cascade. Each text counts once."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

# Upper ends of the buckets of the histogram of confidences.
BUCKETS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
# The drift of a level is a mean over about so many recent texts.
DRIFT_TEXTS = 2000


class CascadeCounts:
    """Counters since the start of the process, and the drift of calibration. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered: Counter[str] = Counter()
        self._rerouted: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        # The last bucket is for a confidence that rounding has made larger than 1.
        self._confidences = [0] * (len(BUCKETS) + 1)
        self._logic_us = 0.0
        # By base: the sums of weights and of weighted differences.
        self._drift: dict[str, tuple[float, float]] = {}

    def add_answer(self, base: str) -> None:
        """Count a text by the base that answered it last."""
        with self._lock:
            self._answered[base] += 1

    def add_reroute(self, base: str) -> None:
        """Count a text that `base` has sent on to the next level, whether or not that level can answer it."""
        with self._lock:
            self._rerouted[base] += 1

    def add_late(self, why: str) -> None:
        """Count a text that the next level could not answer."""
        with self._lock:
            self._late[why] += 1

    def add_logic(self, seconds: float) -> None:
        """Count time of the cascade's own logic: without levels, queues, and the way to the client."""
        with self._lock:
            self._logic_us += seconds * 1e6

    def add_confidence(self, base: str, confidence: float, on_dev: float | None) -> None:
        """Count the confidence of a tenant's first level `base`; `on_dev` is the level's mean on the tenant's dev examples."""
        with self._lock:
            self._confidences[bisect_left(BUCKETS, confidence)] += 1
            if on_dev is not None:
                weight, total = self._drift.get(base, (0.0, 0.0))
                keep = 1 - 1 / DRIFT_TEXTS
                self._drift[base] = weight * keep + 1, total * keep + confidence - on_dev

    @property
    def answered(self) -> Counter[str]:
        """Texts by the base that answered last."""
        with self._lock:
            return Counter(self._answered)

    @property
    def rerouted(self) -> Counter[str]:
        """Texts by the base that sent them on."""
        with self._lock:
            return Counter(self._rerouted)

    @property
    def late(self) -> Counter[str]:
        """Texts that the next level could not answer, by reason."""
        with self._lock:
            return Counter(self._late)

    @property
    def confidences(self) -> Counter[str]:
        """Texts by the upper ends of buckets: each bucket holds the texts of the buckets before it, as Prometheus has it."""
        with self._lock:
            counts = list(self._confidences)
        ends = [*(f"{end:g}" for end in BUCKETS), "+Inf"]
        return Counter(dict(zip(ends, accumulate(counts), strict=True)))

    @property
    def logic_us(self) -> Counter[str]:
        """Microseconds of own logic of all texts."""
        with self._lock:
            return Counter({"": int(self._logic_us)})

    def drift(self) -> dict[str, float]:
        """Return, by base, the mean difference of recent confidences from the tenant's mean on dev."""
        with self._lock:
            return {base: total / weight for base, (weight, total) in self._drift.items()}
