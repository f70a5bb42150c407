"""Answers to texts of a source that may make wait: a thread reads and sends, so that no answer waits for the next text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from hplm.errors import HplmError
from hplm_client.answers import Prediction
from hplm_client.cli.predict_input import Asked
from hplm_client.client import Client


def answers_ahead(
    client: Client, tenant: str, asked: Iterator[Asked], deadline_s: float | None
) -> Iterator[tuple[Asked, Prediction | HplmError]]:
    """Each with its answer, in order, as soon as it is there; as many under way at once as the client allows.

    What `asked` raises comes after the answers before it. Where nobody reads on, the thread goes with the program.
    """
    call = client._call(False, deadline_s)
    client._check_live()
    room = threading.Semaphore(client._concurrency)
    begun: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            for one in asked:
                room.acquire()
                if isinstance(one.texts, HplmError):
                    begun.put((one, ("", "", None, one.texts)))
                else:
                    begun.put((one, client._begin((tenant, *one.texts), call)))
            begun.put(None)
        except BaseException as error:
            begun.put(error)

    threading.Thread(target=read, daemon=True).start()
    while (found := begun.get()) is not None:
        if isinstance(found, BaseException):
            raise found
        one, started = found
        try:
            answer: Prediction | HplmError = client._finish(started, False)
        except HplmError as error:
            answer = error
        room.release()
        yield one, answer
