"""What a client may read of an error."""

from __future__ import annotations

from hplm.errors import ArtifactError, HplmError, InternalError, RegistryError, RegistryUnavailableError
from hplm.runtime.rate_limited_log import log_rate_limited


def for_the_wire(error: BaseException, tenant: bytes) -> HplmError:
    """What is wrong with files, the registry or our code is for the operator's log: of such an error only the code travels."""
    if not isinstance(error, HplmError):
        log_rate_limited(f"tenant {_shown(tenant)} or its domain could not be loaded ({error!r})", error)
        return InternalError("this tenant's model cannot be loaded; the server's log says why")
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # Of a tenant that may not even be: why is logged where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    log_rate_limited(f"tenant {_shown(tenant)}: {error}")
    return type(error)("this tenant's model cannot be loaded; the server's log says why")


def _shown(tenant: bytes) -> str:
    return tenant.decode("utf-8", "replace")
