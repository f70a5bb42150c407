"""Where an interrupted training goes on: one file, written beside its place and renamed."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hplm.reporting.packages import cache_dir
from hplm.store.layout import Store


def work_place(store: Store, name: str) -> Path:
    """Where work for a store keeps what it goes on from: several stores may have something of one name under way."""
    digest = hashlib.sha256(str(store.root.resolve()).encode()).hexdigest()
    return cache_dir() / "work" / f"{digest[:8]}-{name}"


@dataclass(frozen=True)
class Checkpoint:
    """`run` says of what the file is: settings and digests of everything that the training starts from."""

    path: Path
    run: dict[str, Any]

    def save(self, state: dict[str, Any]) -> None:
        """Replace what is there by `state`, of tensors and plain values. Raises OSError, and then keeps what is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            torch.save({"run": self.run, "state": state}, partial)
            partial.replace(self.path)
        except RuntimeError as error:
            # All that torch says of a disk that is full.
            raise OSError(errno.EIO, "the training's state cannot be written", str(self.path)) from error
        finally:
            partial.unlink(missing_ok=True)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The state of this very run; None where there is none, or the file is another run's or damaged."""
        try:
            saved = torch.load(self.path, map_location=device, weights_only=True)
        except Exception:
            # There is no saying what torch raises for damage. Beginning anew is right for all of it.
            return None
        if not isinstance(saved, dict) or saved.get("run") != self.run:
            return None
        state: dict[str, Any] = saved["state"]
        return state

    def remove(self) -> None:
        """The run is over: leave nothing behind."""
        self.path.unlink(missing_ok=True)
