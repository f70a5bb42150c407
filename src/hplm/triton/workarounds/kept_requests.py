"""Triton keeps requests that arrive during a call until another request arrives after the call.

Behaviour: if a model's queue is bounded (`max_queue_size`), Triton dispatches a request that arrived during a call only
when another request arrives after the call, or after half a second.
Releases: 24.10; no release that mends it was seen. (26.08 mends a related starvation in the dynamic batcher.)
Workaround: after each call the stage sends itself a no-op request with a timeout that passes at once. Triton dispatches the
requests that it kept, and answers that the no-op request has expired. No call comes of it.
Switched off: if Triton runs NO_OPS_RUN no-op requests in a row instead of letting them expire; if the queue is unbounded; or
if the model's config does not let requests set their own timeout.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hplm.core import wire
from hplm.errors import from_wire
from hplm.runtime.daemon_threads import DaemonThreads
from hplm.triton.workarounds.wakeup_times import WakeupTimes

# No-op requests that may be unanswered at once: one that arrives during a call is answered only when a later one is sent.
MOST_UNANSWERED = 16
# The least timeout that a request may have.
TIMEOUT_US = 1
# A no-op request without an answer for so long never gets one, and says nothing about requests that wait. The longest
# answer that was seen took two seconds.
LOST_AFTER_S = 10.0
# No-op requests in a row that the stage itself may receive before the workaround is switched off.
NO_OPS_RUN = 20
# Seconds to wait at the end for no-op requests that are sent.
STOP_S = 2.0


class TritonWakeup:
    """Sends no-op requests to a stage's own model when no call has followed the last one."""

    def __init__(
        self, args: Mapping[str, str], queue_policy: Mapping[str, Any], inputs: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """`queue_policy` is the model's (`translate.queue_policy`), `inputs` any tensors that the model accepts."""
        self._model, self._version = args["model_name"], int(args["model_version"])
        self._inputs = inputs
        self._times = WakeupTimes()
        self._changed = threading.Condition()
        is_bounded = int(queue_policy.get("max_queue_size", 0)) > 0
        lets_expire = (
            queue_policy.get("allow_timeout_override")
            and int(queue_policy.get("default_timeout_microseconds", 0)) > TIMEOUT_US
        )
        self._is_off = not (is_bounded and lets_expire)
        if is_bounded and not lets_expire:
            self._log_off(
                "its config lets no request set its timeout; "
                "`hplm build export --models MODELS --keep-settings --name NAME` writes a config that does"
            )
        self._sent = self._failed = self._run = 0
        # No-op requests that a thread is about to send or waits for.
        self._unfinished = 0
        # By number: when each unanswered no-op request was sent.
        self._sent_at_s: dict[int, float] = {}
        # When the loop wakes up by itself.
        self._wakes_s = math.inf
        self._senders = DaemonThreads(MOST_UNANSWERED, "hplm-wake")
        self._thread = threading.Thread(target=self._loop, name="hplm-waker", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """No-op requests that were sent (`wakes`), and those that failed in another way than by expiring."""
        return Counter(wakes=self._sent, failed_wakes=self._failed)

    @property
    def oldest_s(self) -> float:
        """When the oldest unanswered no-op request was sent, on the monotonic clock; infinity if all are answered."""
        since_s = time.monotonic() - LOST_AFTER_S
        with self._changed:
            return min((sent_s for sent_s in self._sent_at_s.values() if sent_s > since_s), default=math.inf)

    def call_began(self) -> None:
        """Note that Triton calls the stage."""
        with self._changed:
            self._times.call_began()

    def call_ended(self, *, is_busy: bool) -> None:
        """Note that the call is about to return. `is_busy`: requests arrive so fast that another call comes soon."""
        now_s = time.monotonic()
        with self._changed:
            self._times.call_ended(now_s, is_busy=is_busy)
            # Most calls are followed by another soon, so the loop is woken only for an earlier time.
            if self._times.due_s is not None and self._times.due_s < self._wakes_s:
                self._changed.notify_all()

    def stop(self) -> None:
        """Send nothing more, and wait up to STOP_S for no-op requests that were sent."""
        with self._changed:
            self._is_off = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unfinished, STOP_S)
        self._thread.join(STOP_S)
        self._senders.close()

    def _loop(self) -> None:
        with self._changed:
            while not self._is_off:
                now_s, due_s = time.monotonic(), self._times.due_s
                if due_s is not None and due_s <= now_s:
                    self._sent += 1
                    self._unfinished += 1
                    try:
                        self._senders.run(partial(self._send, self._sent, self._times.sent(now_s)))
                    except RuntimeError:
                        # No thread could be started. The next no-op request is due as after one without an answer.
                        self._unfinished -= 1
                        self._failed += 1
                else:
                    self._wakes_s = math.inf if due_s is None else due_s
                    self._changed.wait(None if due_s is None else due_s - now_s)

    def _send(self, number: int, call: int) -> None:
        """Send no-op request `number`, which follows call number `call`, and wait for its answer."""
        has_run = False
        with self._changed:
            self._sent_at_s[number] = time.monotonic()
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model,
                model_version=self._version,
                inputs=[pb_utils.Tensor(name, value) for name, value in self._inputs.items()],
                requested_output_names=[],
                timeout=TIMEOUT_US,
            ).exec()
            message = response.error().message() if response.has_error() else ""
            # An error of the stage itself has one of hplm's codes.
            has_run = not message or from_wire(message) is not None
        except Exception as error:
            # For example, shared memory may be full for a moment.
            message = str(error)
        with self._changed:
            self._unfinished -= 1
            del self._sent_at_s[number]
            if message.endswith(wire.TRITON_EXPIRED):
                self._run = 0
                self._times.expired(call)
            elif not message.endswith(wire.TRITON_FULL):
                self._failed += 1
                self._run += has_run
            gives_up = has_run and self._run == NO_OPS_RUN
            self._is_off = self._is_off or gives_up
            self._changed.notify_all()
        if gives_up:
            self._log_off(f"Triton runs no-op requests that have expired: {message}")

    def _log_off(self, reason: str) -> None:
        pb_utils.Logger.log_info(
            f"{self._model}: a request that arrives before a pause may wait half a second in Triton, because {reason}"
        )
