"""Has Triton look at what it has kept from a stage."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.scheduling.wakes import Wakes
from hplm.triton import translate

# Each waits for its answer, and one that came while a call lasted has it only when a later one was looked at.
MOST_WAITING = 16
# As little as can be: what Triton looks at has waited for longer.
TIMEOUT_US = 1
# What Triton says of a request that has waited for its `timeout`, and of one that finds no place: somebody else has come then.
LOOKED = ("Request timeout expired", "Exceeds maximum queue size")
# One after another that Triton handed over, or would not take: this Triton is another than we know.
MOST_FAILED = 20


class Waker:
    """Sends its model a request after a call that no other follows, where Triton may keep others.

    That is where their queue is bounded: who comes while a call lasts Triton 24.10 hands over when somebody comes after its
    end, or after half a second. The request has expired when Triton looks at it, so that no call comes of it, in which others
    would be kept: the model's config has to let requests say when they expire. `inputs`: any that it takes.
    """

    def __init__(self, args: Mapping[str, str], inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        self._model, self._version = args["model_name"], int(args["model_version"])
        self._inputs = inputs
        self._wakes = Wakes()
        self._changed = threading.Condition()
        policy = translate.queue_policy(args)
        expires = (
            policy.get("allow_timeout_override") and int(policy.get("default_timeout_microseconds", 0)) > TIMEOUT_US
        )
        self._is_over = not (translate.queue_size(args) and expires)
        if translate.queue_size(args) and not expires:
            self._say("its config does not let requests say when they expire; `hplm build export` writes one that does")
        self._sent = self._failed = self._failed_in_a_row = 0
        self._pool = ThreadPoolExecutor(MOST_WAITING, "hplm-wake")
        self._thread = threading.Thread(target=self._loop, name="hplm-waker", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """Requests sent, and those that failed otherwise than by expiring."""
        return Counter(wakes=self._sent, failed_wakes=self._failed)

    def began(self) -> None:
        """A call has come."""
        with self._changed:
            self._wakes.began()

    def ended(self, *, of_many: bool) -> None:
        """It is about to return. `of_many`: so many requests come that others follow soon."""
        with self._changed:
            self._wakes.ended(time.monotonic(), of_many=of_many)
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
                    self._sent += 1
                    self._pool.submit(self._send, self._wakes.asked(time.monotonic()))
            if left_s > 0:
                # Most calls are followed by another meanwhile: not woken for each.
                time.sleep(left_s)

    def _send(self, after_call: int) -> None:
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model,
                model_version=self._version,
                inputs=[pb_utils.Tensor(name, value) for name, value in self._inputs.items()],
                requested_output_names=[],
                timeout=TIMEOUT_US,
            ).exec()
            said = response.error().message() if response.has_error() else "it was handed over"
        except Exception as error:
            said = str(error)
        with self._changed:
            if said.endswith(LOOKED):
                self._failed_in_a_row = 0
                self._wakes.looked(after_call)
                return
            self._failed += 1
            self._failed_in_a_row += 1
            gives_up = self._failed_in_a_row == MOST_FAILED
            self._is_over = self._is_over or gives_up
        if gives_up:
            self._say(said)

    def _say(self, why: str) -> None:
        translate.log(f"{self._model}: who comes before a pause may wait for half a second in Triton: {why}")
