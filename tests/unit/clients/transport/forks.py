"""Forks of a process that has used a client, as by gunicorn --preload, multiprocessing or Celery. Run by `test_forks.py`."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hplm_client import Client, ManageClient

ANSWERING = """
import sys
from tests.unit.clients.answering import answering
with answering() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server in another process, because threads of this process would be lost in a fork."""
    command = [sys.executable, "-c", ANSWERING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def in_fork(call: Callable[[], object], timeout_s: float = 60.0) -> str:
    """Return the result or error of a call in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome = str(call())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    if not select.select([read], [], [], timeout_s)[0]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read() or "nothing"


def ask(url: str) -> str:
    with Client(url, timeout_s=60) as client:
        answers = [client.predict("films", "good"), *client.predict_many([("films", "good")] * 3)]
        return " ".join(str(answer.label) for answer in answers)


def test_a_client_made_in_a_fork_or_in_a_fork_of_a_fork_works(server: str) -> None:
    url = server.replace("127.0.0.1", "localhost")  # gevent looks up a host name in a thread
    assert ask(url) == "ok ok ok ok"
    assert in_fork(lambda: ask(url)) == "ok ok ok ok"
    assert in_fork(lambda: (ask(url), in_fork(lambda: ask(url)))[1]) == "ok ok ok ok"
    assert ask(url) == "ok ok ok ok"


def test_a_pool_of_processes_may_ask(server: str) -> None:
    assert ask(server) == "ok ok ok ok"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(ask, [server] * 4).get(timeout=60) == ["ok ok ok ok"] * 4


REFUSED = "ConfigError: the client was made in another process, before a fork: make one in each process"


def test_a_client_made_before_a_fork_is_refused_in_the_fork_and_works_outside_it(server: str) -> None:
    with Client(server, timeout_s=60) as client:
        answers = client.predict_many([("films", "good")] * 40)
        assert next(answers).label == "ok"
        for call in (
            lambda: client.predict("films", "good"),
            lambda: next(answers),
            lambda: list(client.predict_many([("films", "good")])),
            client.is_ready,
        ):
            assert in_fork(call) == REFUSED
        assert in_fork(client.close) == "None"
        assert [answer.label for answer in answers] == ["ok"] * 39


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_manage_clients_and_clients_over_grpc_are_refused_in_a_fork_too(scheme: str) -> None:
    with Client(f"{scheme}://127.0.0.1:1") as client, ManageClient(f"{scheme}://127.0.0.1:1") as manage:
        assert in_fork(lambda: client.predict("films", "good")) == REFUSED
        assert in_fork(lambda: manage.ask("tenant.list")) == REFUSED
