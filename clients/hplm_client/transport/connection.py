"""Connections: a tritonclient client for an address, plain or over TLS, with headers."""

from __future__ import annotations

import importlib
import os
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from numbers import Real
from typing import Any

from gevent import reinit
from gevent.ssl import create_default_context as gevent_context

from hplm.errors import ConfigError, UnreachableError
from hplm_client.transport.address import Address
from hplm_client.transport.certificates import certificates_from_environment, system_certificates
from hplm_client.transport.headers import checked_headers
from hplm_client.transport.time_limits import LONGEST_TIMEOUT_S, TimeElapsed

GRPC_OPTIONS = (
    # tritonclient's defaults for the length of messages, which a client with any option of its own has to repeat.
    *((f"grpc.max_{direction}_message_length", 2**31 - 1) for direction in ("send", "receive")),
    # Try to reconnect every 2 s. By default gRPC waits up to two minutes after an outage and refuses all calls meanwhile.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Ping the server every 20 s, to notice a connection that a firewall dropped silently. By default gRPC waits for a quarter
    # of an hour. Triton closes connections that ping much more often.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)

# A forked process inherits gevent's state without gevent's threads and would wait for them for ever. gevent's own fork calls
# `reinit` too; a second call does no harm.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reinit)


def connect(
    address: Address,
    headers: Mapping[str, str] | None,
    *,
    timeout_s: float,
    concurrency: int = 1,
    is_async: bool = False,
) -> tuple[Any, Any]:
    """Return tritonclient's module for the address, and a client of that module.

    `timeout_s` is for HTTP; over gRPC each call has its own timeout. `headers` go with each request and nowhere else. Over TLS
    the server's certificate must be one that the system trusts, or that the file in `SSL_CERT_FILE` trusts. Raises ConfigError.
    """
    if not isinstance(concurrency, int) or isinstance(concurrency, bool):
        raise ConfigError(f"concurrency is {concurrency!r}; it must be a whole number")
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}; it must be 1 or more")
    if isinstance(timeout_s, bool) or not (isinstance(timeout_s, Real) and 0 < timeout_s <= LONGEST_TIMEOUT_S):
        raise ConfigError(
            f"timeout_s is a number of seconds above 0 and at most {LONGEST_TIMEOUT_S:.0f}, not {timeout_s!r}"
        )
    sent_headers = checked_headers({} if headers is None else headers, address.protocol)
    certificates = certificates_from_environment() if address.tls else None
    module = importlib.import_module(f"tritonclient.{address.protocol}{'.aio' if is_async else ''}")
    options: dict[str, Any] = {"ssl": address.tls}
    if address.protocol == "grpc":
        # gRPC would ask a proxy of the environment even for this machine.
        no_proxy = [("grpc.enable_http_proxy", 0)] if _is_this_machine(address.host) else []
        options.update(channel_args=[*GRPC_OPTIONS, *no_proxy])
        if address.tls:
            options.update(root_certificates=certificates or system_certificates())
    elif is_async:
        # By default aiohttp opens 100 connections and counts the wait for a connection as the request's time.
        options.update(conn_timeout=timeout_s, conn_limit=0)
        if address.tls:
            options.update(ssl_context=ssl.create_default_context(cafile=certificates))
    else:
        options.update(concurrency=concurrency, connection_timeout=timeout_s, network_timeout=timeout_s)
        if address.tls:
            # By default geventhttpclient trusts its own list of certificates.
            options.update(ssl_context_factory=lambda cafile: gevent_context(cafile=certificates))
    triton = module.InferenceServerClient(address.host, **options)
    if address.protocol == "http" and is_async:
        # tritonclient has no option for redirects. Its other clients follow none.
        triton._stub = _SessionWithoutRedirects(triton._stub)
    if address.protocol == "http" and not is_async:
        pool = triton._client_stub._connection_pool
        for step in ("_connect_socket", "after_connect"):
            setattr(pool, step, _end_connecting_at_time_limit(getattr(pool, step), address))
        if sys.version_info < (3, 11):
            # For Python 3.10 the newest geventhttpclient sends a POST again, `size` + 1 times, if the connection drops.
            pool.size = -1
    triton.register_plugin(lambda request: request.headers.update(sent_headers))
    return module, triton


def _is_this_machine(host_and_port: str) -> bool:
    host = host_and_port.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


class _SessionWithoutRedirects:
    """An aiohttp session that follows no redirect, because a redirect would take text and headers to another server."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def get(self, **call: Any) -> Any:
        return self._session.get(**call, allow_redirects=False)

    def post(self, **call: Any) -> Any:
        return self._session.post(**call, allow_redirects=False)

    async def close(self) -> None:
        await self._session.close()


def _end_connecting_at_time_limit(step: Callable[..., Any], address: Address) -> Callable[..., Any]:
    """Return a step of connecting after which geventhttpclient tries no other address of the host once the time has elapsed."""

    def limited_step(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except TimeElapsed as error:
            url = f"{address.protocol}{'s' * address.tls}://{address.host}"
            raise UnreachableError(f"{url} does not answer: {error}") from None

    return limited_step
