"""The synchronous client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload
from weakref import finalize

from hplm.errors import ConfigError, ForbiddenError, HplmError, UnreachableError
from hplm_client.infer_tensors import (
    Request,
    TenantTextPair,
    infer_options,
    input_tensors,
    metadata_options,
    parse_request,
    parse_requests,
    predictions_from,
)
from hplm_client.model_choice import FOR_ALL_BASES, LOOK_S, UNSURE, ChosenModel, ModelChoice
from hplm_client.prediction import Prediction
from hplm_client.transport.access_keys import AccessKeys, KeyOrKeys
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import ClientOwnership
from hplm_client.transport.connection import connect
from hplm_client.transport.error_translation import typed_answer, typed_errors
from hplm_client.transport.grpc_outcome import GrpcOutcome
from hplm_client.transport.http_worker_thread import HttpWorkerThread
from hplm_client.transport.tenant_header import tenant_header
from hplm_client.transport.time_limits import CLOSE_GRACE_S, DEFAULT_TIMEOUT_S, time_limit


@dataclass(frozen=True)
class _CallOptions:
    """The options of tritonclient's infer calls, and what they are made of: logits, the deadline, and the model to call."""

    options: dict[str, Any]
    logits: bool
    deadline_s: float | None
    model: ChosenModel = UNSURE

    def of_tenant(self, tenant: str) -> _CallOptions:
        """Return the options for a request of a tenant."""
        return replace(self, options={**self.options, "headers": tenant_header(tenant)})


@dataclass(frozen=True)
class PendingPrediction:
    """A request under way: `outcome` has `get` and `empty`, or is the error of a request that cannot be sent."""

    request: TenantTextPair
    outcome: Any

    @property
    def is_done(self) -> bool:
        """Whether the answer or error is known."""
        return isinstance(self.outcome, HplmError) or not self.outcome.empty()


