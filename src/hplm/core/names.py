"""Valid names of tenants, bases and domains."""

from __future__ import annotations

import re

from hplm.errors import ConfigError, TenantNameError

_CHARACTER = re.compile("[a-z0-9_.-]")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,62}[a-z0-9])?")


def check_name(name: str) -> str:
    """Return a valid tenant name unchanged. Raises TenantNameError, which repeats one character of it."""
    if not _NAME.fullmatch(name):
        odd = next((place for place, character in enumerate(name) if not _CHARACTER.match(character)), None)
        where = "" if odd is None else f"; character {odd + 1} is {name[odd]!a}"
        raise TenantNameError(
            "a tenant name is 1 to 64 lower-case letters, digits, '-', '_' or '.', and starts and ends with a letter or digit"
            f"{where}"
        )
    return name


def check_name_of(key: str, name: str) -> None:
    """Check a name by the rules for tenants. Raises TenantNameError if `key` is `tenant`, else ConfigError with the key."""
    try:
        check_name(name)
    except TenantNameError as error:
        if key == "tenant":
            raise
        raise ConfigError(f"{key}: {str(error).replace('a tenant name', 'a name')}") from None
