"""The way of one text through the levels of its tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.cascade.dispatch import DETERMINISTIC, DispatchInput, draw_of
from hplm.cascade.plan import CascadePlan
from hplm.cascade.pruning import prune
from hplm.errors import CancelledError, DeadlineError, HplmError, InternalError, UnknownTenantError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.cascade.answers import CascadeAnswer, combined
from hplm.serving.cascade.cascade_counts import CascadeCounts
from hplm.serving.cascade.deadline_timer import Alarm, DeadlineTimer
from hplm.serving.cascade.recent_times import RecentTimes
from hplm.serving.request import NOT_CHARGED, Client, Request
from hplm.serving.routing.call_tensors import RouteAnswer, RouteInput
from hplm.serving.routing.model_route import LATE, ModelRoute, RouteRequest

CascadeRequest = Request[RouteInput, CascadeAnswer]
# Seconds before a text's deadline at which an answer has to leave so that the client gets it in time.
ANSWER_S = 0.005


class LevelClient(Client[RouteAnswer]):
    """The client of a text at a level: what the level asks about the client is asked of the request's own client."""

    def __init__(self, client: Client[CascadeAnswer]) -> None:
        self._client = client

    @property
    def is_over(self) -> bool:
        return self._client.is_over

    @property
    def waits_for_others(self) -> bool:
        return self._client.waits_for_others

    def is_cancelled(self) -> bool:
        return self._client.is_cancelled()


@dataclass(frozen=True)
class Equipment:
    """The parts of a stage that all its texts share.

    `finish` counts a text's answer or error and sends it to the text's client.
    """

    counts: CascadeCounts
    times: RecentTimes
    timer: DeadlineTimer
    finish: Callable[[CascadeRequest, CascadeAnswer | HplmError], None]


