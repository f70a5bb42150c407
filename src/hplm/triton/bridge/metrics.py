"""Counters and gauges on Triton's /metrics page."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from hplm.metering.tenant_totals import FAMILIES, Series
from hplm.runtime.process import end_if_orphaned
from hplm.runtime.rate_limited_log import log_rate_limited

# The server's process: the parent of a stub when it starts.
SERVER = os.getppid()
# Seconds between two updates.
PERIOD_S = 1.0
# Updates of all other metrics between two updates of time series by tenant: there may be a thousand, at a round trip each.
# Prometheus seldom looks more often than every 15 s.
SERIES_EVERY = 5


@dataclass(frozen=True)
class MetricFamily:
    """A metric's name, description and label. `label` is empty if the metric has one value only, whose key is ""."""

    name: str
    description: str
    label: str


class MetricsPublisher:
    """Updates metrics every PERIOD_S, because each update is a round trip to the server.

    `instance` is a label of all metrics, for a model with several processes. Triton has one value for equal labels, and
    drops it when the first process ends.
    If the server was killed, a round trip would wait for ever, and the stub with it. The process ends itself instead.
    """

    def __init__(
        self,
        counters: Mapping[MetricFamily, Callable[[], Counter[str]]],
        gauges: Mapping[MetricFamily, Callable[[], Mapping[str, float]]],
        instance: str = "",
        series: Callable[[], Mapping[Series, float]] = dict,
    ) -> None:
        """`series` returns time series whose values never fall. A series that it leaves out leaves the page."""
        end_if_orphaned(SERVER)
        self._counters = [(self._family(f, pb_utils.MetricFamily.COUNTER), f, read) for f, read in counters.items()]
        # Triton drops a family's metrics with the family, so all families are kept.
        self._gauges = [(self._family(f, pb_utils.MetricFamily.GAUGE), f, read) for f, read in gauges.items()]
        self._labels = {"model_instance": instance} if instance else {}
        self._read_series = series
        self._series_families: dict[str, Any] = {}
        # The metric of each time series, and the value that it has on the page.
        self._series: dict[Series, tuple[Any, float]] = {}
        self._updates = 0
        self._metrics: dict[tuple[str, str], Any] = {}
        self._published: dict[str, Counter[str]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hplm-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish the last values and end the timer."""
        self._stopped.set()
        self._thread.join(timeout=2.0)
        self._updates = 0
        self._try_publish()
        # Metrics must be dropped before their families, and while Triton still listens; later the stub would crash.
        self._metrics.clear()
        self._series.clear()
        self._series_families.clear()
        self._gauges.clear()
        self._counters.clear()

    def _family(self, family: MetricFamily, kind: Any) -> Any:
        return pb_utils.MetricFamily(name=family.name, description=family.description, kind=kind)

    def _loop(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._try_publish()

    def _try_publish(self) -> None:
        end_if_orphaned(SERVER)
        try:
            self._publish()
        except Exception as error:
            # For example, shared memory may be full for a moment. The next update publishes the values.
            log_rate_limited("metrics are not up to date", error)

    def _publish(self) -> None:
        for made, family, read in self._counters:
            published = self._published.setdefault(family.name, Counter())
            for value, count in (Counter(read()) - published).items():
                self._metric(made, family, value).increment(count)
                published[value] += count
        for made, family, read_gauge in self._gauges:
            for value, number in read_gauge().items():
                self._metric(made, family, value).set(number)
        if self._updates % SERIES_EVERY == 0:
            self._publish_series(self._read_series())
        self._updates += 1

    def _publish_series(self, values: Mapping[Series, float]) -> None:
        for gone in self._series.keys() - values.keys():
            del self._series[gone]
        for series, value in values.items():
            metric, published = self._series.get(series) or (None, 0.0)
            if metric is None:
                if (family := self._series_families.get(series.metric)) is None:
                    described = MetricFamily(series.metric, FAMILIES[series.metric], "")
                    family = self._series_families[series.metric] = self._family(
                        described, pb_utils.MetricFamily.COUNTER
                    )
                metric = family.Metric(labels={**dict(series.labels), **self._labels})
                # Kept before it is increased: the increase may fail, and the next update must go on from there.
                self._series[series] = metric, 0.0
            if value > published:
                metric.increment(value - published)
                self._series[series] = metric, value

    def _metric(self, made: Any, family: MetricFamily, value: str) -> Any:
        if (metric := self._metrics.get((family.name, value))) is None:
            labels = {family.label: value} if family.label else {}
            metric = self._metrics[family.name, value] = made.Metric(labels={**labels, **self._labels})
        return metric
