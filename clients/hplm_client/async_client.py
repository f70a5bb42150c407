"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tritonclient.utils import InferenceServerException

from hplm.errors import ConfigError, ForbiddenError, HplmError, UnreachableError
from hplm_client.infer_tensors import (
    Request,
    TenantTextPair,
    infer_options,
    input_tensors,
    metadata_options,
    parse_requests,
    predictions_from,
)
from hplm_client.model_choice import FOR_ALL_BASES, LOOK_S, UNSURE, ChosenModel, ModelChoice
from hplm_client.prediction import Prediction
from hplm_client.transport.access_keys import AccessKeys, KeyOrKeys
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import CLOSED, ClientOwnership
from hplm_client.transport.connection import connect
from hplm_client.transport.error_translation import typed_answer, typed_errors
from hplm_client.transport.tenant_header import tenant_header
from hplm_client.transport.time_limits import CLOSE_GRACE_S, DEADLINE_GRACE_S, DEFAULT_TIMEOUT_S, deadline_passed


class AsyncClient:
    """A client like `Client` with coroutines, for many requests at once with `asyncio.gather`. Make it in the running loop.

    At most `concurrency` requests are under way at once. Further requests wait, and that wait does not count towards
    `timeout_s`. The client follows no redirect, because a redirect would take text and `headers` to another server.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        concurrency: int = 100,
        headers: Mapping[str, str] | None = None,
        key: KeyOrKeys | None = None,
        model: str | None = None,
    ) -> None:
        """The arguments are those of `Client`."""
        self.url = url
        self._choice = ModelChoice(model)
        # The question to the server which models it has, while it is under way.
        self._look: asyncio.Future[ChosenModel] | None = None
        address = split_url(url)
        self._is_grpc = address.protocol == "grpc"
        self._timeout_s = timeout_s
        # Over HTTP the session applies the timeout.
        self._timeout_option: dict[str, Any] = {"client_timeout": timeout_s} if self._is_grpc else {}
        self._loop = _running_loop()
        if self._loop is None:
            raise ConfigError("make an AsyncClient inside the running loop: in a coroutine")
        self._keys = AccessKeys(key, headers)
        self._module, self._triton = connect(
            address, self._keys.headers, timeout_s=timeout_s, concurrency=concurrency, is_async=True
        )
        self._permits = asyncio.Semaphore(concurrency)
        self._ownership = ClientOwnership(is_bound_to_thread=False)
        self._tasks: set[asyncio.Future[Any]] = set()

    async def is_ready(self) -> bool:
        """Return whether the model is loaded on the server, as `Client.is_ready`."""
        self._check_caller()
        for model in self._choice.candidates:
            if await self._has_ready(model, self._timeout_option):
                return True
        return False

    async def _has_ready(self, model: str, options: Mapping[str, Any]) -> bool:
        with typed_errors(self.url):
            return bool(await self._call(lambda: self._triton.is_model_ready(model, **options)))

    async def _model(self, deadline_s: float | None) -> ChosenModel:
        """Return the model to call. Calls that begin before the server has said which models it has share one question."""
        name = self._choice.name
        if name is not None and self._choice.knows_outputs(model := ChosenModel(name)):
            return self._choice.with_outputs(model)
        if self._look is None:
            timeout_s = min(LOOK_S, self._timeout_s, LOOK_S if deadline_s is None else deadline_s)
            self._look = asyncio.ensure_future(self._choose(timeout_s))
        # A caller that is cancelled must not end the other callers' question.
        return await asyncio.shield(self._look)

    async def _first_ready(self, options: Mapping[str, Any]) -> str | None:
        """Return the first model for all bases that is ready, None if there is none."""
        for name in FOR_ALL_BASES:
            if await self._has_ready(name, options):
                return name
        return None

    async def _choose(self, timeout_s: float) -> ChosenModel:
        """Ask the server whether it has a model for all bases, and for the model's outputs; return the model to call."""
        try:
            model = await self._choose_name(timeout_s)
            if not self._choice.knows_outputs(model):
                await self._look_for_outputs(model, timeout_s)
            return self._choice.with_outputs(model)
        finally:
            self._look = None

    async def _choose_name(self, timeout_s: float) -> ChosenModel:
        if (name := self._choice.name) is not None:
            return ChosenModel(name)
        options = {"client_timeout": timeout_s} if self._is_grpc else {}
        try:
            return self._choice.choose(await asyncio.wait_for(self._first_ready(options), timeout_s))
        except (UnreachableError, asyncio.TimeoutError):
            # The call itself says what is wrong, and in which time.
            return UNSURE
        except ForbiddenError:
            # A server may forbid this question and still answer requests.
            return self._choice.choose(None)

    async def _look_for_outputs(self, model: ChosenModel, timeout_s: float) -> None:
        """Ask the server for the outputs of a model. If no server answers, the call itself says what is wrong."""
        options = metadata_options(self._is_grpc, timeout_s)
        try:
            with typed_answer(self.url):
                asked = self._call(lambda: self._triton.get_model_metadata(model.name, **options))
                self._choice.note_outputs(model, await asyncio.wait_for(asked, timeout_s))
        except UnreachableError:
            return
        except HplmError:
            # A server may forbid this question and still answer requests.
            self._choice.note_outputs(model, {})

    async def predict(
        self,
        tenant: str,
        text: str,
        pair: str | None = None,
        *,
        logits: bool = False,
        deadline_s: float | None = None,
    ) -> Prediction:
        """Return the tenant's answer to one text, or to the pair `text` and `pair`; `deadline_s` as for `Client`."""
        return (await self._predict([(tenant, text, pair)], logits, deadline_s))[0]

    async def predict_batch(
        self, requests: Iterable[Request], *, logits: bool = False, deadline_s: float | None = None
    ) -> list[Prediction]:
        """Return the answers to up to 64 requests, sent as one, as `Client.predict_batch`."""
        self._check_caller()
        batch = parse_requests(requests)
        return await self._predict(batch, logits, deadline_s) if batch else []

    async def _predict(
        self, batch: Sequence[TenantTextPair], logits: bool, deadline_s: float | None
    ) -> list[Prediction]:
        self._check_caller()
        with typed_errors(self.url):
            inputs = input_tensors(self._module, batch, self._keys)
            # Made here too, because a wrong deadline is refused before the server is asked.
            infer_options(self._module, logits, deadline_s, UNSURE)
        model = UNSURE
        try:
            with typed_answer(self.url):
                async with self._permits:
                    model = await self._model(deadline_s)
                    options = {
                        **infer_options(self._module, logits, deadline_s, model),
                        **self._timeout_option,
                        "headers": tenant_header(batch[0][0]),
                    }
                    result = await self._call(lambda: self._triton.infer(model.name, inputs, **options), deadline_s)
                return predictions_from(result, batch, logits)
        except HplmError as error:
            raise self._choice.failed(error, model) from error.__cause__

    async def close(self) -> None:
        """Close the connections. Calls under way end with UnreachableError, over gRPC after half a second."""
        if not self._ownership.is_own_process:
            return
        self._ownership.is_closed = True
        # Only gRPC cancels calls at the server when it is closed.
        if self._tasks and self._is_grpc:
            await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
        await self._triton.close()

    def _check_caller(self) -> None:
        """Raise UnreachableError if the client is closed, ConfigError in another loop or process."""
        self._ownership.check_open()
        if _running_loop() is not self._loop:
            raise ConfigError("the client was made in another loop: make one in each, as in each `asyncio.run`")

    async def _call(self, call: Callable[[], Coroutine[Any, Any, Any]], deadline_s: float | None = None) -> Any:
        """Return the result of a call.

        Raises UnreachableError if the client is closed before the call has ended, and DeadlineError soon after the deadline.
        """
        self._ownership.check_open()
        # The call is its own task: gRPC cancels calls under way when it is closed, and this must not cancel the caller.
        task = asyncio.ensure_future(call())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        must_finish = False
        try:
            await asyncio.wait([task], timeout=None if deadline_s is None else deadline_s + DEADLINE_GRACE_S)
            # A call over gRPC is not cancelled at its deadline: Triton before 24.12 may crash if a request is cancelled while
            # its answer is sent.
            must_finish = self._is_grpc and deadline_s is not None and not task.done()
        finally:
            if not must_finish:
                task.cancel()
        if deadline_s is not None and not task.done():
            raise deadline_passed(deadline_s)
        if self._ownership.is_closed and (
            task.cancelled() or not isinstance(task.exception(), InferenceServerException | None)
        ):
            raise UnreachableError(CLOSED)
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Remove a finished task and read its error, because asyncio logs errors that no caller reads."""
        self._tasks.discard(task)
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
