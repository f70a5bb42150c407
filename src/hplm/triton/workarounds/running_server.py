"""The parts of a running server that workarounds use. `hplm.triton.launcher.server.TritonServer` has them."""

from __future__ import annotations

import subprocess
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Literal, Protocol
from urllib.error import HTTPError

from hplm.errors import StartError
from hplm.runtime.local_http import LOCAL_HTTP

# Seconds for one load or unload: a load reads and verifies tables, an unload waits for running requests.
LOAD_TIMEOUT_S = 3600.0
# Characters of Triton's reason that an error repeats.
MOST_REASON = 1000
ModelStep = Literal["load", "unload"]


class Address(Protocol):
    """Where a server listens."""

    @property
    def http_url(self) -> str: ...


class RunningServer(Protocol):
    """A Triton that was started by this process."""

    @property
    def process(self) -> subprocess.Popen[bytes]: ...

    @property
    def ports(self) -> Address: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def launcher_headers(self) -> Mapping[str, str]:
        """The headers with which the launcher may use Triton's restricted APIs."""

    def ends(self, within_s: float = 0.5) -> bool:
        """Return whether the process has ended or ends within `within_s` seconds."""

    def hide_texts(self) -> None:
        """Make the shared memory of the stages unreadable for other users."""


def ask_triton(server: RunningServer, model: str, step: ModelStep, is_over: Callable[[], bool]) -> bool:
    """Have Triton load or unload a model. Return False if Triton has ended meanwhile; raise StartError if it refuses.

    `is_over` says whether the server has ended.
    """
    url = f"{server.ports.http_url}/v2/repository/models/{model}/{step}"
    errors: list[OSError] = []
    reasons: list[str] = []

    def post() -> None:
        try:
            request = urllib.request.Request(url, b"{}", dict(server.launcher_headers))
            LOCAL_HTTP.open(request, timeout=LOAD_TIMEOUT_S).close()
        except OSError as error:
            errors.append(error)
            if isinstance(error, HTTPError):
                with error:
                    reasons.append(error.read(MOST_REASON).decode(errors="replace"))

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    # If Triton is killed while it starts a stub, the stub lives on and keeps this connection open.
    while thread.is_alive():
        if is_over():
            return False
        thread.join(0.1)
    if errors and not server.ends():
        raise StartError(f"Triton cannot {step} model {model}: {' '.join([str(errors[0]), *reasons])}")
    return not errors
