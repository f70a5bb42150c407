"""The model that a client calls: the one that its user named, else a model for all bases if the server has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hplm.core import wire
from hplm.errors import HplmError, UnknownTenantError, UnreachableError

# The most seconds in which a server says whether it has a model for all bases. If it does not say so in time, the next call
# asks again.
LOOK_S = 1.0
# The models for all bases, the preferred one first: `cascade` answers each tenant as `hplm` does, or by the tenant's cascade.
FOR_ALL_BASES = (wire.CASCADE, wire.ROUTER)


# Part of Triton's message for a call that asks for an output which the model does not have.
UNKNOWN_OUTPUT = "unexpected inference output"


class ChosenModel(NamedTuple):
    """The model of a call. `is_sure`: the server has said that it is the right one, so an unknown tenant does not exist.

    `tells_students`: the model has the output STUDENTS, which models of an earlier hplm do not have.
    """

    name: str
    is_sure: bool = True
    tells_students: bool = False


# The server has not said which models it has, or the model for all bases that it had is away for a moment.
UNSURE = ChosenModel(wire.MODEL, is_sure=False)


class ModelChoice:
    """The name of the model that a client calls, `name`; None until the server was asked which models it has."""

    def __init__(self, model: str | None) -> None:
        """`model`: the name that the user gave, None for none."""
        # By the name of a model, whether it has the output STUDENTS, as far as the server was asked.
        self._tells_students: dict[str, bool] = {}
        self._is_fixed = model is not None
        self._best_seen: str | None = None
        self.name = model

    @property
    def candidates(self) -> tuple[str, ...]:
        """The models that may be called; if one of them is ready, the client can call the server."""
        return (self.name,) if self._is_fixed and self.name is not None else (wire.MODEL, *reversed(FOR_ALL_BASES))

    def choose(self, ready: str | None) -> ChosenModel:
        """Return the model to call, and remember it. `ready`: the first of FOR_ALL_BASES that is ready on the server, or None.

        If the server had a better model before, that model is being loaded again, so the next call asks again.
        """
        if self._best_seen is not None and (ready is None or _rank(ready) > _rank(self._best_seen)):
            # Meanwhile another model for all bases knows every tenant.
            return UNSURE if ready is None else ChosenModel(ready)
        self._best_seen = ready
        self.name = ready or wire.MODEL
        return ChosenModel(self.name)

    def knows_outputs(self, model: ChosenModel) -> bool:
        """Return whether the server need not be asked for the model's outputs: it was asked, or it does not answer."""
        return not model.is_sure or model.name in self._tells_students

    def with_outputs(self, model: ChosenModel) -> ChosenModel:
        """Return the model with what is known of its outputs."""
        return model._replace(tells_students=self._tells_students.get(model.name, False))

    def note_outputs(self, model: ChosenModel, metadata: Mapping[str, Any]) -> None:
        """Remember a model's outputs, from Triton's metadata of the model; empty if the server does not give them."""
        names = {output["name"] for output in metadata.get("outputs", ())}
        self._tells_students[model.name] = wire.STUDENTS in names

    def failed(self, error: HplmError, model: ChosenModel) -> HplmError:
        """Return the error of a call of `model` for the caller. Note whether the next call has to ask for models again.

        The next call asks again if the server or its model is gone. It also asks if the model of one base does not know the
        tenant, because by now the server may have a model for all bases.
        """
        if isinstance(error, UnreachableError) or UNKNOWN_OUTPUT in str(error):
            # By now the server may be of another version.
            self._tells_students.clear()
        if self._is_fixed:
            return error
        is_unknown = isinstance(error, UnknownTenantError) and model.name not in FOR_ALL_BASES
        if is_unknown or isinstance(error, UnreachableError):
            self.name = None
        if is_unknown and not model.is_sure:
            return UnreachableError(
                f"the model {self._best_seen or wire.ROUTER}, for the tenants of all bases, does not answer, and {model.name} "
                "does not have this tenant; try again"
            )
        return error


def _rank(model: str) -> int:
    return FOR_ALL_BASES.index(model)
