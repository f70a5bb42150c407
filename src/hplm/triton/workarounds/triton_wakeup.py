"""Has Triton look at what it has kept from a stage."""

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
from hplm.triton.bridge import translate
from hplm.triton.workarounds.wakeup_times import WakeupTimes

# A request that comes during a call is answered only when a later one has Triton look.
MOST_WAITING = 16
# As little as can be: what Triton looks at has waited for longer.
TIMEOUT_US = 1
# One that has no answer for so long never gets any, and says nothing of who waits: two seconds was the longest seen.
LOST_AFTER_S = 10.0
# So many one after another that came to the stage: this Triton is another than we know.
MOST_HANDED_OVER = 20
# For what is under way at the end.
STOP_S = 2.0


class TritonWakeup:
    """Sends its model a request after a call that no other follows, where Triton may keep others.

    That is where their queue is bounded: who comes while a call lasts Triton 24.10 hands over when somebody comes after its
    end, or after half a second. The request has expired when Triton looks at it, so that no call comes of it, in which others
    would be kept: the model's config has to let requests say when they expire. `inputs`: any that it takes.
    """

    def __init__(self, args: Mapping[str, str], inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        self._model, self._version = args["model_name"], int(args["model_version"])
        self._inputs = inputs
        self._wakes = WakeupTimes()
        self._changed = threading.Condition()
        policy = translate.queue_policy(args)
        expires = (
            policy.get("allow_timeout_override") and int(policy.get("default_timeout_microseconds", 0)) > TIMEOUT_US
        )
        self._is_over = not (translate.queue_size(args) and expires)
        if translate.queue_size(args) and not expires:
            self._say("its config does not let requests say when they expire; `hplm build export` writes one that does")
        self._sent = self._failed = self._waiting = self._handed_over = 0
        # By number, when each was sent that has no answer.
        self._unanswered: dict[int, float] = {}
        # Until when the loop waits.
        self._awake_s = math.inf
        self._senders = DaemonThreads(MOST_WAITING, "hplm-wake")
        self._thread = threading.Thread(target=self._loop, name="hplm-waker", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """Requests sent, and those that failed otherwise than by expiring."""
        return Counter(wakes=self._sent, failed_wakes=self._failed)

    @property
    def oldest_s(self) -> float:
        """When the oldest of its requests was sent that Triton has not looked at, by the monotonic clock; inf for none."""
        since_s = time.monotonic() - LOST_AFTER_S
        with self._changed:
            return min((sent_s for sent_s in self._unanswered.values() if sent_s > since_s), default=math.inf)

    def began(self) -> None:
        """A call has come."""
        with self._changed:
            self._wakes.began()

    def ended(self, *, of_many: bool) -> None:
        """It is about to return. `of_many`: so many requests come that others follow soon."""
        now_s = time.monotonic()
        with self._changed:
            self._wakes.ended(now_s, of_many=of_many)
            # Most calls are followed by another meanwhile: the loop is not woken for each.
            if self._wakes.due_s is not None and self._wakes.due_s < self._awake_s:
                self._changed.notify_all()

    def stop(self) -> None:
        """Send nothing more, and wait a while for what was sent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, STOP_S)
        self._thread.join(STOP_S)
        self._senders.close()

    def _loop(self) -> None:
        with self._changed:
            while not self._is_over:
                now_s, due_s = time.monotonic(), self._wakes.due_s
                if due_s is not None and due_s <= now_s:
                    self._sent += 1
                    self._waiting += 1
                    try:
                        self._senders.run(partial(self._send, self._sent, self._wakes.asked(now_s)))
                    except RuntimeError:
                        # No thread could be started; asked again, as where no answer comes.
                        self._waiting -= 1
                        self._failed += 1
                else:
                    self._awake_s = math.inf if due_s is None else due_s
                    self._changed.wait(None if due_s is None else due_s - now_s)

    def _send(self, number: int, after_call: int) -> None:
        is_handed_over = False
        with self._changed:
            self._unanswered[number] = time.monotonic()
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model,
                model_version=self._version,
                inputs=[pb_utils.Tensor(name, value) for name, value in self._inputs.items()],
                requested_output_names=[],
                timeout=TIMEOUT_US,
            ).exec()
            said = response.error().message() if response.has_error() else ""
            # What the stage says of it has a code of ours.
            is_handed_over = not said or from_wire(said) is not None
        except Exception as error:
            # As with shared memory full for a moment.
            said = str(error)
        with self._changed:
            self._waiting -= 1
            del self._unanswered[number]
            if said.endswith(wire.TRITON_EXPIRED):
                self._handed_over = 0
                self._wakes.looked(after_call)
            elif not said.endswith(wire.TRITON_FULL):
                self._failed += 1
                self._handed_over += is_handed_over
            gives_up = is_handed_over and self._handed_over == MOST_HANDED_OVER
            self._is_over = self._is_over or gives_up
            self._changed.notify_all()
        if gives_up:
            self._say(f"it is handed over what has expired: {said}")

    def _say(self, why: str) -> None:
        translate.log(f"{self._model}: who comes before a pause may wait for half a second in Triton: {why}")
