"""The operator's own options for `tritonserver`, as far as the launcher must know of them.

The launcher and `hplm serve` ask Triton over plain HTTP, for which Triton has no TLS. Triton has TLS for gRPC alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from hplm.errors import StartError
from hplm.triton.launcher.command_line import flag_values

HTTP = "--allow-http"
# The second asks clients for a certificate of their own too. It counts before the first.
GRPC_TLS, GRPC_MUTUAL_TLS = "--grpc-use-ssl", "--grpc-use-ssl-mutual"
CERTIFICATE, PRIVATE_KEY = "--grpc-server-cert", "--grpc-server-key"
# The words by which Triton's options are on or off, in any case.
ON, OFF = ("1", "true", "on"), ("0", "false", "off")
# Options that decide who may call the server, or that `hplm serve` reads. Triton also takes `--http-addr` for `--http-address`.
GUARDED = (
    *("--http-address", "--grpc-address", "--metrics-address", "--allow-sagemaker", "--allow-vertex-ai"),
    *("--cache-config", "--cache-directory", "--response-cache-byte-size"),
    *("--http-restricted-api", "--grpc-restricted-protocol", HTTP, GRPC_TLS, GRPC_MUTUAL_TLS, CERTIFICATE, PRIVATE_KEY),
)


def has_grpc_tls(flags: Sequence[str]) -> bool:
    """Return whether Triton's options ask for TLS over gRPC."""
    return any(_is_on(flags, name) for name in (GRPC_TLS, GRPC_MUTUAL_TLS))


def check_flags(flags: Sequence[str]) -> None:
    """Raise StartError if `hplm serve` cannot work with the operator's options, or if TLS has no sound certificate.

    Triton itself would say little: that its port is in use, or all of its options.
    """
    for flag in flags:
        given = flag.partition("=")[0]
        whole = next((name for name in GUARDED if name.startswith(given)), given)
        if given.startswith("--") and given not in GUARDED and whole != given:
            raise StartError(f"{given} is short for {whole}, which must be written in full")
    for name in (HTTP, GRPC_TLS, GRPC_MUTUAL_TLS):
        for value in flag_values(flags, name):
            if value.lower() not in (*ON, *OFF):
                raise StartError(f"{name} takes true or false, not {value!r}: write {name}=true")
    if any(value.lower() in OFF for value in flag_values(flags, HTTP)):
        raise StartError(
            f"{HTTP}=false: hplm serve asks Triton over HTTP. Leave it out; port 8000 listens on 127.0.0.1 by default"
        )
    if has_grpc_tls(flags):
        _check_certificate(flags)


def _check_certificate(flags: Sequence[str]) -> None:
    files = []
    for name in (CERTIFICATE, PRIVATE_KEY):
        values = [*flag_values(flags, name)]
        if not values or not values[-1]:
            raise StartError(
                f"TLS over gRPC needs {CERTIFICATE}=FILE and {PRIVATE_KEY}=FILE, in PEM: {name} is missing"
            )
        files.append(values[-1])
    certificate, key = files
    try:
        # Without the function, Python would ask for the password of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise StartError(
            f"{CERTIFICATE} {certificate} and {PRIVATE_KEY} {key} are no certificate and its key, in PEM and without "
            f"a password: {error.reason or error}"
        ) from None
    except OSError as error:
        raise StartError(f"{CERTIFICATE} {certificate}, {PRIVATE_KEY} {key}: {error.strerror}") from None


def _is_on(flags: Sequence[str], name: str) -> bool:
    return any(value.lower() in ON for value in flag_values(flags, name))
