"""What a tenant may be called."""

from __future__ import annotations

import re

from hplm.errors import TenantNameError

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,62}[a-z0-9])?")


def check_name(name: str) -> str:
    """The name itself, where it may name a tenant. Raises TenantNameError, which does not repeat a long or odd name."""
    if not _NAME.fullmatch(name):
        raise TenantNameError(
            "a tenant name is 1 to 64 lower-case letters, digits, '-', '_' or '.', and starts and ends with a letter or digit"
        )
    return name
