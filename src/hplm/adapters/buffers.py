"""Memory for adapters that are loaded and dropped, apart from the memory of the computation.

A fleet's adapters have one size, near a megabyte each, and are loaded and dropped hundreds of times a second. In the C
library's heap a dropped adapter left a hole, and other memory took a piece of the hole. The computing thread then searched
the holes.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

# Free buffers that are kept for the next adapters. Further ones go back to the system.
MOST_FREE = 64


class Buffers:
    """A source of uninitialised arrays of one shape and type. An array's memory is reused once nothing refers to it."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._bytes = int(np.prod(shape)) * self._dtype.itemsize
        self._free: deque[mmap.mmap] = deque(maxlen=MOST_FREE)

    def take(self) -> npt.NDArray[np.uint16]:
        """Return an array. Safe to call from several threads."""
        try:
            pages = self._free.pop()
        except IndexError:
            # The kernel joins private mappings that touch. It does not join shared ones, and a process has at most 65,530.
            pages = mmap.mmap(-1, self._bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # All views refer to `memory`, so it lives as long as the last of them.
        memory = (ctypes.c_char * self._bytes).from_address(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        weakref.finalize(memory, self._free.append, pages).atexit = False
        return np.frombuffer(memoryview(memory), self._dtype).reshape(self._shape)
