"""Synchronous client."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, overload
from weakref import finalize

from hplm.core import wire
from hplm.errors import ConfigError, ForbiddenError, HplmError
from hplm_client.answers import (
    Parts,
    Prediction,
    Request,
    options_of,
    outputs_of,
    parts_of,
    parts_of_all,
    predictions_of,
    tensors_of,
)
from hplm_client.transport.address import split_url
from hplm_client.transport.client_ownership import Owner
from hplm_client.transport.connection import (
    LAST_ANSWERS_S,
    LATE_ANSWER_S,
    USUAL_TIMEOUT_S,
    bounded,
    connect,
    overdue,
)
from hplm_client.transport.faults import typed_answer, typed_errors
from hplm_client.transport.http_worker_thread import Courier

# Of one of many: tenant, text, pair, and an error or what the answer comes out of.
_Begun = tuple[str, str, "str | None", Any]


@dataclass(frozen=True)
class _Call:
    """The options of tritonclient's infer calls, and the deadline that is among them as Triton's `timeout`."""

    options: dict[str, Any]
    deadline_s: float | None


class _GrpcAnswer:
    """The outcome of a call over gRPC: its result and its error, one of them None. gRPC's thread puts it."""

    def __init__(self, deadline_s: float | None) -> None:
        self._outcome: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._deadline_s, self._sent_s = deadline_s, time.monotonic()
        self.put, self.empty = self._outcome.put, self._outcome.empty

    def get(self) -> tuple[Any, Any]:
        """Wait for the outcome. Raises DeadlineError soon after the deadline.

        The call itself is not cancelled then: Triton before 24.12 may die of a request that is cancelled as its answer leaves.
        """
        if self._deadline_s is None:
            return self._outcome.get()
        left_s = self._sent_s + self._deadline_s + LATE_ANSWER_S - time.monotonic()
        try:
            return self._outcome.get(timeout=max(0.0, left_s))
        except Empty:
            raise overdue(self._deadline_s) from None


