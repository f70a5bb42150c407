"""Triton takes the header of its restricted APIs as an argument only, and every user of the machine may read arguments.

Behaviour: `--http-restricted-api` has the secret value of a header. `ps` shows it for as long as Triton runs.
Workaround: once Triton has read its arguments, the launcher overwrites the secret in the memory that `ps` shows. Until then,
for some tenths of a second of each start, other users of the machine can read the secret.
Switched off: harmless.
"""

from __future__ import annotations

from hplm.runtime.process import stat_of

# Indices in `stat_of`: the addresses of a process's arguments. Both are 0 if the system does not tell them.
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46
_FILLER = b"*"


def hide(pid: int, secret: str) -> bool:
    """Overwrite a secret in the arguments of a child process. Return False if the system does not allow it.

    Call it only when the child has read its arguments.
    """
    hidden = secret.encode()
    try:
        start, end = (int(stat_of(pid)[index]) for index in (_ARGUMENTS_START, _ARGUMENTS_END))
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            at = arguments.find(hidden)
            while at >= 0:
                memory.seek(start + at)
                memory.write(_FILLER * len(hidden))
                at = arguments.find(hidden, at + len(hidden))
        with open(f"/proc/{pid}/cmdline", "rb") as shown:
            return hidden not in shown.read()
    except (OSError, ValueError, IndexError):
        return False
