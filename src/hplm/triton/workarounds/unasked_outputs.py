"""A response with an output that the client did not ask for damages the memory of the stub.

Releases: seen with 24.10; no release that mends it is known.
Behaviour: while a response sender sends, Python's global lock is released. Triton then drops the outputs that nobody asked
for, and with each the last reference to its array. Other threads use Python at the same time, so the stub crashes sooner or
later, and with it often the whole server.
Workaround: a response holds only outputs that the client asked for.
Switched off: not safe until Triton drops outputs under the lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy.typing as npt


def asked_for(outputs: Mapping[str, npt.NDArray[Any]], names: Collection[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs whose name is among `names`."""
    return {name: value for name, value in outputs.items() if name in names}
