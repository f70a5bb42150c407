"""A page is fetched whole, in time and in bounded memory, or the error says why not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hplm.errors import UnreachableError
from hplm.runtime.local_http import MOST_PAGE_BYTES, fetch_page

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@contextmanager
def server(answer: Callable[[socket.socket], object], family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    """A port whose first connection gets `answer`."""

    def serve() -> None:
        connection, _ = listening.accept()
        # The client may leave before the end of the answer.
        with connection, suppress(OSError):
            connection.recv(65536)
            answer(connection)

    with socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def trickle(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.02)


def flood(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    while True:
        connection.sendall(b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda connection: connection.recv(1), "does not answer: timed out"),
        (trickle, "does not answer: the page is not complete after 0.3 s"),
        (flood, "the page has more than 64 MiB"),
    ],
    ids=["hangs", "trickles", "without-end"],
)
def test_a_page_that_does_not_end_is_given_up(answer: Callable[[socket.socket], object], said: str) -> None:
    start_s = time.monotonic()
    timeout_s = 30.0 if answer is flood else 0.3
    with server(answer) as port, pytest.raises(UnreachableError, match=said):
        fetch_page(f"http://127.0.0.1:{port}/metrics", timeout_s=timeout_s)
    assert time.monotonic() - start_s < 20


def test_a_page_is_read_over_ipv6_without_a_length() -> None:
    with server(lambda connection: connection.sendall(HEAD + b"hplm_up 1\n"), socket.AF_INET6) as port:
        assert fetch_page(f"http://[::1]:{port}/metrics", timeout_s=10) == "hplm_up 1\n"
    assert MOST_PAGE_BYTES == 64 << 20
