"""What this process may use where it stands in a cgroup with limits: a container's, a unit's of systemd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def limits(name: str, root: Path, own: Path) -> Iterator[list[str]]:
    """The words of the file `name` of this process's cgroup and of each above it, as far as they have one.

    A container sees its own as the root. Nothing where cgroups are of version 1.
    """
    folder = root
    with suppress(OSError):
        for line in own.read_text().splitlines():
            if line.startswith("0::/"):
                folder = root / line.removeprefix("0::/")
    for one in (folder, *folder.parents):
        if one.is_relative_to(root):
            with suppress(OSError):
                yield (one / name).read_text().split()
