"""tritonclient's clients of an address: plain or over TLS, with headers for whoever guards the server."""

from __future__ import annotations

import importlib
import json
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from numbers import Real
from typing import Any

from gevent import Timeout, reinit
from gevent.ssl import create_default_context as gevent_context

from hplm.errors import ConfigError, DeadlineError, UnreachableError
from hplm_client.transport.address import Address

HEADERS_VARIABLE = "HPLM_HEADERS"
CERTIFICATES_VARIABLE = "SSL_CERT_FILE"
# Longer than the longest deadline, so that its answer can be waited for. What is far beyond overflows the transports' clocks:
# each of them does something else then.
LONGEST_TIMEOUT_S = 100_000.0
# Longer than servers' deadline where a request has none: a call that ended with it would be cancelled as its answer leaves.
USUAL_TIMEOUT_S = 35.0
# Seconds that a client waits after a request's deadline. The server counts a deadline from the request's arrival, so this is
# for the way there and back.
LATE_ANSWER_S = 1.0
# Of `close`, for answers to what is under way over gRPC: Triton before 24.12 may die of a request that is cancelled as its
# answer leaves.
LAST_ANSWERS_S = 0.5
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# One that ends with -bin would have bytes for its value.
GRPC_NAME = re.compile(r"(?!.*-bin\Z)[0-9a-z_.-]+")
# Lengths as tritonclient has them of itself, and no more where others are given.
GRPC_OPTIONS = (
    *((f"grpc.max_{way}_message_length", 2**31 - 1) for way in ("send", "receive")),
    # By itself gRPC would look for a server that was away for a while only every two minutes, and refuse all calls between.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # And would wait for a quarter of an hour for what a connection never brings that was lost without a word, as by a firewall.
    # Triton closes those that ask much more often.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")

# A forked process inherits gevent's state, with threads that did not come along: it would wait for them for ever. gevent's own
# fork does the same, and twice does no harm.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reinit)


def _is_this_machine(host: str) -> bool:
    """Of `host:port`."""
    name = host.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return name == "localhost"


class _Still:
    """aiohttp's session, which by itself would go wherever an answer sends it, and take text and headers along."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def get(self, **call: Any) -> Any:
        return self._session.get(**call, allow_redirects=False)

    def post(self, **call: Any) -> Any:
        return self._session.post(**call, allow_redirects=False)

    async def close(self) -> None:
        await self._session.close()


class _Elapsed(TimeoutError):
    """A call's time is over, as nothing but `bounded` says."""


def overdue(deadline_s: float) -> DeadlineError:
    """Return the error of a request whose answer is not waited for any longer."""
    return DeadlineError(
        f"no answer came within the deadline of {deadline_s:g} s and {LATE_ANSWER_S:g} s more; "
        "the request may be computed all the same"
    )


@contextmanager
def bounded(timeout_s: float, deadline_s: float | None = None) -> Iterator[None]:
    """End what gevent waits for after `timeout_s` with TimeoutError, or soon after `deadline_s` with DeadlineError.

    A connection's own time begins anew with each piece of an answer.
    """
    ends_s = timeout_s if deadline_s is None else min(timeout_s, deadline_s + LATE_ANSWER_S)
    elapsed = _Elapsed(f"timed out after {ends_s:g} s")
    try:
        with Timeout(ends_s, elapsed):
            yield
    except _Elapsed as error:
        if error is elapsed and deadline_s is not None and ends_s < timeout_s:
            raise overdue(deadline_s) from None
        raise


def _once(step: Callable[..., Any], address: Address) -> Callable[..., Any]:
    """A step of connecting after which geventhttpclient does not try the host's next address where the time is over."""

    def bounded_step(*given: Any) -> Any:
        try:
            return step(*given)
        except _Elapsed as error:
            url = f"{address.protocol}{'s' * address.tls}://{address.host}"
            raise UnreachableError(f"{url} does not answer: {error}") from None

    return bounded_step


def connect(
    address: Address,
    headers: Mapping[str, str] | None,
    *,
    timeout_s: float,
    concurrency: int = 1,
    is_async: bool = False,
) -> tuple[Any, Any]:
    """tritonclient's module for the address, and a client of it; `timeout_s` is for HTTP, over gRPC each call has its own.

    Over TLS the server's certificate must be signed by one that the system trusts, or by one in the file of `SSL_CERT_FILE`.
    `headers` go with each request and nowhere else. Raises ConfigError.
    """
    if not isinstance(concurrency, int) or isinstance(concurrency, bool):
        raise ConfigError(f"concurrency is {concurrency!r}; it must be a whole number")
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}; it must be 1 or more")
    if isinstance(timeout_s, bool) or not (isinstance(timeout_s, Real) and 0 < timeout_s <= LONGEST_TIMEOUT_S):
        raise ConfigError(
            f"timeout_s is a number of seconds above 0 and at most {LONGEST_TIMEOUT_S:.0f}, not {timeout_s!r}"
        )
    added = checked_headers({} if headers is None else headers)
    if address.protocol == "grpc" and (bad := [name for name in added if not GRPC_NAME.fullmatch(name)]):
        raise ConfigError(
            f"{bad[0]!r} is no name of a header over gRPC: letters, digits and _ . -, not -bin at its end"
        )
    named = _named_certificates() if address.tls else None
    module = importlib.import_module(f"tritonclient.{address.protocol}{'.aio' if is_async else ''}")
    options: dict[str, Any] = {}
    if address.protocol == "grpc":
        # gRPC would ask a proxy of the environment for this very machine.
        direct = [("grpc.enable_http_proxy", 0)] if _is_this_machine(address.host) else []
        options.update(channel_args=[*GRPC_OPTIONS, *direct])
        if address.tls:
            options.update(ssl=True, root_certificates=named or _certificates_of_the_system())
    elif is_async:
        # Of its own it would take 100, and count a request's time while it waits for one.
        options.update(conn_timeout=timeout_s, conn_limit=0)
        if address.tls:
            options.update(ssl=True, ssl_context=ssl.create_default_context(cafile=named))
    else:
        options.update(concurrency=concurrency, connection_timeout=timeout_s, network_timeout=timeout_s)
        if address.tls:
            # Left to itself, gevent's client trusts a list of its own.
            options.update(ssl=True, ssl_context_factory=lambda cafile: gevent_context(cafile=named))
    triton = module.InferenceServerClient(address.host, **options)
    if address.protocol == "http" and is_async:
        # tritonclient has no option for it, and its other clients follow nothing.
        triton._stub = _Still(triton._stub)
    if address.protocol == "http" and not is_async:
        pool = triton._client_stub._connection_pool
        for step in ("_connect_socket", "after_connect"):
            setattr(pool, step, _once(getattr(pool, step), address))
        if sys.version_info < (3, 11):
            # The newest geventhttpclient for it sends a POST again when the connection drops, this many times and once more.
            pool.size = -1
    triton.register_plugin(lambda request: request.headers.update(added))
    return module, triton


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """With small letters: gRPC, which calls them metadata, refuses capitals. Raises ConfigError, which shows no value."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers are a mapping of names to values, not {type(headers).__name__}")
    for name, value in headers.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise ConfigError(f"{name!r} is no name of a header")
        if not (isinstance(value, str) and VALUE.fullmatch(value)):
            raise ConfigError(
                f"header {name}: its value must be printable ASCII, without a space or a line's end around it"
            )
    return {name.lower(): value for name, value in headers.items()}


def headers_of_environment() -> dict[str, str]:
    """Those of `HPLM_HEADERS`, a JSON object of names and values: what commands send. Raises ConfigError."""
    try:
        found = json.loads(os.environ.get(HEADERS_VARIABLE) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        # Not what it holds: that may be a secret.
        raise ConfigError(f'{HEADERS_VARIABLE} must be a JSON object of strings, as {{"authorization": "Bearer ..."}}')
    return checked_headers(found)


def _named_certificates() -> str | None:
    """The file of `SSL_CERT_FILE`, which is trusted instead of what the system trusts."""
    named = os.environ.get(CERTIFICATES_VARIABLE)
    if not named:
        return None
    if not (os.path.isfile(named) and os.access(named, os.R_OK)):
        raise ConfigError(f"{CERTIFICATES_VARIABLE} names {named}, which is no file that can be read")
    try:
        ssl.create_default_context(cafile=named)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{CERTIFICATES_VARIABLE} names {named}, which holds no certificates: {error.reason}"
        ) from None
    return named


def _certificates_of_the_system() -> str:
    """As a file: gRPC reads no folder of them, and left to itself would trust a list of its own."""
    found = ssl.get_default_verify_paths().cafile
    if found is None:
        raise ConfigError(
            f"the system has no file of trusted certificates, which gRPC wants: set {CERTIFICATES_VARIABLE}"
        )
    return found
