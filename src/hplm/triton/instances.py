"""How many processes of a model run beside each other, in its config.pbtxt as hplm writes it."""

from __future__ import annotations

import re

_COUNT = re.compile(r"\bcount: (\d+) kind")


def with_instances(config: str, count: int) -> str:
    """The text of a config.pbtxt with so many. Raises ValueError where that is not as it was written."""
    changed, places = _COUNT.subn(f"count: {count} kind", config)
    if places != 1:
        raise ValueError(f"{places} groups of instances as hplm writes them, where there should be one")
    return changed


def instances_in(config: str) -> int | None:
    """As many as it has; None where its groups are no longer as they were written."""
    found = _COUNT.findall(config)
    return int(found[0]) if len(found) == 1 else None
