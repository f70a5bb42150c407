"""The name of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Return the processor's name, with family and model if the system tells them.

    Cloud hosts give processors of several generations the same name.
    """
    name = platform.processor() or platform.machine()
    if not CPUINFO.is_file():
        return name
    first = CPUINFO.read_text().partition("\n\n")[0]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:
        return name
    more = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{fields['model name']} ({more})" if more else fields["model name"]
