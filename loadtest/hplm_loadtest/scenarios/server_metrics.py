"""Reads values from a server's metrics page."""

from __future__ import annotations

import re

from hplm.runtime.local_http import fetch_page
from hplm.triton.launcher.server import TritonServer

# Seconds until counted events are on the page: `hplm.triton.bridge.metrics` writes them once a second.
UP_TO_DATE_S = 1.5


def metric_value(server: TritonServer, name: str) -> float:
    """Return the sum of all values of a metric, such as `requests` or `requests{event="ok"}`, that have the given labels.

    Returns 0 if there are none, because a counter comes on the page with its first event. Raises UnreachableError if there
    is no page.
    """
    family, _, labels = name.rstrip("}").partition("{")
    wanted = set(labels.split(",")) - {""}
    values = re.findall(rf"^{re.escape(family)}(?:{{(.*)}})? (\S+)$", metrics_page(server), flags=re.MULTILINE)
    return sum(float(value) for labels, value in values if wanted <= set(labels.split(",")))


def metrics_page(server: TritonServer) -> str:
    """Return the whole page as Prometheus reads it. Raises UnreachableError."""
    return fetch_page(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout_s=60)
