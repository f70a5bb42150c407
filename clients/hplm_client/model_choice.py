"""The model that a client calls: the one that its user named, else the model for all bases if the server has it."""

from __future__ import annotations

from typing import NamedTuple

from hplm.core import wire
from hplm.errors import HplmError, UnknownTenantError, UnreachableError

# The most seconds in which a server says whether it has the model for all bases. If it does not say so in time, the next call
# asks again.
LOOK_S = 1.0


class ChosenModel(NamedTuple):
    """The model of a call. `is_sure`: the server has said that it is the right one, so an unknown tenant does not exist."""

    name: str
    is_sure: bool = True


# The server has not said which models it has, or its model for all bases is away for a moment.
UNSURE = ChosenModel(wire.MODEL, is_sure=False)


class ModelChoice:
    """The name of the model that a client calls, `name`; None until the server was asked which models it has."""

    def __init__(self, model: str | None) -> None:
        """`model`: the name that the user gave, None for none."""
        self._is_fixed = model is not None
        self._has_seen_router = False
        self.name = model

    @property
    def candidates(self) -> tuple[str, ...]:
        """The models that may be called; if one of them is ready, the client can call the server."""
        return (self.name,) if self._is_fixed and self.name is not None else (wire.MODEL, wire.ROUTER)

    def choose(self, *, has_router: bool) -> ChosenModel:
        """Return the model to call, and remember it. `has_router`: the model for all bases is ready on the server.

        If that model was there before, it is being loaded again, so the next call asks again.
        """
        if not has_router and self._has_seen_router:
            return UNSURE
        self._has_seen_router = has_router
        self.name = wire.ROUTER if has_router else wire.MODEL
        return ChosenModel(self.name)

    def failed(self, error: HplmError, model: ChosenModel) -> HplmError:
        """Return the error of a call of `model` for the caller. Note whether the next call has to ask for models again.

        The next call asks again if the server or its model is gone. It also asks if the model of one base does not know the
        tenant, because by now the server may have the model for all bases.
        """
        if self._is_fixed:
            return error
        is_unknown = isinstance(error, UnknownTenantError) and model.name != wire.ROUTER
        if is_unknown or isinstance(error, UnreachableError):
            self.name = None
        if is_unknown and not model.is_sure:
            return UnreachableError(
                f"the model {wire.ROUTER}, for the tenants of all bases, does not answer, and {model.name} does not have this "
                "tenant; try again"
            )
        return error
