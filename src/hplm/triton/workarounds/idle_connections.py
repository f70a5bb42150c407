"""Before it ends, Triton waits for clients whose connections are open, and then breaks off requests that run.

Behaviour: the time between SIGTERM and the end is spent on idle connections, also if no model is loaded any more.
Workaround: the models are unloaded first, which waits for running requests alone. A Triton without models is then killed
after EMPTY_ENDS_S.
Switched off: harmless.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Collection, Iterable, Mapping

from hplm.runtime.local_http import LOCAL_HTTP

# Seconds that a Triton without models may take to end.
EMPTY_ENDS_S = 4.0
# States of a model that is not unloaded yet, in Triton's index of the repository.
LOADED = ("LOADING", "READY", "UNLOADING")


def unload(
    http_url: str, groups: Iterable[Collection[str]], until_s: float, headers: Mapping[str, str] | None = None
) -> bool:
    """Unload groups of models, one group after the other, each when no request of it runs any more. `headers` allow it.

    Return False if a model may still be loaded at `until_s` (monotonic clock), or if the server does not allow unloading.
    """
    url = f"{http_url}/v2/repository"
    models = [{*group} for group in groups]

    def post(path: str) -> bytes:
        timeout_s = max(0.1, until_s - time.monotonic())
        request = urllib.request.Request(f"{url}/{path}", b"{}", dict(headers or {}))
        with LOCAL_HTTP.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())

    def read_states() -> dict[str, str]:
        return {model["name"]: model.get("state", "") for model in json.loads(post("index"))}

    states: dict[str, str] = {}
    try:
        for group in models:
            for model in group:
                post(f"models/{model}/unload")
            states = read_states()
            while any(states.get(model) in LOADED for model in group):
                if time.monotonic() > until_s:
                    return False
                time.sleep(0.02)
                states = read_states()
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError):
        # The server forbids unloading, is about to end by itself, or is no Triton.
        return False
    # A model whose folder is gone is not listed, and the repository may hold models of others.
    return states.keys() >= set().union(*models) and not any(state in LOADED for state in states.values())
