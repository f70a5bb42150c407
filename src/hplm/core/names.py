"""What a tenant, a base or a domain may be called."""

from __future__ import annotations

import re

from hplm.errors import ConfigError, TenantNameError

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,62}[a-z0-9])?")


def check_name(name: str) -> str:
    """The name itself, where it may name a tenant. Raises TenantNameError, which does not repeat a long or odd name."""
    if not _NAME.fullmatch(name):
        raise TenantNameError(
            "a tenant name is 1 to 64 lower-case letters, digits, '-', '_' or '.', and starts and ends with a letter or digit"
        )
    return name


def check_name_of(key: str, name: str) -> None:
    """Raises TenantNameError for a `tenant`'s, ConfigError for another name that is not formed as a tenant's."""
    try:
        check_name(name)
    except TenantNameError as error:
        if key == "tenant":
            raise
        raise ConfigError(f"{key}: {str(error).replace('a tenant name', 'a name')}") from None
