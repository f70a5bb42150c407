"""A request on its way through a stage, and the client that waits for its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hplm.access.gate import SERVER
from hplm.access.quotas import Charge
from hplm.errors import HplmError
from hplm.runtime.rate_limited_log import log_rate_limited

Item = TypeVar("Item")
NextItem = TypeVar("NextItem")
Answer = TypeVar("Answer")


class Client(Generic[Answer]):
    """The client of a request. Its methods may be called from any thread."""

    @property
    def is_over(self) -> bool:
        """Whether the client needs no answer any more, as far as this process knows."""
        return False

    @property
    def waits_for_others(self) -> bool:
        """Whether the answer leaves only together with the answers of other texts."""
        return False

    def reply(self, answer: Answer | HplmError, *, is_last: bool = True) -> None:
        """Send an answer or an error. Raises an error if it cannot be sent."""
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        """Ask the server whether the client has gone: a round trip. Raises an error if the server cannot say."""
        raise NotImplementedError


NOT_CHARGED = Charge(0)
# The client of a request that is not submitted yet.
NOBODY: Client[Any] = Client()


@dataclass(eq=False)
class Request(Generic[Item, Answer]):
    """One text or one manage request: `item` for the stage, and who asks for it.

    `tenant` as the client wrote it. `deadline_s`: seconds from arrival to answer, None for the default in the stage's
    settings. `arrived_s`: when the request reached the server, by the monotonic clock. `key_id`: the public id of the key that
    the stage's gate has accepted, empty if the server needs no keys. `received_s`: when this stage read the request.
    `is_inner`: another model of this server asks, which counts the request for its tenant. `charge`: what the tenant's quota
    of tokens was charged for the text, and the look-up corrects.
    """

    item: Item
    tenant: bytes = b""
    deadline_s: float | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    client: Client[Answer] = NOBODY
    key_id: str = ""
    received_s: float = field(default_factory=time.monotonic)
    is_inner: bool = False
    charge: Charge = NOT_CHARGED

    @property
    def counted_for(self) -> bytes:
        """The tenant for which the request is counted; empty for a question of `hplm serve` itself."""
        return b"" if self.key_id == SERVER else self.tenant

    def with_item(self, item: NextItem) -> Request[NextItem, Answer]:
        """Return the same request with another item: what admission has made of the first."""
        return Request(
            item,
            self.tenant,
            self.deadline_s,
            self.arrived_s,
            self.client,
            self.key_id,
            self.received_s,
            self.is_inner,
            self.charge,
        )

    def reply(self, answer: Answer | HplmError, *, is_last: bool = True) -> None:
        """Send an answer or an error to the client."""
        self.client.reply(answer, is_last=is_last)

    def is_cancelled(self) -> bool:
        """Return whether the client has gone; False if the server cannot say."""
        try:
            return self.client.is_cancelled()
        except Exception as error:
            log_rate_limited("the server could not say whether a client has gone", error)
            return False
