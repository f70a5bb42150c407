"""nginx before a running server, with the example of `examples/production` on free ports of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hplm.triton.launcher.ports import Ports, free_ports

EXAMPLE = Path(__file__).parents[3] / "examples/production/nginx.conf"
# It may lie outside of a user's PATH.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx")
START_S = 30.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Proxy:
    """The addresses of a running nginx, and the folder of its logs."""

    https_url: str
    grpcs_url: str
    folder: Path
    certificate: Path

    def access_log(self) -> str:
        return (self.folder / "access.log").read_text()


@contextmanager
def proxy(server: Ports, certificate: Path, folder: Path) -> Iterator[Proxy]:
    """Start nginx before a server. `certificate` has its `key.pem` beside it."""
    assert NGINX is not None
    folder.mkdir(parents=True)
    own = free_ports()
    temporary = "".join(f"  {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi"))
    temporary += "".join(f"  {kind}_temp_path {folder}/{kind};\n" for kind in ("uwsgi", "scgi"))
    # The server that refuses messages over gRPC, for nginx itself alone.
    replaced = {
        " 127.0.0.1:8402": f" 127.0.0.1:{own.metrics}",
        "\nhttp {\n": f"\nhttp {{\n{temporary}",
        "listen 443 ": f"listen 127.0.0.1:{own.http} ",
        "listen 8443 ": f"listen 127.0.0.1:{own.grpc} ",
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{server.http};",
        "server 127.0.0.1:8001;": f"server 127.0.0.1:{server.grpc};",
        "/etc/nginx/hplm.pem": str(certificate),
        "/etc/nginx/hplm.key": str(certificate.with_name("key.pem")),
        "/var/log/nginx/hplm.log": f"{folder}/access.log",
    }
    config = EXAMPLE.read_text()
    for old, new in replaced.items():
        assert old in config, old
        config = config.replace(old, new)
    path, log = folder / "nginx.conf", folder / "error.log"
    path.write_text(config)
    directives = f"daemon off; master_process off; pid {folder}/pid;"
    process = subprocess.Popen([NGINX, "-p", str(folder), "-e", str(log), "-c", str(path), "-g", directives])
    try:
        until_s = time.monotonic() + START_S
        while not _listens(own.grpc):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s
            time.sleep(0.02)
        yield Proxy(f"https://{HOST}:{own.http}", f"grpcs://{HOST}:{own.grpc}", folder, certificate)
    finally:
        process.terminate()
        process.wait(START_S)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
