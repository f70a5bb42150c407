"""Train, dev and test by a hash of the example's group: the same on every machine, whatever the order of the file."""

from __future__ import annotations

import hashlib


def split_of(group: str) -> str:
    """`train` (80 %), `dev` or `test` (10 % each) of a group key; examples that are near copies share a group."""
    bucket = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little") % 10
    return "dev" if bucket == 8 else "test" if bucket == 9 else "train"
