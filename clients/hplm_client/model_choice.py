"""The model that a client calls: the one that its user named, else the model for all bases if the server has it."""

from __future__ import annotations

from hplm.core import wire
from hplm.errors import HplmError, UnreachableError

# The most seconds in which a server says whether it has the model for all bases. If it does not say so in time, the next call
# asks again.
LOOK_S = 1.0


class ModelChoice:
    """The name of the model that a client calls, `name`; None until the server was asked which models it has."""

    def __init__(self, model: str | None) -> None:
        """`model`: the name that the user gave, None for none."""
        self._is_fixed = model is not None
        self.name = model

    @property
    def candidates(self) -> tuple[str, ...]:
        """The models that may be called; if one of them is ready, the client can call the server."""
        return (self.name,) if self._is_fixed and self.name is not None else (wire.MODEL, wire.ROUTER)

    def choose(self, *, has_router: bool) -> str:
        """Remember and return the model to call. `has_router`: the model for all bases is ready on the server."""
        self.name = wire.ROUTER if has_router else wire.MODEL
        return self.name

    def failed(self, error: HplmError) -> None:
        """Note that a call has failed. If the server or its model is gone, the next call asks for models again."""
        if isinstance(error, UnreachableError) and not self._is_fixed:
            self.name = None
