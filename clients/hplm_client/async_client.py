"""Asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tritonclient.utils import InferenceServerException

from hplm.core import wire
from hplm.errors import ConfigError, UnreachableError
from hplm_client.answers import (
    Parts,
    Prediction,
    Request,
    options_of,
    outputs_of,
    parts_of_all,
    predictions_of,
    tensors_of,
)
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import CLOSED, Owner
from hplm_client.transport.connection import LAST_ANSWERS_S, LATE_ANSWER_S, USUAL_TIMEOUT_S, connect, overdue
from hplm_client.transport.faults import typed_answer, typed_errors


class AsyncClient:
    """As `Client`, with coroutines: many requests at once with `asyncio.gather`. Make it inside the running loop.

    At most `concurrency` are under way at once; the others wait their turn, for which `timeout_s` does not count. It follows no
    redirect, which would take text and `headers` elsewhere.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout_s: float = USUAL_TIMEOUT_S,
        concurrency: int = 100,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        address = split_url(url)
        self._protocol = address.protocol
        # Over HTTP the session has it.
        self._bounded: dict[str, Any] = {"client_timeout": timeout_s} if address.protocol == "grpc" else {}
        self._loop = _running_loop()
        if self._loop is None:
            raise ConfigError("an AsyncClient is made inside the running loop: in a coroutine")
        self._module, self._triton = connect(
            address, headers, timeout_s=timeout_s, concurrency=concurrency, is_async=True
        )
        self._room = asyncio.Semaphore(concurrency)
        self._owner = Owner(is_bound_to_thread=False)
        self._under_way: set[asyncio.Future[Any]] = set()

    async def is_ready(self) -> bool:
        """Whether hBERT answers on that server; as `Client.is_ready`."""
        self._check()
        with typed_errors(self.url):
            return bool(await self._made(lambda: self._triton.is_model_ready(wire.MODEL, **self._bounded)))

    async def predict(
        self,
        tenant: str,
        text: str,
        pair: str | None = None,
        *,
        logits: bool = False,
        deadline_s: float | None = None,
    ) -> Prediction:
        """One text of one tenant, or two: `text` and `pair`; `deadline_s` as for `Client`."""
        return (await self._predict([(tenant, text, pair)], logits, deadline_s))[0]

    async def predict_batch(
        self, requests: Iterable[Request], *, logits: bool = False, deadline_s: float | None = None
    ) -> list[Prediction]:
        """As `Client.predict_batch`."""
        self._check()
        asked = parts_of_all(requests)
        return await self._predict(asked, logits, deadline_s) if asked else []

    async def _predict(self, asked: Sequence[Parts], logits: bool, deadline_s: float | None) -> list[Prediction]:
        self._check()
        with typed_errors(self.url):
            inputs = tensors_of(self._module, asked)
            call = {"outputs": outputs_of(self._module, logits), **options_of(deadline_s), **self._bounded}
        with typed_answer(self.url):
            async with self._room:
                result = await self._made(lambda: self._triton.infer(wire.MODEL, inputs, **call), deadline_s)
            return predictions_of(result, asked, logits)

    async def close(self) -> None:
        """Close the connections; what is still under way is given up with UnreachableError, over gRPC after half a second."""
        if not self._owner.is_here:
            return
        self._owner.is_closed = True
        # Over HTTP nothing is cancelled at the server.
        if self._under_way and self._protocol == "grpc":
            await asyncio.wait(self._under_way, timeout=LAST_ANSWERS_S)
        await self._triton.close()

    def _check(self) -> None:
        """Raises UnreachableError where the client is closed, ConfigError in another loop or process."""
        self._owner.check_open()
        if _running_loop() is not self._loop:
            raise ConfigError("the client was made in another loop: make one in each, as in each `asyncio.run`")

    async def _made(self, call: Callable[[], Coroutine[Any, Any, Any]], deadline_s: float | None = None) -> Any:
        """Return the result of a call.

        Raises UnreachableError where the client is closed before it has ended, and DeadlineError soon after the deadline.
        """
        self._owner.check_open()
        # A task of its own: gRPC cancels what is under way when it is closed, and that is no cancellation of our caller.
        task = asyncio.ensure_future(call())
        self._under_way.add(task)
        task.add_done_callback(self._forget)
        is_left = False
        try:
            await asyncio.wait([task], timeout=None if deadline_s is None else deadline_s + LATE_ANSWER_S)
            # A call over gRPC is not cancelled at its deadline: Triton before 24.12 may die of a request that is cancelled as
            # its answer leaves.
            is_left = self._protocol == "grpc" and deadline_s is not None and not task.done()
        finally:
            if not is_left:
                task.cancel()
        if deadline_s is not None and not task.done():
            raise overdue(deadline_s)
        if self._owner.is_closed and (
            task.cancelled() or not isinstance(task.exception(), InferenceServerException | None)
        ):
            raise UnreachableError(CLOSED)
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Have asyncio log no error of a call that nobody waits for any more."""
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