class Journey(LevelClient):
    """A text on its way. Each level answers this object, which replies to the text's client once.

    A level answers from its own threads; the deadline timer may end the journey meanwhile.
    """

    def __init__(
        self,
        request: CascadeRequest,
        tenant: str,
        plan: CascadePlan,
        routes: Sequence[ModelRoute],
        labels: Callable[[], Sequence[bytes] | None],
        alone: Callable[[], None],
        shared: Equipment,
    ) -> None:
        """`routes`: the route of each level. `labels` returns the labels of a classification, None for another task.

        `alone` sends the request to the tenant's default base, without the plan. It raises the error of a request that is
        refused at once.
        """
        super().__init__(request.client)
        self._request = request
        self._tenant = tenant
        self._plan = plan
        self._routes = routes
        self._labels = labels
        self._alone = alone
        self._shared = shared
        # Texts as the current level reads them.
        self._texts = request.item.texts
        self._answers: tuple[RouteAnswer, ...] = ()
        self._lock = threading.Lock()
        self._is_done = False
        self._alarm: Alarm | None = None
        self._sent_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._is_done or self._client.is_over

    def begin(self) -> None:
        """Send the text to the first level. Raises the error of a text that the level refuses at once; no reply follows."""
        begun_s = time.monotonic()
        self._submit(self._request.deadline_s)
        self._shared.counts.add_logic(time.monotonic() - begun_s)

    def reply(self, answer: RouteAnswer | HplmError, *, is_last: bool = True) -> None:
        """Take the current level's answer: send it to the client, or the text to the next level."""
        begun_s = time.monotonic()
        result: CascadeAnswer | HplmError | None
        try:
            result = self._after(answer)
        except HplmError as error:
            result = error
        except Exception as error:
            log_rate_limited(f"cascade: a text failed ({type(error).__name__})", error)
            result = InternalError("the server failed on this request; its log says why")
        self._shared.counts.add_logic(time.monotonic() - begun_s)
        if result is not None:
            self._finish(result)

    def _after(self, answer: RouteAnswer | HplmError) -> CascadeAnswer | HplmError | None:
        """Return the reply to the client, None if there is none yet, or none any more."""
        if self._is_done:
            return None
        place = len(self._answers)
        if isinstance(answer, HplmError):
            if not place and isinstance(answer, UnknownTenantError):
                # The level's process has read the registry before this one: the tenant is no longer over the level's base.
                self._alone()
                return None
            is_gone = isinstance(answer, CancelledError)
            return self._without_next(answer.code.lower(), answer) if place and not is_gone else answer
        base = self._plan.levels[place].base
        if place:
            self._note_time()
        if (dispatched := answer.dispatched) is None:
            raise InternalError(f"the model of base {base} has not said whether the text is re-routed")
        if not place:
            self._shared.counts.add_confidence(base, dispatched.confidence, self._plan.dev_confidence)
        self._answers = (*self._answers, answer)
        if not dispatched.is_rerouted or place + 1 == len(self._plan.levels):
            return self._answer()
        self._shared.counts.add_reroute(base)
        return self._reroute(answer)

    def _reroute(self, answer: RouteAnswer) -> CascadeAnswer | HplmError | None:
        """Send the text to the next level. Return a reply if it cannot answer in time, or refuses the text at once."""
        level = self._plan.levels[len(self._answers)]
        now_s, deadline_s = time.monotonic(), self._request.deadline_s
        if deadline_s is not None:
            deadline_s -= ANSWER_S
            due_s = self._request.arrived_s + deadline_s
            default_s = self._plan.promise.latency_ms / 1000
            expected_s = self._shared.times.expected_s(level.base, self._tenant, now_s, default_s)
            if due_s - now_s < expected_s:
                return self._without_next("no_time", DeadlineError(LATE))
            if self._alarm is None:
                self._alarm = self._shared.timer.add(due_s, self._give_up)
        assert answer.dispatched is not None
        if level.alpha > 0:
            self._texts = _pruned(self._texts, answer.dispatched.importance, level.alpha)
        try:
            self._submit(deadline_s)
        except HplmError as error:
            return self._without_next(error.code.lower(), error)
        return None

    def _submit(self, deadline_s: float | None) -> None:
        plan, place, request = self._plan, len(self._answers), self._request
        dispatch, following = plan.levels[place].dispatch, plan.levels[place + 1 :]
        draw = DETERMINISTIC
        if following and not plan.deterministic:
            draw = draw_of(self._tenant, plan.levels[-1].number, *request.item.texts, level=place + 1)
        sent = DispatchInput.of(
            dispatch, draw, is_last=not following, wants_importance=bool(following and following[0].alpha > 0)
        )
        # The answers of several levels are weighted by their logits. A tagging's would fill up those of all texts of a call.
        item = RouteInput(self._texts, request.item.with_logits or plan.is_weighted, sent)
        self._sent_s = time.monotonic()
        # The first level corrects what the cascade has charged. A further level has charged nothing yet.
        charge = NOT_CHARGED if place else request.charge
        route: RouteRequest = Request(
            item, request.tenant, deadline_s, request.arrived_s, self, request.key_id, charge=charge
        )
        self._routes[place].submit(route, self._tenant)

    def _without_next(self, why: str, error: HplmError) -> CascadeAnswer | HplmError:
        """Return the reply if the next level cannot answer."""
        self._shared.counts.add_late(why)
        return self._answer(is_late=True) if self._plan.on_late == "answer" else error

    def _give_up(self) -> None:
        """Reply without the level that the text waits for, because the client will not wait any longer."""
        if self._is_done or len(self._answers) == len(self._plan.levels):
            return
        # The level needs at least so long, which the next texts have to know.
        self._note_time()
        result: CascadeAnswer | HplmError
        try:
            result = self._without_next("gave_up", DeadlineError(LATE))
        except HplmError as error:
            result = error
        self._finish(result)

    def _answer(self, *, is_late: bool = False) -> CascadeAnswer:
        answers = self._answers
        labels = self._labels() if len(answers) > 1 else None
        return combined(self._plan, answers, labels, with_logits=self._request.item.with_logits, is_late=is_late)

    def _note_time(self) -> None:
        base, now_s = self._plan.levels[len(self._answers)].base, time.monotonic()
        self._shared.times.add(base, self._tenant, now_s - self._sent_s, now_s)

    def _finish(self, result: CascadeAnswer | HplmError) -> None:
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
        if self._alarm is not None:
            self._alarm.call_off()
        self._shared.finish(self._request, result)


def _pruned(texts: tuple[bytes, ...], importance: npt.NDArray[np.float32], alpha: float) -> tuple[bytes, ...]:
    """Return the request's text or pair without its unimportant words, in UTF-8 as before."""
    decoded = tuple(text.decode() for text in texts)
    pruned = prune(decoded[0] if len(decoded) == 1 else (decoded[0], decoded[1]), importance, alpha)
    return tuple(text.encode() for text in ((pruned,) if isinstance(pruned, str) else pruned))
