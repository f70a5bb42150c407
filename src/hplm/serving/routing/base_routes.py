"""The ways to the models of several bases, which may change while texts are under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hplm.serving.routing.model_route import ModelRoute


class BaseRoutes:
    """A route for each base, and routes of bases that were taken out, until their last texts have left.

    One thread calls `follow`, `sweep` and `close`; any thread may call `find`.
    """

    def __init__(self, models: Mapping[str, str], make: Callable[[str], ModelRoute]) -> None:
        """`models`: the name of each base's model. `make` returns the route to a model."""
        self._make = make
        # By base. Replaced as a whole, because requests read it without a lock.
        self._routes = {base: make(model) for base, model in models.items()}
        self._leaving: list[ModelRoute] = []

    def find(self, base: str) -> ModelRoute | None:
        """Return the route of a base, None if this server does not serve the base."""
        return self._routes.get(base)

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a call."""
        return sum(route.waiting for route in set(self._routes.values()))

    def sweep(self) -> None:
        """Do as `ModelRoute.sweep`."""
        for route in (*self._routes.values(), *self._leaving):
            route.sweep()

    def follow(self, models: Mapping[str, str]) -> None:
        """Serve these bases from now on.

        A model that an export gives another base serves its first base until it is loaded again, so it is called for both.
        """
        named = set(models.values())
        before = self._routes
        kept = {base: route for base, route in before.items() if route.name in named}
        by_name = {route.name: route for route in kept.values()}
        self._routes = kept | {base: by_name.get(model) or self._make(model) for base, model in models.items()}
        self._leaving += set(before.values()) - set(self._routes.values())

    def close_empty(self) -> None:
        """End the threads of routes that were taken out before the last call of `follow`, once no text waits there."""
        empty = [route for route in self._leaving if not route.waiting]
        for route in empty:
            route.close()
        self._leaving = [route for route in self._leaving if route not in empty]

    def close(self) -> None:
        """Refuse the texts that wait, and every later text."""
        for route in (*self._routes.values(), *self._leaving):
            route.close()

    def join(self, until_s: float) -> None:
        """Wait for the threads of all routes until `until_s` of the monotonic clock. Call `close` first."""
        for route in self._routes.values():
            route.join(until_s)
