"""The part of an error that a client may read."""

from __future__ import annotations

from hplm.errors import ArtifactError, HplmError, InternalError, RegistryError, RegistryUnavailableError
from hplm.runtime.rate_limited_log import log_rate_limited


def for_the_wire(error: BaseException, tenant: bytes) -> HplmError:
    """Return an error as its client may read it.

    Faults of files, of the registry and of our code are for the operator's log: only the code of such an error is sent.
    """
    if not isinstance(error, HplmError):
        log_rate_limited(f"tenant {_printable(tenant)} or its domain could not be loaded ({error!r})", error)
        return InternalError("this tenant's model cannot be loaded; the server's log says why")
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # The tenant may not exist. The cause is logged once where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    log_rate_limited(f"tenant {_printable(tenant)}: {error}")
    return type(error)("this tenant's model cannot be loaded; the server's log says why")


def _printable(tenant: bytes) -> str:
    return tenant.decode("utf-8", "replace")
