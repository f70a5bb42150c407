"""What stands for something real: a clock that is set by hand, an error that is no Exception."""

from __future__ import annotations

from dataclasses import dataclass


class Panic(BaseException):
    """As a library in Rust has it, such as the tokenizer."""


@dataclass
class ManualClock:
    """Seconds that pass when told."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
