"""A certificate of this machine that nobody trusts yet, for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")


def make_certificate(folder: Path) -> Path:
    """Return `cert.pem` in a new folder, with its key in `key.pem` beside it. Its only name is the address 127.0.0.1."""
    folder.mkdir(parents=True)
    path = folder / "cert.pem"
    command = f"""openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test
        -addext subjectAltName=IP:127.0.0.1 -keyout {path.with_name("key.pem")} -out {path}"""
    subprocess.run(command.split(), check=True, capture_output=True)
    return path
