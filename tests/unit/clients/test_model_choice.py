"""The model that a client calls if its user names none, also while a model for all bases is away."""

from __future__ import annotations

from typing import Any

import pytest
from hplm_client import Client
from hplm_client.model_choice import FOR_ALL_BASES, UNSURE, ChosenModel, ModelChoice
from tritonclient.utils import InferenceServerException

from hplm.errors import UnknownTenantError, UnreachableError

UNKNOWN = UnknownTenantError("there is no tenant 'x'")


class Connection:
    """A stand-in for tritonclient's client, to a server whose models do not have the tenant."""

    def __init__(self, *ready: str | None) -> None:
        """`ready`: for each call, the model for all bases that the server has, "" for none; None for no answer in time."""
        self.ready = list(ready)
        self.called: list[str] = []

    def is_model_ready(self, model: str, **_: Any) -> bool:
        if (ready := self.ready[0]) is None:
            self.ready.pop(0)
            raise InferenceServerException("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED")
        if model == ready or model == FOR_ALL_BASES[-1]:
            self.ready.pop(0)
        return model == ready

    def infer(self, model: str, *_: Any, **__: Any) -> Any:
        self.called.append(model)
        raise InferenceServerException(UNKNOWN.wire())

    def close(self) -> None:
        pass


def ask(connection: Connection, error: type[Exception]) -> None:
    with Client("http://127.0.0.1:1") as client:
        client._triton.close()
        client._triton = connection
        while connection.ready:
            with pytest.raises(error):
                client.predict("x", "text")


def test_a_tenant_is_not_said_to_be_unknown_before_the_server_has_said_which_models_it_has() -> None:
    connection = Connection(None, None)
    ask(connection, UnreachableError)
    assert connection.called == ["hbert", "hbert"]


def test_a_client_whose_model_does_not_know_a_tenant_asks_again_for_a_model_for_all_bases() -> None:
    connection = Connection("", "", "hplm")
    ask(connection, UnknownTenantError)
    assert connection.called == ["hbert", "hbert", "hplm"]


def test_a_client_prefers_the_model_that_answers_by_cascades() -> None:
    connection = Connection("cascade")
    ask(connection, UnknownTenantError)
    assert connection.called == ["cascade"]


def test_a_client_finds_the_model_for_all_bases_again_after_it_was_loaded_again() -> None:
    choice = ModelChoice(None)
    router = choice.choose("hplm")
    choice.failed(UnreachableError("Request for unknown model"), router)
    assert choice.name is None
    assert choice.choose(None) == UNSURE
    assert choice.name is None
    assert isinstance(choice.failed(UNKNOWN, UNSURE), UnreachableError)
    assert choice.choose("hplm") == router
    assert choice.failed(UNKNOWN, router) is UNKNOWN
    assert choice.name == "hplm"


def test_while_the_model_for_cascades_is_loaded_again_the_other_model_for_all_bases_is_called() -> None:
    choice = ModelChoice(None)
    cascade = choice.choose("cascade")
    choice.failed(UnreachableError("Request for unknown model"), cascade)
    assert choice.choose("hplm") == ChosenModel("hplm")
    assert choice.name is None
    assert choice.choose("cascade") == cascade
    assert choice.name == "cascade"


def test_a_model_that_the_user_named_stays() -> None:
    choice = ModelChoice("mpnet")
    assert choice.failed(UNKNOWN, ChosenModel("mpnet")) is UNKNOWN
    choice.failed(UnreachableError("gone"), ChosenModel("mpnet"))
    assert choice.name == "mpnet"
