"""How often tests repeat the same events: less often in `make test`, in full in `make test-long`.

Every kind of event occurs in both. `HPLM_TEST_LONG=1` in the environment chooses the full numbers.
"""

from __future__ import annotations

import os
from typing import TypeVar

Number = TypeVar("Number", int, float)
IS_LONG = os.environ.get("HPLM_TEST_LONG") == "1"


def repetitions(usual: Number, full: Number) -> Number:
    """Return the number of repetitions that this run makes."""
    return full if IS_LONG else usual
