"""Checkpoints of an interrupted training: a file, written beside its place and renamed."""

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
    """Return the path of a checkpoint of work for a store. Stores have different paths for the same `name`."""
    digest = hashlib.sha256(str(store.root.resolve()).encode()).hexdigest()
    return cache_dir() / "work" / f"{digest[:8]}-{name}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file. `run` identifies the training: settings, and digests of everything that it starts from."""

    path: Path
    run: dict[str, Any]

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint by `state`, of tensors and plain values. If it raises OSError, the old checkpoint stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            torch.save({"run": self.run, "state": state}, partial)
            partial.replace(self.path)
        except RuntimeError as error:
            # torch raises RuntimeError if the disk is full.
            raise OSError(errno.EIO, "the training's state cannot be written", str(self.path)) from error
        finally:
            partial.unlink(missing_ok=True)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return the state of this run; None if there is no file, or if the file is another run's or damaged."""
        try:
            saved = torch.load(self.path, map_location=device, weights_only=True)
        except Exception:
            # torch raises errors of many types for damaged files. In each case the run starts anew.
            return None
        if not isinstance(saved, dict) or saved.get("run") != self.run:
            return None
        state: dict[str, Any] = saved["state"]
        return state

    def remove(self) -> None:
        """Remove the file after the run."""
        self.path.unlink(missing_ok=True)
