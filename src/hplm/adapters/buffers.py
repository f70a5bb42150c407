"""Memory for adapters as they come and go, apart from what the computation allocates.

A fleet's adapters are of one size, near a megabyte each, loaded and let go of hundreds of times a second. From the C library's
own heap each left a hole of which a piece went to something else, and the computing thread searched among them.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

# Kept for whoever comes next; what is beyond goes back to the system.
MOST_FREE = 64


class Buffers:
    """Arrays of one shape and type, uninitialised; the memory of one is given out again when nothing refers to it any more."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._bytes = int(np.prod(shape)) * self._dtype.itemsize
        self._free: deque[mmap.mmap] = deque(maxlen=MOST_FREE)

    def take(self) -> npt.NDArray[np.uint16]:
        """Safe to call from several threads."""
        try:
            pages = self._free.pop()
        except IndexError:
            # Private ones that lie side by side the kernel joins: of shared ones it has 65,530 at most, each on its own.
            pages = mmap.mmap(-1, self._bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # All views refer to this, whichever of them lives longest.
        memory = (ctypes.c_char * self._bytes).from_address(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        weakref.finalize(memory, self._free.append, pages).atexit = False
        return np.frombuffer(memoryview(memory), self._dtype).reshape(self._shape)
