"""The header with which a client tells a proxy whose request it sends."""

from __future__ import annotations

from hplm.core.names import check_name
from hplm.errors import TenantNameError

# A proxy in front of several servers sends all requests of a tenant to the same server, which then keeps the tenant's adapter.
TENANT_HEADER = "hplm-tenant"


def tenant_header(tenant: object) -> dict[str, str]:
    """Return the header for a request of a tenant. A request of several tenants has the header of the first tenant.

    A name that no tenant can have gets no header, because such a name may not fit a header. The server refuses its request.
    """
    if not isinstance(tenant, str):
        return {}
    try:
        return {TENANT_HEADER: check_name(tenant)}
    except TenantNameError:
        return {}
