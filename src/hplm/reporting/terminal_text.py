"""Printing text from elsewhere, such as tenants' texts, safely on a terminal."""

from __future__ import annotations

import re

# Control characters except tab and newline, marks that change the direction of text, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_IN_LINE = re.compile(_CONTROL.pattern + "|[\t\n]")


def visible(text: str, *, is_line: bool = False) -> str:
    """Return `text` with characters that control a terminal as JSON escapes, so that JSON stays the same JSON.

    With `is_line`, tabs and newlines are escaped too, because they would forge another column or row.
    """
    return (_IN_LINE if is_line else _CONTROL).sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: str) -> None:
    """Print `visible` text on standard output and flush it."""
    print(visible(text), flush=True)
