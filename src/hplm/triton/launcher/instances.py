"""How many processes of a model run beside each other, in its config.pbtxt as hplm writes it."""

from __future__ import annotations

import re

from hplm.errors import ConfigError

_COUNT = re.compile(r"\bcount: (\d+) kind")


def with_instances(config: str, count: int) -> str:
    """The text of a config.pbtxt with so many. Raises ConfigError where that is not as it was written."""
    changed, places = _COUNT.subn(f"count: {count} kind", config)
    if places != 1:
        raise ConfigError(
            f"config.pbtxt has {places} groups of instances as hplm writes them, and should have one: export anew"
        )
    return changed


def instances_in(config: str) -> int | None:
    """As many as it has; None where its groups are no longer as they were written."""
    found = _COUNT.findall(config)
    return int(found[0]) if len(found) == 1 else None
