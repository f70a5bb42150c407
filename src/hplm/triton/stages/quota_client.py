"""The client of a request that holds a part of its tenants' quotas until it has its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hplm.access.quotas import Held
from hplm.errors import HplmError
from hplm.serving.request import Client


class QuotaClient(Client[Sequence[Any]]):
    """Ends what the request holds when the answer is known, before the answer is sent. Then the client may ask again.

    With `hands_on` the answer is for the next stage, which takes the request over.
    """

    def __init__(self, client: Client[Sequence[Any]], held: Held, *, hands_on: bool) -> None:
        self._client = client
        self._held = held
        self._hands_on = hands_on

    def reply(self, answer: Sequence[Any] | HplmError, *, is_last: bool = True) -> None:
        if self._hands_on and not isinstance(answer, HplmError):
            self._held.hand_on()
        else:
            self._held.end(answer)
        self._client.reply(answer, is_last=is_last)

    def is_cancelled(self) -> bool:
        return self._client.is_cancelled()
