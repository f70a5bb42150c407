"""Triton tells its stubs that it ends only when no request is running any more, which under load is never.

Workaround: a file in shared memory tells the stages (`hplm.runtime.process.tell_to_stop`). They then refuse requests that
wait and requests that arrive, so that their models can be unloaded.
Switched off: harmless; a Triton that tells its stubs at once loses TELL_S at its end.
"""

from __future__ import annotations

import logging
import time

from hplm.runtime.process import tell_to_stop

# Time for the stages to see the file: they look ten times a second.
TELL_S = 0.3


def tell_stages(server_pid: int) -> None:
    """Make the stages of a Triton process refuse requests with STOPPING, and wait until they have seen it."""
    try:
        tell_to_stop(server_pid)
    except OSError as error:
        logging.getLogger(__name__).warning("the stages cannot be told that the server ends: %s", error)
    else:
        time.sleep(TELL_S)
