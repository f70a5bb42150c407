"""Runs nginx before a server with the rules of the example file, whose ports and paths are filled in."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import ConfigError, StartError
from hplm.triton.launcher.ports import Ports, free_ports

EXAMPLE = Path("examples/production/nginx.conf")
START_S, END_S = 20.0, 10.0
# Each temporary folder of nginx. The compiled-in folders need root.
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Proxy:
    """A running nginx: its ports for HTTP and gRPC with TLS, and the certificate that clients must trust."""

    http: int
    grpc: int
    certificate: Path
    folder: Path
    host: str = "127.0.0.1"

    @property
    def errors(self) -> str:
        """The log of errors."""
        return (self.folder / "error.log").read_text(errors="replace")


def find_nginx() -> str | None:
    """Return the path of nginx, None if this machine has none. It may be in a folder that only root searches."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def example_proxy(ports: Ports, folder: Path, example: Path = EXAMPLE) -> Iterator[Proxy]:
    """Run nginx with the rules of `example` before the server on `ports`, with its files in `folder`.

    Raises ConfigError if the example lacks a line that is filled in, StartError if nginx or openssl is missing or fails.
    """
    nginx, openssl = find_nginx(), shutil.which("openssl")
    if nginx is None or openssl is None:
        raise StartError(
            "this benchmark needs the programs nginx and openssl: install them (apt-get install nginx openssl)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    make = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*make, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    own = free_ports()
    proxy = Proxy(own.http, own.grpc, certificate, folder)
    config = folder / "nginx.conf"
    config.write_text(filled_in(example.read_text(), ports, proxy, key, [own.metrics, own.health or 0]))
    for name in TEMPORARY:
        (folder / name).mkdir(exist_ok=True)
    command = [nginx, "-c", str(config), "-e", str(folder / "error.log"), "-p", str(folder)]
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _await_port(process, proxy)
        yield proxy
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def filled_in(example: str, ports: Ports, proxy: Proxy, key: Path, spare: Sequence[int]) -> str:
    """Return the example with the ports and paths of this run. All rules stay as they are.

    `spare` are ports for further servers of the example on 127.0.0.1. Raises ConfigError.
    """
    folder = proxy.folder
    text = example
    for pattern, replacement in (
        (r"listen 443 ssl;", f"listen {proxy.host}:{proxy.http} ssl;"),
        (r"listen 8443 ssl http2;", f"listen {proxy.host}:{proxy.grpc} ssl http2;"),
        (r"server 127\.0\.0\.1:8000;", f"server {ports.host}:{ports.http};"),
        (r"server 127\.0\.0\.1:8001;", f"server {ports.host}:{ports.grpc};"),
        (r"ssl_certificate /\S+;", f"ssl_certificate {proxy.certificate};"),
        (r"ssl_certificate_key /\S+;", f"ssl_certificate_key {key};"),
        (r"access_log /\S+", f"access_log {folder}/access.log"),
    ):
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            raise ConfigError(f"the example proxy was expected to have one line like {pattern!r}, and has {count}")
    inner = sorted({*re.findall(r"listen 127\.0\.0\.1:(\d{4});|listen 127\.0\.0\.1:(\d{4}) http2;", example)})
    for port, free in zip([one or other for one, other in inner], spare, strict=False):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    temporary = "".join(f"  {name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
    # A master that runs as root gives its workers another user by default, who may not enter the folder.
    user = f"user {pwd.getpwuid(0).pw_name} {grp.getgrgid(0).gr_name};\n" if os.geteuid() == 0 else ""
    main = f"{user}daemon off;\nmaster_process on;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log warn;\n"
    return main + text.replace("http {\n", f"http {{\n{temporary}", 1)


def _await_port(process: subprocess.Popen[bytes], proxy: Proxy) -> None:
    until_s = time.monotonic() + START_S
    while True:
        if process.poll() is not None or time.monotonic() > until_s:
            said = (proxy.folder / "output.log").read_text(errors="replace")
            raise StartError(f"nginx does not listen; it says:\n{said}")
        try:
            with socket.create_connection((proxy.host, proxy.grpc), timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
