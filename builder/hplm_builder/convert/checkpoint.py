"""Checkpoints of long trainings: one a minute, and one when the process is told to end. The same command continues from it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hplm.errors import DataError, StoppingError
from hplm.runtime.crash_points import stop_point
from hplm.store.artifact import sync

log = logging.getLogger(__name__)

# Seconds between two checkpoints of a training: the work that a killed process loses at most.
EVERY_S = 60.0
# Rises with what the checkpoints of a training hold.
FORMAT = 1
_folder: ContextVar[Path | None] = ContextVar("folder of checkpoints", default=None)


@contextmanager
def checkpoints_in(folder: Path) -> Iterator[None]:
    """Let the trainings of the block keep their checkpoints in `folder`, see `Checkpoint.of`. The caller removes the folder."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class Checkpoint:
    """A checkpoint file. `run` identifies the training: settings, and digests of everything that it starts from.

    With `path` None nothing is kept. A checkpoint that is `precious` is not replaced by that of another run.
    """

    def __init__(
        self,
        path: Path | None,
        run: Mapping[str, Any],
        *,
        precious: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.run = path, {"format": FORMAT, **run}
        self._precious, self._clock = precious, clock
        self._state: Callable[[], dict[str, Any]] | None = None
        self._written_s = 0.0
        self._handlers: dict[int, Any] = {}
        self._signal: int | None = None

    @classmethod
    def of(cls, name: str, run: Callable[[], Mapping[str, Any]]) -> Checkpoint:
        """Return the checkpoint of a training in the folder of `checkpoints_in`; outside of its block nothing is kept.

        Each `run` has a file of its own. `run` is called only if something is kept, because it may read all features.
        """
        folder = _folder.get()
        if folder is None:
            return cls(None, {})
        values = json.loads(json.dumps(run()))
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return cls(folder / f"{name.replace(' ', '-')}-{digest[:16]}.pt", values)

    @contextmanager
    def keeping(self, state: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Keep `state()` while the block lasts, a loop that calls `reached` after each step.

        SIGINT and SIGTERM act at the end of a step or of the block, once the checkpoint is written; a second signal acts at
        once. StoppingError must be raised between two steps only. Signals that the process handles in another way are left
        alone.
        """
        if self.path is None:
            yield
            return
        self._state, self._written_s, self._signal = state, self._clock(), None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._handlers[number] = signal.signal(number, self._hold)
        try:
            yield
        except StoppingError:
            self.save(state())
            raise
        else:
            if self._signal is not None:
                self.save(state())
        finally:
            self._state = None
            self._restore_handlers()
            if self._signal is not None:
                # The signal came after the last step.
                number, self._signal = self._signal, None
                signal.raise_signal(number)

    def reached(self) -> None:
        """Write a checkpoint if one is due, between two steps. Let a signal that came during the step act after it."""
        if self._state is None:
            return
        stop_point()
        if self._signal is not None:
            self.save(self._state())
            log.warning("stopped: the same command continues from %s", self.path)
            number, self._signal = self._signal, None
            signal.raise_signal(number)
        elif self._clock() - self._written_s >= EVERY_S:
            self.save(self._state())

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint by `state`, of tensors and plain values. If it raises OSError, the old checkpoint stays."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            torch.save({"run": self.run, "state": state}, partial)
            sync(partial)
            partial.replace(self.path)
        except RuntimeError as error:
            # torch raises RuntimeError if the disk is full.
            raise OSError(errno.EIO, "the training's state cannot be written", str(self.path)) from error
        finally:
            partial.unlink(missing_ok=True)
        self._written_s = self._clock()

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return the state of this run; None, with a warning, if the file is damaged or another run's. None without a file.

        Raises DataError if a precious checkpoint is another run's.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            saved = torch.load(self.path, map_location=device, weights_only=True)
            run, state = saved["run"], saved["state"]
        except Exception as error:
            # torch raises errors of many types for damaged files.
            log.warning("the checkpoint %s is damaged (%s): the training begins again", self.path, type(error).__name__)
            return None
        if run != self.run:
            words = f"{self.path} is of another model, text or settings"
            if self._precious:
                raise DataError(f"{words}: remove it to start anew")
            log.warning("%s: the training begins again and replaces it", words)
            return None
        kept: dict[str, Any] = state
        if "step" in kept:
            log.warning("continues after step %d, from %s", kept["step"], self.path)
        return kept

    def remove(self) -> None:
        """Remove the file after the run, and its folder if it is empty."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()

    def _hold(self, number: int, _: object) -> None:
        self._signal = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM end this command as Ctrl-C does: at the end of a step, see `Checkpoint.keeping`, or else at once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of values in hexadecimal digits, which tells what trainings start from apart."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator for a device, which `set_random_state` takes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Let torch's generator for a device continue from `state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state.cpu())
