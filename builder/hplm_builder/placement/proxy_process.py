"""A running HAProxy with the configuration of a plan."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hplm.errors import StartError
from hplm_builder.placement.proxy_config import CONFIG_FILE, ProxyAddress

# Seconds in which HAProxy listens, also on a busy machine.
START_S = 30.0


def find_haproxy() -> Path | None:
    """Return the program, which may lie outside of a user's PATH; None if it is not installed."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    return None if found is None else Path(found)


@contextmanager
def running_proxy(program: Path, folder: Path, files: Mapping[str, str], address: ProxyAddress) -> Iterator[Path]:
    """Write the files of `proxy_files` to a folder and run HAProxy with them until the block ends. Raises StartError.

    HAProxy's socket lies in a folder of its own, of which the block gets the path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    log = folder / "haproxy.log"
    # The path of a socket has 100 characters at most, and `folder` may have more.
    with tempfile.TemporaryDirectory(prefix="hplm-") as sockets, log.open("wb") as output:
        process = subprocess.Popen(
            [program, "-db", "-f", folder / CONFIG_FILE],
            stdout=output,
            stderr=output,
            env={**os.environ, "XDG_RUNTIME_DIR": sockets},
        )
        try:
            until_s = time.monotonic() + START_S
            while not all(_listens(address.host, port) for port in (address.http_port, address.grpc_port)):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise StartError(f"HAProxy does not listen: {log.read_text().strip()[-500:]}")
                time.sleep(0.02)
            yield Path(sockets)
        finally:
            process.kill()
            process.wait()


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
