"""Values of a server's metrics page."""

from __future__ import annotations

import re
import urllib.request

from hplm.triton.server import TritonServer

# Until what was counted stands on the page: `hplm.triton.metrics` brings it up to date each second.
UP_TO_DATE_S = 1.5


def metric(server: TritonServer, name: str) -> float:
    """Of `name`: with labels, as it stands there, without, the sum over all labels; 0 where it is not there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=10) as answer:
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", answer.read().decode(), flags=re.MULTILINE)
    return sum(float(value) for value in found)
