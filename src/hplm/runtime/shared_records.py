"""A file in shared memory with one fixed-size record for each name, which several processes read and change."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Bytes before the marks. Byte 0 is the lock of the table of names; users of the file may lock further bytes.
HEADER_BYTES = 4096
# The most records that are looked at for a name. The table is full for a name that finds no room among them.
MOST_PROBES = 128
# Bytes of a name, as many as a tenant's name may have letters.
NAME_BYTES = 64
# Magic, bytes of a record's body, number of records.
_HEADER = struct.Struct("=16sII")
_MAGIC = b"hplm-records-1"
# `struct flock` of a 64-bit Linux.
_FLOCK = struct.Struct("hhqqi4x")
# Bytes of records that are read at once when the whole table is searched.
_READ_BYTES = 1 << 20
# Seconds between two tries to take a lock. A lock is held for microseconds.
RETRY_S = 0.0001
# Seconds after which a lock counts as held by a stopped process. On a crowded machine a running process may keep a lock for
# some tenths of a second.
STUCK_S = 2.0


class SharedRecords:
    """The records of a file. Safe to use from several threads and processes of one user.

    A record is found by its name. Names are never removed, so that a record's index never changes. A lock belongs to an open
    file, not to a process or a thread, and the system releases it when its holder dies, however it dies.

    A record takes memory from its name on. Until then the file has a hole there, which may not be touched in `memory`: even
    a read would allocate the page, and end the process if shared memory is full. So names are read and written by calls.

    Raises OSError if the file cannot be made or is another user's.
    """

    def __init__(self, path: Path, body_bytes: int, capacity: int) -> None:
        self._path = path
        self._body_bytes = body_bytes
        self._stride = NAME_BYTES + body_bytes
        # A byte for each record stands before the records.
        self._first = HEADER_BYTES + capacity
        self.capacity = capacity
        self._mutex = threading.Lock()
        self._indices: dict[str, int] = {}
        self._file = self._open()
        self.memory = mmap.mmap(self._file, self._file_bytes)

    @property
    def _file_bytes(self) -> int:
        return self._first + self.capacity * self._stride

    def close(self) -> None:
        """Close the file, and so release its locks."""
        with self._mutex:
            self.memory.close()
            os.close(self._file)

    def touch(self) -> None:
        """Set the file's time of change to now, because writes to mapped memory do not."""
        with suppress(OSError):
            os.utime(self._file)

    def find(self, name: str) -> int | None:
        """Return the index of a name's record, None if it has none."""
        if (index := self._indices.get(name)) is not None:
            return index
        raw = name.encode()
        for index in self._probes(raw):
            known = self._name(index)
            if known == raw:
                self._indices[name] = index
                return index
            if not known:
                break
        return None

    def find_or_add(self, name: str) -> int | None:
        """Return the index of a name's record, which begins as zeros. Return None if there is no room for it."""
        if (index := self.find(name)) is not None:
            return index
        raw = name.encode()
        assert 0 < len(raw) <= NAME_BYTES
        with self.locked(0):
            for index in self._probes(raw):
                known = self._name(index)
                if not known:
                    at = self._at(index)
                    try:
                        # Users touch the record in `memory`, so its pages must be there.
                        os.posix_fallocate(self._file, at, self._stride)
                        os.pwrite(self._file, raw, at)
                    except OSError:
                        return None
                if known in (raw, b""):
                    self._indices[name] = index
                    return index
        return None

    def body_at(self, index: int) -> int:
        """Return the offset in `memory` of a record's body."""
        return self._at(index) + NAME_BYTES

    def used(self) -> Iterator[int]:
        """Yield the indices of all records that have a name. Goes through the whole table."""
        step = max(1, _READ_BYTES // self._stride)
        for start in range(0, self.capacity, step):
            records = os.pread(self._file, min(step, self.capacity - start) * self._stride, self._at(start))
            for place, letter in enumerate(records[:: self._stride]):
                if letter:
                    yield start + place

    def name_of(self, index: int) -> str:
        """Return the name of a record."""
        return self._name(index).decode()

    def mark(self, index: int) -> None:
        """Mark a record for the process that reads marks."""
        self.memory[HEADER_BYTES + index] = 1

    def take_marks(self) -> list[int]:
        """Return the indices of the marked records, and remove their marks. A mark that is set meanwhile is not lost."""
        marks = self.memory[HEADER_BYTES : self._first]
        found, start = [], marks.find(1)
        while start >= 0:
            found.append(start)
            self.memory[HEADER_BYTES + start] = 0
            start = marks.find(1, start + 1)
        return found

    @contextmanager
    def locked_record(self, index: int) -> Iterator[None]:
        """Hold the lock of a record. Raises TimeoutError if a stopped process holds it."""
        with self.locked(self._at(index)):
            yield

    @contextmanager
    def locked(self, byte: int) -> Iterator[None]:
        """Hold the lock of a byte of the file. Raises TimeoutError if a stopped process holds it."""
        # Locks of an open file do not keep threads of one process apart.
        with self._mutex:
            until_s = None
            while not self._lock(byte, fcntl.F_WRLCK):
                now_s = time.monotonic()
                until_s = until_s or now_s + STUCK_S
                if now_s > until_s:
                    raise TimeoutError(f"a stopped process holds a lock of {self._path}")
                time.sleep(RETRY_S)
            try:
                yield
            finally:
                self._lock(byte, fcntl.F_UNLCK)

    def try_keep(self, byte: int) -> bool:
        """Take the lock of a byte until this file is closed. Return False if another open file holds it."""
        return self._lock(byte, fcntl.F_WRLCK)

    def is_locked(self, byte: int, count: int = 1) -> bool:
        """Return whether another open file, which is of a living process, holds the lock of any of `count` bytes."""
        asked = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0))
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _probes(self, raw: bytes) -> Iterator[int]:
        first = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
        for step in range(min(MOST_PROBES, self.capacity)):
            yield (first + step) % self.capacity

    def _name(self, index: int) -> bytes:
        return os.pread(self._file, NAME_BYTES, self._at(index)).rstrip(b"\0")

    def _at(self, index: int) -> int:
        return self._first + index * self._stride

    def _open(self) -> int:
        """Open the file, or make it. A file of another version is replaced; processes that have the old file open keep it."""
        header = _HEADER.pack(_MAGIC, self._body_bytes, self.capacity)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            file = os.open(self._path, flags, 0o600)
            try:
                status = os.fstat(file)
                if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                    raise PermissionError(f"{self._path} is of another user, or is no file")
                # The lock of the table, on a file that nobody else may have finished making.
                fcntl.fcntl(file, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
                if os.fstat(file).st_size == 0:
                    os.posix_fallocate(file, 0, self._first)
                    os.pwrite(file, header, 0)
                    os.ftruncate(file, self._file_bytes)
                if os.pread(file, len(header), 0) == header and os.fstat(file).st_size == self._file_bytes:
                    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))
                    return file
                with suppress(FileNotFoundError):
                    self._path.unlink()
            except BaseException:
                os.close(file)
                raise
            os.close(file)
