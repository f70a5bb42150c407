"""The limits of this process's cgroup, for example those of a container or of a systemd unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def limits(name: str, root: Path, own: Path) -> Iterator[list[str]]:
    """Yield the words of the file `name` in this process's cgroup and in each cgroup above it, if there is such a file.

    A container sees its own cgroup as the root. With cgroups of version 1 this yields nothing.
    """
    folder = root
    with suppress(OSError):
        for line in own.read_text().splitlines():
            if line.startswith("0::/"):
                folder = root / line.removeprefix("0::/")
    for cgroup in (folder, *folder.parents):
        if cgroup.is_relative_to(root):
            with suppress(OSError):
                yield (cgroup / name).read_text().split()
