"""Triton overflows its stack on deeply nested JSON and on bodies that come in very many pieces.

Behaviour: Triton parses JSON by recursion and keeps the pieces of a body on the stack. With the usual 8 MiB, a nested or
chopped body of some hundred KB ends the server.
Releases: 24.10 and later. 25.05 limits the nesting, 26.05 the number of pieces.
Switched off: by server version, from 26.05 on.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from hplm.triton.releases import RELEASE_26_05, ServerVersion

# Address space of each thread's stack. Only pages that a thread touches take memory.
STACK_BYTES = 256 << 20


def is_needed(version: ServerVersion | None) -> bool:
    """Return whether this server needs larger stacks. A server of unknown version gets them."""
    return version is None or version < RELEASE_26_05


def stack_limits() -> tuple[int, int] | None:
    """Return limits that give the threads of a new process stacks of STACK_BYTES, None if the system forbids it.

    A system that does not overcommit memory would count all of the address space.
    """
    with suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return None
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    return None if hard != resource.RLIM_INFINITY and hard < STACK_BYTES else (STACK_BYTES, hard)
