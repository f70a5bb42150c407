"""The stage behind the model `hplm`: finds the base of each text's tenant, and sends the text to the base's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hplm.core.settings import RouteSettings
from hplm.errors import UnknownTenantError
from hplm.serving.routing.model_route import RouteRequest
from hplm.serving.routing.routing_stage import RoutingStage


class RouteStage(RoutingStage[RouteSettings]):
    """Routes texts by tenant to the models of several bases."""

    name: ClassVar[str] = "route"
    settings_type = RouteSettings

    def models_of(self, settings: RouteSettings) -> list[Mapping[str, str]]:
        return [settings.models]

    def submit_text(self, request: RouteRequest, name: str) -> None:
        (routes,) = self._routes
        route = routes.find(self._catalog.find(name).base)
        if route is None:
            # A tenant of a base that this server does not serve does not exist here.
            raise UnknownTenantError(f"there is no tenant {name!r}")
        route.submit(request, name)
