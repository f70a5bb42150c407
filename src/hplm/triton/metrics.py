"""Counters on Triton's /metrics page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils


class LevelCounter:
    """`name{level=...}`, brought up to date every `period_s`: each update is a round trip to the server."""

    def __init__(self, name: str, description: str, read: Callable[[], Counter[str]], period_s: float = 1.0) -> None:
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER)
        self._metrics: dict[str, Any] = {}
        self._published: Counter[str] = Counter()
        self._read = read
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish what is left and end the timer."""
        self._stopped.set()
        self._thread.join(timeout=2.0)
        self._publish()

    def _loop(self) -> None:
        while not self._stopped.wait(self._period_s):
            self._publish()

    def _publish(self) -> None:
        counts = Counter(self._read())
        for level, count in (counts - self._published).items():
            metric = self._metrics.get(level)
            if metric is None:
                metric = self._metrics[level] = self._family.Metric(labels={"level": level})
            metric.increment(count)
        self._published = counts
