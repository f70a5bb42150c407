"""If shared memory has no room for one answer of a call, Triton fails all answers of the call.

Behaviour: the answers that `execute` returns lie in shared memory at the same time.
Workaround: answers leave together only while shared memory has room to spare, and only up to MOST_BYTES. Otherwise each is
sent by itself.
Switched off: harmless; single answers cost a round trip each.
"""

from __future__ import annotations

import shutil

from hplm.runtime.process import SHARED_MEMORY

# Bytes of the answers that leave with one call.
MOST_BYTES = 4_000_000
# Bytes of shared memory that must be free.
LEAST_ROOM = 4 * MOST_BYTES


def has_room() -> bool:
    """Return whether shared memory has room for all answers of a call."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > LEAST_ROOM
    except OSError:
        return False
