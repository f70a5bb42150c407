"""Numbers that JSON has no word for."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """JSON values with null where a number is infinite or none: a latency that nobody had, a correlation of equal answers."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
