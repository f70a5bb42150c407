"""A stage of serving whose computation is a wait. Queue, admission, batch loop and replies are those of the real stages."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hplm.errors import HplmError, UnknownTenantError
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Batch, Budget
from hplm.scheduling.policy_loader import load_policy
from hplm.scheduling.queue import RequestQueue
from hplm.serving.batch_loop import BatchLoop, Results
from hplm.serving.request import Request
from hplm_loadtest.emulation.settings import WaitingSettings

# Seconds of a token. The queue plans in tokens; a stage's time is a number of tokens, so a small unit rounds little.
TOKEN_S = 1e-4
# The most tokens of a batch of one request: 10,000 s.
MOST_TOKENS = 100_000_000
# All requests are of one tenant for the queue, because fair shares would change the order of first come, first served.
TENANT = "all"


@dataclass(frozen=True)
class WaitingItem:
    """A request to a model: the seconds that this stage waits for it, and when it reached the first stage.

    `arrived_s` is on the machine's monotonic clock.
    """

    model: str
    seconds: float
    arrived_s: float


@dataclass(frozen=True)
class WaitingAnswer:
    """The end of a stage: when the request reached the first stage, in seconds of the machine's monotonic clock."""

    arrived_s: float


def tokens_of(seconds: float) -> int:
    """Return a stage's time in tokens of the queue, at least one."""
    return max(1, round(seconds / TOKEN_S))


def emulated_queue(settings: WaitingSettings) -> RequestQueue:
    """Return the live queue of a stage: batches of one request, and a cost model that knows the stage's times."""
    samples = {tokens_of(seconds[settings.stage]) for seconds in settings.stage_s.values()} | {1, 1000}
    return RequestQueue(
        load_policy(settings.policy, {}),
        Budget(rows=1, row_tokens=MOST_TOKENS, max_requests=1, max_tenants=1),
        CostModel.fit([(tokens, tokens**2, tokens * TOKEN_S) for tokens in samples]),
        capacity=settings.queue_capacity,
        weights={},
        starve_after_s=float("inf"),
    )


class WaitingStage:
    """One stage of an emulated group. Its batch loop takes one request after another and waits in place of computing."""

    def __init__(self, settings: WaitingSettings) -> None:
        self._settings = settings
        self._loop: BatchLoop[WaitingItem, WaitingAnswer] = BatchLoop(
            f"stage-{settings.stage + 1}", emulated_queue(settings), self._run, tracer=Tracer(None, "waiting")
        )
        self._loop.start()

    def stop(self) -> None:
        """Answer the request that runs, and refuse the requests that wait."""
        self._loop.stop()

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._loop.count_refused(error)

    def item_of(self, model: str, arrived_s: float) -> WaitingItem:
        """Return the wait of a model's request. Raises UnknownTenantError if the group does not hold the model."""
        if model not in self._settings.stage_s:
            raise UnknownTenantError("this group does not hold the model")
        return WaitingItem(model, self._settings.stage_s[model][self._settings.stage], arrived_s)

    def submit(self, request: Request[WaitingItem, WaitingAnswer]) -> None:
        """Queue a request, with time reserved for the later stages. Raises the error of a request that is refused at once."""
        item, settings = request.item, self._settings
        whole_s = settings.default_deadline_s if request.deadline_s is None else request.deadline_s
        try:
            self._loop.submit(
                request,
                tenant=TENANT,
                tokens=tokens_of(item.seconds),
                arrived_s=item.arrived_s,
                deadline_s=item.arrived_s + whole_s - settings.reserved_s(item.model),
            )
        except HplmError as error:
            raise self._loop.count_refused(error) from None

    def _run(self, items: list[WaitingItem], batch: Batch) -> Results[WaitingAnswer]:
        for index, item in enumerate(items):
            time.sleep(item.seconds)
            yield [index], [WaitingAnswer(item.arrived_s)]
