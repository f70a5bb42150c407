"""One range of addresses for the values of several tables, so that one gather takes from any of them.

A look-up uses branch, parent, root and overlay. If each table's values had an address of their own, each table would cost
another pass over the result. Mapped one behind the other into one range, a chain of any depth is one `embedding_bag`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float16]
_FIXED = 0x10  # MAP_FIXED, which the mmap module does not name
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Arena:
    """Mapped `vectors` `[V, H]`: file i's begin at `starts[i]`, the spare ones, zero at first, at `spare`."""

    vectors: Vectors
    starts: tuple[int, ...]
    spare: int

    @staticmethod
    def of(files: Sequence[tuple[int, int]], spare_vectors: int, hidden_size: int) -> Arena:
        """Map files and room for `spare_vectors` behind them. Raises OSError.

        `files` are open file descriptors, which may be closed afterwards, and the number of vectors in each. A file must hold
        that many: reading behind its end kills the process. The range is unmapped once nothing refers to `vectors`.
        """
        vector_bytes = 2 * hidden_size
        # A file's place must be a multiple of the page size, for the mapping, and of a vector's size.
        step = math.lcm(mmap.PAGESIZE, vector_bytes)
        places = [0]
        for _, count in files:
            places.append(places[-1] + -(-count * vector_bytes // step) * step)
        total = places[-1] + max(1, spare_vectors) * vector_bytes
        base = _mmap(None, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
        memory = (ctypes.c_char * total).from_address(base)
        weakref.finalize(memory, _munmap, base, total).atexit = False
        for (file, count), place in zip(files, places, strict=False):
            if count:
                # Copy-on-write, but never written: all processes that map the file share the pages.
                _mmap(base + place, count * vector_bytes, mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE, file)
        vectors = np.frombuffer(memoryview(memory), dtype=np.float16).reshape(-1, hidden_size)
        starts = [place // vector_bytes for place in places]
        return Arena(vectors, tuple(starts[:-1]), starts[-1])


def _mmap(address: int | None, length: int, flags: int, file: int) -> int:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mapped = function(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {length} bytes: {os.strerror(number)}")
    assert isinstance(mapped, int)
    return mapped


def _munmap(address: int, length: int) -> None:
    function = ctypes.CDLL(None).munmap
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    function(address, length)
