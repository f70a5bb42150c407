"""Releases of Triton by server version, for workarounds whose fix cannot be detected."""

from __future__ import annotations

import re

# Major and minor number, as in "2.51.0".
ServerVersion = tuple[int, int]
RELEASE_24_10: ServerVersion = (2, 51)
RELEASE_24_11: ServerVersion = (2, 52)
RELEASE_26_05: ServerVersion = (2, 69)


def parse_version(text: str) -> ServerVersion | None:
    """Return the server version at the start of a text such as "2.51.0", None if there is none."""
    numbers = re.match(r"(\d+)\.(\d+)", text.strip())
    return (int(numbers[1]), int(numbers[2])) if numbers else None
