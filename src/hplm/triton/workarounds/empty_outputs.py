"""Triton's Python backend sends empty output tensors, without an error, if numpy 2 is installed.

Releases: 24.10 and earlier; mended in 24.11. The dependency `numpy<2` of hplm's extra `serve` avoids it, and a start with
another numpy is refused.
Switched off: by server version, from 24.11 on.
"""

from __future__ import annotations

from importlib.metadata import version as installed_version

from hplm.errors import StartError
from hplm.triton.releases import RELEASE_24_11, ServerVersion


def check_numpy(server_version: ServerVersion | None, numpy_version: str | None = None) -> None:
    """Raise StartError if this server would answer with empty tensors. A server of unknown version is not refused."""
    numpy_version = numpy_version or installed_version("numpy")
    if server_version is not None and server_version < RELEASE_24_11 and int(numpy_version.partition(".")[0]) >= 2:
        raise StartError(
            f"Triton {server_version[0]}.{server_version[1]} sends empty answers with numpy {numpy_version}: "
            "`pip install 'numpy<2'`, or use Triton 24.11 (server 2.52) or later"
        )
