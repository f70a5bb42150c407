"""The parts of a running server that workarounds use. `hplm.triton.launcher.server.TritonServer` has them."""

from __future__ import annotations

import subprocess
from typing import Protocol


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

    def ends(self, within_s: float = 0.5) -> bool:
        """Return whether the process has ended or ends within `within_s` seconds."""

    def hide_texts(self) -> None:
        """Make the shared memory of the stages unreadable for other users."""
