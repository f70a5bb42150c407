"""A stage's own requests to itself, with which Triton hands over what it has kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.scheduling.wakes import Wakes
from hplm.triton import translate

# Each waits for its answer, and one that reaches Triton while a call lasts is answered only when a later one wakes it.
MOST_WAITING = 16


class Waker:
    """Sends its model a request after a call that no other follows, where Triton may keep others.

    That is where their queue is bounded: who comes while a call lasts Triton 24.10 hands over with who comes after its end, or
    after half a second. `inputs`: any that the model's config takes.
    """

    def __init__(self, args: Mapping[str, str], inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        self._model, self._version = args["model_name"], int(args["model_version"])
        self._inputs = inputs
        self._wakes = Wakes()
        self._requests = 0
        self._changed = threading.Condition()
        self._is_over = not translate.queue_size(args)
        self._sent = self._failed = 0
        self._pool = ThreadPoolExecutor(MOST_WAITING, "hplm-wake")
        self._thread = threading.Thread(target=self._loop, name="hplm-waker", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """Requests sent, which Triton counts as a client's, and those that failed."""
        return Counter(wakes=self._sent, failed_wakes=self._failed)

    def began(self, requests: Sequence[Any]) -> int:
        """A call has come. How many of its requests are clients'."""
        self._requests = len(requests) - sum(map(translate.is_wake, requests))
        with self._changed:
            self._wakes.began()
        return self._requests

    def ended(self, *, of_many: bool) -> None:
        """The call that began last is about to return. `of_many`: so many come that others follow soon."""
        with self._changed:
            self._wakes.ended(self._requests, time.monotonic(), of_many=of_many)
            self._changed.notify()

    def stop(self) -> None:
        """Wait for what was sent, and end all threads."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        self._pool.shutdown()

    def _loop(self) -> None:
        while not self._is_over:
            with self._changed:
                due_s = self._wakes.due_s
                if due_s is None:
                    self._changed.wait()
                    continue
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    self._wakes.asked(time.monotonic())
            if left_s <= 0:
                self._pool.submit(self._send)
            else:
                # Most calls are followed by another meanwhile: not woken for each.
                time.sleep(left_s)

    def _send(self) -> None:
        with self._changed:
            self._sent += 1
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model,
                model_version=self._version,
                request_id=translate.WAKE_ID,
                inputs=[pb_utils.Tensor(name, value) for name, value in self._inputs.items()],
                requested_output_names=[],
            ).exec()
            failure = response.error().message() if response.has_error() else ""
        except Exception as error:
            failure = str(error)
        if failure:
            with self._changed:
                self._failed += 1
                is_first = self._failed == 1
            if is_first:
                translate.log(f"{self._model}: who comes before a pause may wait half a second in Triton: {failure}")
