"""What a test sees of a running server from outside: processes and memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from hplm.core.settings import BaseConfig
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds import dead_stubs

# `max_batch_size` of hbert_upper, and by how many bytes its segment grows at a time.
TRITON_BATCH = 64
SEGMENT_STEP = 1 << 20


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def pages_of(pid: int) -> dict[str, int]:
    """VmRSS of a process, and what its server's segments in /dev/shm take, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    segments = set(re.findall(r"/dev/shm/hplm-triton\S+", Path(f"/proc/{pid}/maps").read_text()))
    shared = sum(os.stat(path).st_blocks * 512 for path in segments)
    return {"rss": 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0]), "shm": shared}


def segment_growth(shape: BaseConfig) -> int:
    """By how many bytes a stage's segment may yet grow: to the fullest batch that Triton hands over, by chance late."""
    hidden_and_tokens = shape.max_tokens * (2 * shape.hidden_size + 3 * 4)
    return TRITON_BATCH * hidden_and_tokens + SEGMENT_STEP


def processor_time() -> tuple[int, int]:
    """Of all processors since the machine was started: what other guests of its host had of it, and all; in ticks."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def session_of(server: TritonServer) -> dict[int, str]:
    """Processes of the server's session that still run, and what they are."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == server.process.pid and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def stubs_of(server: TritonServer) -> dict[str, int]:
    """Process of each of our two stages."""
    return {model: pid for pid, model in dead_stubs.stubs_of(server.process.pid).items()}
