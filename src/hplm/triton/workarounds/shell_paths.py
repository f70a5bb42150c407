"""Triton passes paths of models and backends to a shell without quotes.

Behaviour: a path with a space or another character that a shell interprets starts no stub.
Switched off: never; such a path is refused, or replaced by a symbolic link.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from hplm.errors import StartError


def is_safe(path: Path) -> bool:
    """Return whether a shell takes the path as one word without quotes."""
    return shlex.quote(str(path)) == str(path)


def check_path(path: Path, option: str) -> None:
    """Raise StartError, which names `option`, if the path is not safe for a shell."""
    if not is_safe(path):
        raise StartError(
            f"Triton starts nothing from {str(path)!r}, because a shell would take some of its characters apart; "
            f"move it, or give {option} a symbolic link to it with a plain name"
        )
