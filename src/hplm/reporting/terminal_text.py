"""Others' text on a terminal."""

from __future__ import annotations

import re

# Controls but tabs and ends of lines, what turns the direction of text around, and what no encoding has.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_IN_LINE = re.compile(_CONTROL.pattern + "|[\t\n]")


def visible(text: str, *, is_line: bool = False) -> str:
    """`text` with what would steer a terminal written as JSON writes it: JSON stays the same JSON.

    `is_line`: tabs and ends of lines too, which would forge another column or row.
    """
    return (_IN_LINE if is_line else _CONTROL).sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str) -> None:
    """Print it so, at once, on standard output."""
    print(visible(text), flush=True)
