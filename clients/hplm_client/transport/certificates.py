"""Certificates that a client trusts over TLS: those of `SSL_CERT_FILE`, or else the system's."""

from __future__ import annotations

import os
import ssl

from hplm.errors import ConfigError

CERTIFICATES_VARIABLE = "SSL_CERT_FILE"


def certificates_from_environment() -> str | None:
    """Return the file that `SSL_CERT_FILE` names, or None if the variable is not set. Raises ConfigError."""
    file = os.environ.get(CERTIFICATES_VARIABLE)
    if not file:
        return None
    if not (os.path.isfile(file) and os.access(file, os.R_OK)):
        raise ConfigError(f"{CERTIFICATES_VARIABLE} names {file}, which is not a readable file")
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{CERTIFICATES_VARIABLE} names {file}, which holds no certificates: {error.reason}"
        ) from None
    return file


def system_certificates() -> str:
    """Return the system's file of certificates, for gRPC. Raises ConfigError if the system has none.

    gRPC cannot read a folder of certificates. Without a file gRPC would trust its own list.
    """
    file = ssl.get_default_verify_paths().cafile
    if file is None:
        raise ConfigError(
            f"the system has no file of trusted certificates, which gRPC needs: set {CERTIFICATES_VARIABLE}"
        )
    return file
