"""Values of a server's metrics page."""

from __future__ import annotations

import re

from hplm.runtime.local_http import LOCAL_HTTP
from hplm.triton.launcher.server import TritonServer

# Until what was counted stands on the page: `hplm.triton.bridge.metrics` brings it up to date each second.
UP_TO_DATE_S = 1.5


def metric(server: TritonServer, name: str) -> float:
    """Of `name`, as `requests` or `requests{event="ok"}`: the sum of all that have these labels; 0 where there are none."""
    family, _, labels = name.rstrip("}").partition("{")
    wanted = set(labels.split(",")) - {""}
    found = re.findall(rf"^{re.escape(family)}(?:{{(.*)}})? (\S+)$", page(server), flags=re.MULTILINE)
    return sum(float(value) for labels, value in found if wanted <= set(labels.split(",")))


def page(server: TritonServer) -> str:
    """All of them, as Prometheus reads it."""
    with LOCAL_HTTP.open(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text
