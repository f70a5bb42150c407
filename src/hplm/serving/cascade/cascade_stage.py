"""The stage behind the model `cascade`: asks the levels of each text's tenant, from small to large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

from hplm.adapters.bank import TenantBank
from hplm.cascade.plan import CascadePlan
from hplm.core.settings import CascadeSettings
from hplm.errors import ArtifactError, HplmError, UnknownTenantError
from hplm.registry.records import ServedTenant
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.cascade.answers import CascadeAnswer
from hplm.serving.cascade.cascade_counts import CascadeCounts
from hplm.serving.cascade.deadline_timer import DeadlineTimer
from hplm.serving.cascade.journey import CascadeRequest, Equipment, Journey, LevelClient
from hplm.serving.cascade.recent_times import RecentTimes
from hplm.serving.counts import Counts
from hplm.serving.request import Request
from hplm.serving.routing.call_tensors import RouteAnswer
from hplm.serving.routing.model_route import ModelRoute
from hplm.serving.routing.routing_stage import CallNamedModel, RoutingStage
from hplm.tasks.task_loader import task_named

# Tenants whose labels are kept in memory, at about 1 KB for ten labels. Labels that are not kept are read from the tenant's
# card for each text that is re-routed: 0.1 ms, and 4 ms for a card with the confusion of 150 labels.
MOST_LABELS = 16_384


class CascadeStage(RoutingStage[CascadeSettings]):
    """Answers a tenant with a plan by the levels of the plan, and any other tenant as `RouteStage` does.

    A plan counts while each of its bases is served here. If not, the tenant's default base answers.
    """

    name: ClassVar[str] = "cascade"
    settings_type = CascadeSettings

    def __init__(self, settings_path: Path, call: CallNamedModel) -> None:
        self._level_counts = Counts()
        self.cascade_counts = CascadeCounts()
        self._timer = DeadlineTimer()
        self._shared = Equipment(self.cascade_counts, RecentTimes(), self._timer, self.finish)
        # Versions never change, so their labels are read once.
        self._labels_of = lru_cache(maxsize=MOST_LABELS)(self._read_labels)
        try:
            super().__init__(settings_path, call)
        except BaseException:
            self._timer.stop()
            raise
        # Cards are read without weights, and a card names the base's fingerprint itself.
        self._bank = TenantBank(self._store, self._catalog, fingerprint="")

    def models_of(self, settings: CascadeSettings) -> list[Mapping[str, str]]:
        return [settings.models, settings.levels]

    @property
    def call_counts(self) -> Counts:
        """Answers of levels by outcome, calls of models, and texts that were sent to a model once more."""
        return self._level_counts

    def stop(self) -> None:
        super().stop()
        self._timer.stop()

    def submit_text(self, request: CascadeRequest, name: str) -> None:
        tenant = self._catalog.find(name)
        plan = self._catalog.plan_of(name)
        routes = None if plan is None else self._levels_of(plan)
        alone = partial(self._submit_alone, request, tenant)
        if plan is None or routes is None:
            alone()
            return
        Journey(request, name, plan, routes, partial(self._labels_of, tenant), alone, self._shared).begin()

    def _submit_alone(self, request: CascadeRequest, tenant: ServedTenant) -> None:
        """Queue a text for the tenant's default base. Raises the error of a text that is refused at once."""
        route = self._routes[0].find(tenant.base)
        if route is None:
            # A tenant of a base that this server does not serve does not exist here.
            raise UnknownTenantError(f"there is no tenant {tenant.name!r}")
        client = _PlainClient(request, tenant.base, self.finish)
        route.submit(
            Request(
                request.item,
                request.tenant,
                request.deadline_s,
                request.arrived_s,
                client,
                request.key_id,
                charge=request.charge,
            ),
            tenant.name,
        )

    def finish(self, request: CascadeRequest, result: CascadeAnswer | HplmError) -> None:
        """Count a text's answer or error, and send it to the text's client."""
        self._counts.add_answer(result)
        if isinstance(result, CascadeAnswer):
            self.cascade_counts.add_answer(result.level)
        request.reply(result)

    def on_forgotten(self, versions: Sequence[ServedTenant]) -> None:
        self._bank.drop({old.path for old in versions} - {served.path for served in self._catalog.retained()})

    def _read_labels(self, tenant: ServedTenant) -> Sequence[bytes] | None:
        """Return a tenant's labels, None if its task answers for each token. Raises an ArtifactError for clients to read."""
        try:
            card = self._bank.card(tenant)
        except ArtifactError as error:
            # The client of a tenant may not learn the paths of the store.
            log_rate_limited(f"tenant {tenant.name}: {error}")
            raise type(error)("this tenant's model cannot be loaded; the server's log says why") from None
        return None if task_named(card.task).reads_tokens else tuple(label.encode() for label in card.labels)

    def _levels_of(self, plan: CascadePlan) -> Sequence[ModelRoute] | None:
        """Return the route of each level, None if a level's base is not served here."""
        routes = [self._routes[1].find(level.base) for level in plan.levels]
        there = [route for route in routes if route is not None]
        if len(there) == len(routes):
            return there
        missing = [level.base for level, route in zip(plan.levels, routes, strict=True) if route is None]
        log_rate_limited(f"cascade: base {missing[0]} of a plan is not served here, so default bases answer alone")
        return None


class _PlainClient(LevelClient):
    """The client of a text that the tenant's default base answers alone."""

    def __init__(
        self,
        request: CascadeRequest,
        base: str,
        finish: Callable[[CascadeRequest, CascadeAnswer | HplmError], None],
    ) -> None:
        super().__init__(request.client)
        self._request = request
        self._base = base
        self._finish = finish

    def reply(self, answer: RouteAnswer | HplmError, *, is_last: bool = True) -> None:
        """Send the answer on. A score that is not calibrated is no confidence, so there is none."""
        result = answer if isinstance(answer, HplmError) else CascadeAnswer(answer, self._base, math.nan, 0, False)
        self._finish(self._request, result)
