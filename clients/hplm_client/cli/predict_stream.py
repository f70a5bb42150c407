"""Answers to inputs that may arrive slowly. A thread reads and sends them, so that no answer waits for the next input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from hplm.errors import HplmError
from hplm_client.cli.predict_input import PredictInput
from hplm_client.client import Client, PendingPrediction
from hplm_client.prediction import Prediction


def stream_predictions(
    client: Client, tenant: str, inputs: Iterator[PredictInput], deadline_s: float | None
) -> Iterator[tuple[PredictInput, Prediction | HplmError]]:
    """Yield each input with its answer, in order, as soon as the answer is known. The client's `concurrency` are under way.

    An exception of `inputs` is raised after the answers to earlier inputs. If the caller stops reading, the thread ends with
    the program.
    """
    call = client._call_options(False, deadline_s)
    client._check_server_is_live()
    call = client._with_model(call)
    permits = threading.Semaphore(client._concurrency)
    # Inputs under way. An exception ends the queue, and so does None, after the last input.
    pending: SimpleQueue[tuple[PredictInput, PendingPrediction] | BaseException | None] = SimpleQueue()

    def read_and_send() -> None:
        try:
            for item in inputs:
                permits.acquire()
                if isinstance(item.texts, HplmError):
                    pending.put((item, PendingPrediction(("", "", None), item.texts)))
                else:
                    pending.put((item, client._begin((tenant, *item.texts), call)))
            pending.put(None)
        except BaseException as error:
            pending.put(error)

    threading.Thread(target=read_and_send, daemon=True).start()
    while (entry := pending.get()) is not None:
        if isinstance(entry, BaseException):
            raise entry
        item, prediction = entry
        try:
            answer: Prediction | HplmError = client._finish(prediction, False)
        except HplmError as error:
            answer = error
        permits.release()
        yield item, answer