class Client:
    """Calls hBERT over HTTP or gRPC.

    >>> with Client("grpc://127.0.0.1:8001") as client:  # doctest: +SKIP
    ...     client.predict("films", "A moving, beautifully acted film.").label
    'positive'

    Over HTTP one client is for one thread. Raises the errors of `hplm.errors`, UnreachableError where nobody answers, and
    ConfigError where it was made before a fork.

    `deadline_s` counts from the request's arrival at the server and travels as Triton's own `timeout`. A request that cannot be
    answered by then is refused with UNAVAILABLE and the code DEADLINE_UNMEETABLE. BadInputError where it is 0, negative or NaN.
    A server that does not answer by then either is waited for LATE_ANSWER_S longer; then the client raises DeadlineError.

    `timeout_s` bounds each call.

    Over TLS the address is `https://HOST` or `grpcs://HOST`, and the certificate one that the system, or the file of
    `SSL_CERT_FILE`, trusts. `headers` go with each request; ForbiddenError where who guards the server wants others.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout_s: float = USUAL_TIMEOUT_S,
        concurrency: int = 16,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self._concurrency = concurrency
        address = split_url(url)
        self._protocol = address.protocol
        self._owner = Owner(is_bound_to_thread=address.protocol == "http")
        self._timeout_s = timeout_s
        # Over HTTP the connection has it, for each piece of an answer: see `_in_time`.
        self._bounded: dict[str, Any] = {"client_timeout": timeout_s} if address.protocol == "grpc" else {}
        self._opened = partial(connect, address, headers, timeout_s=timeout_s, concurrency=concurrency)
        self._module, self._triton = self._opened()
        self._courier: Courier | None = None
        self._answered = threading.Condition()
        self._under_way = 0

    def is_ready(self) -> bool:
        """Whether hBERT answers on that server; over HTTP also False where who guards it lets nobody ask.

        Raises UnreachableError where no server does.
        """
        self._owner.check()
        with typed_errors(self.url), self._owner.calling(), self._in_time():
            return bool(self._triton.is_model_ready(wire.MODEL, **self._bounded))

    def predict(
        self,
        tenant: str,
        text: str,
        pair: str | None = None,
        *,
        logits: bool = False,
        deadline_s: float | None = None,
    ) -> Prediction:
        """One text of one tenant, or two where it was trained on pairs: `text` and `pair`."""
        return self._predict([(tenant, text, pair)], logits, deadline_s)[0]

    def predict_batch(
        self, requests: Iterable[Request], *, logits: bool = False, deadline_s: float | None = None
    ) -> list[Prediction]:
        """Answers to up to 64 `(tenant, text)`, or `(tenant, text, pair)`, that go as one request: less work for all.

        They come together, or the first error of any, which says whose it is. With `logits` each answer has its own
        `[1, labels]`, or `[tokens, labels]` of a tagging, as `predict` gives it.
        """
        self._owner.check()
        asked = parts_of_all(requests)
        return self._predict(asked, logits, deadline_s) if asked else []

    def _predict(self, asked: Sequence[Parts], logits: bool, deadline_s: float | None) -> list[Prediction]:
        self._owner.check()
        with typed_errors(self.url):
            inputs, call = tensors_of(self._module, asked), self._call(logits, deadline_s)
        result = self._infer(self._triton, inputs, call)
        with typed_answer(self.url):
            return predictions_of(result, asked, logits)

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
        """Answers to `(tenant, text)` or `(tenant, text, pair)` in order, up to `concurrency` of them under way at once.

        Each has `deadline_s` from its own arrival at the server. The first that is refused ends it, after the answers to those
        before it, and answers behind it are lost; with `on_error="yield"` its error stands in its place. What `requests` raises
        comes after the answers to those before it too. The next request is read in the caller's thread: no answer comes
        while it is waited for.
        """
        if on_error not in ("raise", "yield"):
            raise ConfigError(f"on_error is 'raise' or 'yield', not {on_error!r}")
        self._owner.check()
        return self._answers(iter(requests), self._call(logits, deadline_s), logits, is_raised=on_error == "raise")

    def _answers(
        self, source: Iterator[Request], call: _Call, logits: bool, *, is_raised: bool
    ) -> Iterator[Prediction | HplmError]:
        pending: deque[_Begun] = deque()
        failure: Exception | None = None
        self._check_live()

        def finished() -> Prediction | HplmError:
            self._owner.check_process()
            try:
                return self._finish(pending.popleft(), logits)
            except HplmError as error:
                if is_raised:
                    raise
                return error

        while True:
            try:
                request = next(source)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            self._owner.check_process()
            if len(pending) == self._concurrency:
                yield finished()
            begun = self._begin(request, call)
            if is_raised and isinstance(begun[-1], HplmError):
                failure = begun[-1]
                break
            pending.append(begun)
            # What is there does not wait for more requests. Two of them: one would never catch up after a slow answer, and all
            # would leave the server idle while the caller is busy with them.
            for _ in range(2):
                if pending and _is_there(pending[0]):
                    yield finished()
        while pending:
            yield finished()
        if failure is not None:
            raise failure

    def _check_live(self) -> None:
        """A dead address shows here, as one error, not as one for each request. Who may not ask may still be answered."""
        self._owner.check()
        with suppress(ForbiddenError), typed_errors(self.url), self._owner.calling(), self._in_time():
            self._triton.is_server_live(**self._bounded)

    def _begin(self, request: Any, call: _Call) -> _Begun:
        """One of many, sent; in any thread. What cannot be sent has its error instead of an answer to come."""
        parts: tuple[str, str, str | None] = "", "", None
        try:
            parts = parts_of(request)
            with typed_errors(self.url), self._owner.calling():
                return (*parts, self._start(tensors_of(self._module, [parts]), call))
        except HplmError as error:
            return (*parts, error)

    def _in_time(self, deadline_s: float | None = None) -> AbstractContextManager[Any]:
        """Ends a call over HTTP after `timeout_s`, or soon after its deadline; gRPC does so itself, or `_GrpcAnswer`."""
        return bounded(self._timeout_s, deadline_s) if self._protocol == "http" else nullcontext()

    def _call(self, logits: bool, deadline_s: float | None) -> _Call:
        options = {"outputs": outputs_of(self._module, logits), **options_of(deadline_s), **self._bounded}
        return _Call(options, deadline_s)

    def _start(self, inputs: list[Any], call: _Call) -> Any:
        """Something whose `get` waits for the result and the error, one of them None."""
        self._owner.check_open()
        if self._protocol == "http":
            # Not `async_infer`, which sleeps 10 ms after each start and sends while an answer is waited for.
            if self._courier is None:
                self._courier = Courier(self._opened)
                # Its thread would outlive a client that nobody closes.
                finalize(self, self._courier.close)
            return self._courier.send(lambda triton: self._infer(triton, inputs, call))
        return self._start_grpc(self._triton, inputs, call)

    def _start_grpc(self, triton: Any, inputs: list[Any], call: _Call) -> _GrpcAnswer:
        answer = _GrpcAnswer(call.deadline_s)

        def put(result: Any, error: Any) -> None:
            answer.put((result, error))
            self._count(-1)

        triton.async_infer(wire.MODEL, inputs, callback=put, **call.options)
        self._count(1)
        return answer

    def _infer(self, triton: Any, inputs: list[Any], call: _Call) -> Any:
        with typed_answer(self.url), self._owner.calling(), self._in_time(call.deadline_s):
            if self._protocol == "http":
                return triton.infer(wire.MODEL, inputs, **call.options)
            if call.deadline_s is not None:
                result, error = self._start_grpc(triton, inputs, call).get()
                if error is not None:
                    raise error
                return result
            self._count(1)
            try:
                return triton.infer(wire.MODEL, inputs, **call.options)
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        """Of what is under way over gRPC, which `close` waits for."""
        with self._answered:
            self._under_way += more
            self._answered.notify_all()

    def _finish(self, started: _Begun, logits: bool) -> Prediction:
        tenant, text, pair, handle = started
        if isinstance(handle, HplmError):
            raise handle
        with typed_answer(self.url):
            with self._owner.calling():
                result, error = handle.get()
                if error is not None:
                    raise error
            return predictions_of(result, [(tenant, text, pair)], logits)[0]

    def close(self) -> None:
        """Close the connections; what is still under way is given up, over gRPC after half a second."""
        if not self._owner.is_here:
            # The connections are the other process's, which goes on with them.
            return
        self._owner.is_closed = True
        if self._courier is not None:
            self._courier.close()
        with self._answered:
            self._answered.wait_for(lambda: not self._under_way, LAST_ANSWERS_S)
        self._triton.close()
        self._owner.leave()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_there(begun: _Begun) -> bool:
    return isinstance(begun[-1], HplmError) or not begun[-1].empty()
