"""HTTP to a server on this machine."""

from __future__ import annotations

import urllib.request

# Opens URLs of this machine directly, whatever proxy the environment names.
LOCAL_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
