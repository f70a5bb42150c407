"""Numbers that JSON cannot write."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return JSON values with null for infinity and NaN, for example the latency of no request."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