class Client:
    """A client that calls tenants' models over HTTP or gRPC.

    >>> with Client("grpc://127.0.0.1:8001") as client:  # doctest: +SKIP
    ...     client.predict("films", "A moving, beautifully acted film.").label
    'positive'

    Over HTTP use one client in one thread. Calls raise the errors of `hplm.errors`: UnreachableError if no server answers,
    ConfigError if the client was made before a fork.

    `model` is the model of a base. By default the client calls a model for the tenants of all bases: `cascade` if the server
    has it, else `hplm`, else `hbert`. The client asks for them at its first call, and again after the server or its model was
    away or did not know a tenant.

    `timeout_s` limits each call.

    `deadline_s` counts from the request's arrival at the server and travels as Triton's own `timeout`. The server refuses a
    request that it cannot answer in time with the code DEADLINE_UNMEETABLE. If the server does not answer in time either, the
    client waits one second longer and then raises DeadlineError. A deadline of 0, below 0 or NaN raises BadInputError.

    Over TLS the address is `https://HOST` or `grpcs://HOST`. The server's certificate must be one that the system, or the file
    in `SSL_CERT_FILE`, trusts. `headers` go with each request. If a proxy wants other headers, calls raise ForbiddenError.

    The header `hplm-tenant` names the tenant, for a proxy before several servers. `headers` may give another value.

    `key` is the tenant's key, for a server that needs keys, or a mapping of tenants to their keys. It goes with each request
    and is shown nowhere. Without a valid key for the tenant, calls raise ForbiddenError.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        concurrency: int = 16,
        headers: Mapping[str, str] | None = None,
        key: KeyOrKeys | None = None,
        model: str | None = None,
    ) -> None:
        self.url = url
        self._choice = ModelChoice(model)
        self._concurrency = concurrency
        address = split_url(url)
        self._is_grpc = address.protocol == "grpc"
        self._ownership = ClientOwnership(is_bound_to_thread=not self._is_grpc)
        self._timeout_s = timeout_s
        # Over HTTP `_time_limit` applies the timeout.
        self._timeout_option: dict[str, Any] = {"client_timeout": timeout_s} if self._is_grpc else {}
        self._keys = AccessKeys(key, headers)
        self._connect = partial(connect, address, self._keys.headers, timeout_s=timeout_s, concurrency=concurrency)
        self._module, self._triton = self._connect()
        self._worker_thread: HttpWorkerThread | None = None
        self._grpc_calls_changed = threading.Condition()
        self._num_grpc_calls = 0

    def is_ready(self) -> bool:
        """Return whether the model is loaded on the server; over HTTP also False if a proxy refuses the question.

        Raises UnreachableError if no server answers.
        """
        self._ownership.check_caller()
        return any(self._has_ready(model, self._timeout_s) for model in self._choice.candidates)

    def _has_ready(self, model: str, timeout_s: float) -> bool:
        limit = nullcontext() if self._is_grpc else time_limit(timeout_s, None)
        options = {"client_timeout": timeout_s} if self._is_grpc else {}
        with typed_errors(self.url), self._ownership.closed_as_unreachable(), limit:
            return bool(self._triton.is_model_ready(model, **options))

    def _with_model(self, call: _CallOptions) -> _CallOptions:
        """Return the options with the model to call. The first time, ask the server whether it has a model for all bases."""
        timeout_s = min(LOOK_S, self._timeout_s, LOOK_S if call.deadline_s is None else call.deadline_s)
        if (name := self._choice.name) is not None:
            model = ChosenModel(name)
        else:
            try:
                ready = next((name for name in FOR_ALL_BASES if self._has_ready(name, timeout_s)), None)
            except UnreachableError:
                # The call itself says what is wrong, and in which time.
                return replace(call, model=UNSURE)
            except ForbiddenError:
                # A server may forbid this question and still answer requests.
                ready = None
            model = self._choice.choose(ready)
        if not self._choice.knows_outputs(model):
            self._look_for_outputs(model, timeout_s)
        return self._call_options(call.logits, call.deadline_s, self._choice.with_outputs(model))

    def _look_for_outputs(self, model: ChosenModel, timeout_s: float) -> None:
        """Ask the server for the outputs of a model. If no server answers, the call itself says what is wrong."""
        limit = nullcontext() if self._is_grpc else time_limit(timeout_s, None)
        options = metadata_options(self._is_grpc, timeout_s)
        try:
            with typed_answer(self.url), self._ownership.closed_as_unreachable(), limit:
                self._choice.note_outputs(model, self._triton.get_model_metadata(model.name, **options))
        except UnreachableError:
            return
        except HplmError:
            # A server may forbid this question and still answer requests.
            self._choice.note_outputs(model, {})

    def predict(
        self,
        tenant: str,
        text: str,
        pair: str | None = None,
        *,
        logits: bool = False,
        deadline_s: float | None = None,
    ) -> Prediction:
        """Return the tenant's answer to one text. A tenant that was trained on pairs takes two: `text` and `pair`."""
        return self._predict([(tenant, text, pair)], logits, deadline_s)[0]

    def predict_batch(
        self, requests: Iterable[Request], *, logits: bool = False, deadline_s: float | None = None
    ) -> list[Prediction]:
        """Return the answers to up to 64 `(tenant, text)` or `(tenant, text, pair)`, sent as one request, which costs less.

        All answers arrive together. If any text is refused, the call raises the first error, which names that text. With
        `logits` each answer has its own `[1, labels]`, or `[tokens, labels]` of a tagging, as from `predict`.
        """
        self._ownership.check_caller()
        batch = parse_requests(requests)
        return self._predict(batch, logits, deadline_s) if batch else []

    def _predict(self, batch: Sequence[TenantTextPair], logits: bool, deadline_s: float | None) -> list[Prediction]:
        self._ownership.check_caller()
        with typed_errors(self.url):
            inputs, call = input_tensors(self._module, batch, self._keys), self._call_options(logits, deadline_s)
        call = self._with_model(call).of_tenant(batch[0][0])
        try:
            result = self._infer(self._triton, inputs, call)
        except HplmError as error:
            raise self._choice.failed(error, call.model) from error.__cause__
        with typed_answer(self.url):
            return predictions_from(result, batch, logits)

    @overload
    def predict_many(
        self,
        requests: Iterable[Request],
        *,
        logits: bool = False,
        deadline_s: float | None = None,
        on_error: Literal["raise"] = "raise",
    ) -> Iterator[Prediction]: ...

    @overload
    def predict_many(
        self,
        requests: Iterable[Request],
        *,
        logits: bool = False,
        deadline_s: float | None = None,
        on_error: Literal["yield"],
    ) -> Iterator[Prediction | HplmError]: ...

    def predict_many(
        self,
        requests: Iterable[Request],
        *,
        logits: bool = False,
        deadline_s: float | None = None,
        on_error: Literal["raise", "yield"] = "raise",
    ) -> Iterator[Prediction | HplmError]:
        """Yield the answers to `(tenant, text)` or `(tenant, text, pair)` in order, with up to `concurrency` under way.

        The deadline of each request counts from its own arrival at the server. The first error ends the iteration: it is raised
        after the answers to earlier requests, and answers to later requests are lost. With `on_error="yield"` the error takes
        the place of its answer. An exception of `requests` is also raised after the answers to earlier requests. The next
        request is read in the caller's thread, and no answer is yielded while the client waits for that request.
        """
        if on_error not in ("raise", "yield"):
            raise ConfigError(f"on_error is 'raise' or 'yield', not {on_error!r}")
        self._ownership.check_caller()
        call = self._call_options(logits, deadline_s)
        return self._predict_many(iter(requests), call, logits, raises_errors=on_error == "raise")

    def _predict_many(
        self, requests: Iterator[Request], call: _CallOptions, logits: bool, *, raises_errors: bool
    ) -> Iterator[Prediction | HplmError]:
        pending: deque[PendingPrediction] = deque()
        failure: Exception | None = None
        self._check_server_is_live()
        call = self._with_model(call)

        def finish_oldest() -> Prediction | HplmError:
            self._ownership.check_process()
            try:
                return self._finish(pending.popleft(), logits)
            except HplmError as error:
                failed = self._choice.failed(error, call.model)
                if raises_errors:
                    raise failed from error.__cause__
                return failed

        while True:
            try:
                request = next(requests)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            self._ownership.check_process()
            if len(pending) == self._concurrency:
                yield finish_oldest()
            prediction = self._begin(request, call)
            if raises_errors and isinstance(prediction.outcome, HplmError):
                failure = prediction.outcome
                break
            pending.append(prediction)
            # Finished answers do not wait for more requests. Up to two are yielded for each request: with one, the caller would
            # never catch up after a slow answer; with all, the server would idle while the caller handles them.
            for _ in range(2):
                if pending and pending[0].is_done:
                    yield finish_oldest()
        while pending:
            yield finish_oldest()
        if failure is not None:
            raise failure

    def _check_server_is_live(self) -> None:
        """Raise UnreachableError once if no server answers, instead of once a request.

        A server may forbid this question and still answer requests, so ForbiddenError is ignored.
        """
        self._ownership.check_caller()
        with (
            suppress(ForbiddenError),
            typed_errors(self.url),
            self._ownership.closed_as_unreachable(),
            self._time_limit(),
        ):
            self._triton.is_server_live(**self._timeout_option)

    def _begin(self, request: Any, call: _CallOptions) -> PendingPrediction:
        """Send a request, from any thread. A request that cannot be sent has its error as the outcome."""
        parsed: TenantTextPair = "", "", None
        try:
            parsed = parse_request(request)
            with typed_errors(self.url), self._ownership.closed_as_unreachable():
                inputs = input_tensors(self._module, [parsed], self._keys)
                return PendingPrediction(parsed, self._start(inputs, call.of_tenant(parsed[0])))
        except HplmError as error:
            return PendingPrediction(parsed, error)

    def _finish(self, prediction: PendingPrediction, logits: bool) -> Prediction:
        """Wait for the answer. Raises the request's error."""
        if isinstance(prediction.outcome, HplmError):
            raise prediction.outcome
        with typed_answer(self.url):
            with self._ownership.closed_as_unreachable():
                result, error = prediction.outcome.get()
                if error is not None:
                    raise error
            return predictions_from(result, [prediction.request], logits)[0]

    def _time_limit(self, deadline_s: float | None = None) -> AbstractContextManager[Any]:
        """End a call over HTTP at `timeout_s` or soon after its deadline. For gRPC, `GrpcOutcome` and gRPC itself do this."""
        return nullcontext() if self._is_grpc else time_limit(self._timeout_s, deadline_s)

    def _call_options(self, logits: bool, deadline_s: float | None, model: ChosenModel = UNSURE) -> _CallOptions:
        options = infer_options(self._module, logits, deadline_s, model)
        return _CallOptions({**options, **self._timeout_option}, logits, deadline_s, model)

    def _start(self, inputs: list[Any], call: _CallOptions) -> Any:
        """Start a call. Return an object whose `get` waits for the result and the error, one of them None."""
        self._ownership.check_open()
        if self._is_grpc:
            return self._start_grpc(self._triton, inputs, call)
        # tritonclient's `async_infer` sleeps 10 ms after each start, and sends only while the caller waits for an answer.
        if self._worker_thread is None:
            self._worker_thread = HttpWorkerThread(self._connect)
            # Otherwise the thread would outlive a client that is never closed.
            finalize(self, self._worker_thread.close)
        return self._worker_thread.send(lambda triton: self._infer(triton, inputs, call))

    def _start_grpc(self, triton: Any, inputs: list[Any], call: _CallOptions) -> GrpcOutcome:
        outcome = GrpcOutcome(call.deadline_s)

        def put(result: Any, error: Any) -> None:
            outcome.put((result, error))
            self._add_grpc_calls(-1)

        triton.async_infer(call.model.name, inputs, callback=put, **call.options)
        self._add_grpc_calls(1)
        return outcome

    def _infer(self, triton: Any, inputs: list[Any], call: _CallOptions) -> Any:
        with (
            typed_answer(self.url),
            self._ownership.closed_as_unreachable(),
            self._time_limit(call.deadline_s),
        ):
            if not self._is_grpc:
                return triton.infer(call.model.name, inputs, **call.options)
            if call.deadline_s is not None:
                result, error = self._start_grpc(triton, inputs, call).get()
                if error is not None:
                    raise error
                return result
            self._add_grpc_calls(1)
            try:
                return triton.infer(call.model.name, inputs, **call.options)
            finally:
                self._add_grpc_calls(-1)

    def _add_grpc_calls(self, count: int) -> None:
        """Count the calls under way over gRPC, for which `close` waits."""
        with self._grpc_calls_changed:
            self._num_grpc_calls += count
            self._grpc_calls_changed.notify_all()

    def close(self) -> None:
        """Close the connections. Calls under way end with UnreachableError, over gRPC after half a second."""
        if not self._ownership.is_own_process:
            # The connections belong to the process that made the client, and that process may still use them.
            return
        self._ownership.is_closed = True
        if self._worker_thread is not None:
            self._worker_thread.close()
        with self._grpc_calls_changed:
            self._grpc_calls_changed.wait_for(lambda: not self._num_grpc_calls, CLOSE_GRACE_S)
        self._triton.close()
        self._ownership.release_hubs()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
