"""Triton passes paths of models and backends to a shell without quotes, and its stubs read paths as ASCII.

Behaviour: a path with a space or another character that a shell interprets starts no stub. A stub's Python ignores the
locale, so a stub that opens a path with other characters than ASCII crashes.
Switched off: never; such a path is refused, or replaced by a symbolic link. A link does not help with ASCII, because the
stages resolve it.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from hplm.core.roles import served_bases
from hplm.errors import ConfigError, StartError


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


def check_ascii(repository: Path) -> None:
    """Raise StartError if the path of a model repository, or of its store, has other characters than ASCII."""
    paths = [repository.resolve()]
    for served in served_bases(repository):
        # Settings that cannot be read are named when the models are loaded.
        with suppress(ConfigError):
            paths.append(served.store_root)
    for path in paths:
        if not str(path).isascii():
            raise StartError(
                f"Triton's stages read paths as ASCII, so they cannot open {path}: move the folder to a path of ASCII "
                "characters (a symbolic link does not help, a bind mount does)"
            )
