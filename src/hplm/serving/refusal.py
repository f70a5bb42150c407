"""What a client may read of an error."""

from __future__ import annotations

import logging

from hplm.errors import ArtifactError, HplmError, RegistryError, RegistryUnavailableError


def for_the_wire(error: HplmError, tenant: bytes) -> HplmError:
    """What is wrong with files or the registry is for the operator's log: of such an error only the code travels."""
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # Of a tenant that may not even be: why is logged where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    logging.getLogger(__name__).error("tenant %s: %s", tenant.decode("utf-8", "replace"), error)
    return type(error)("this tenant's model cannot be loaded; the server's log says why")
