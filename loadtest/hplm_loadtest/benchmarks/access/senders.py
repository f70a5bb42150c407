"""Clients that send requests without pause, or at a steady pace, from processes of their own, until they are told to end."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hplm_client import AsyncClient

from hplm.errors import HplmError, QuotaError, UnreachableError
from hplm_loadtest.scenarios.outcomes import ANSWERED

# Seconds to wait after a request that found no server.
UNREACHED_S = 0.05
# Seconds after which a request that has no answer counts as lost.
TIMEOUT_S = 30.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class Outcome(NamedTuple):
    """One request: its group and text, when it was sent and done, in seconds of the monotonic clock, and its code."""

    group: str
    tenant: str
    text: int
    sent_s: float
    done_s: float
    code: str

    @property
    def is_answered(self) -> bool:
        return self.code == ANSWERED

    @property
    def is_over_quota(self) -> bool:
        return self.code == QuotaError.code


@dataclass(frozen=True)
class Senders:
    """A group of clients. Each sends its next request when the last is done, and `every_s` after it was sent.

    A client draws a tenant and a text for each request. Its requests go to the `urls` in turns; the next client begins with
    the next URL.
    """

    name: str
    urls: Sequence[str]
    tenants: Sequence[str]
    texts: Sequence[str]
    count: int = 1
    every_s: float = 0.0


@dataclass
class Sending:
    """Groups that send now. After `stop` they have ended, and `outcomes` has all their requests."""

    stop_file: Path
    parts: Sequence[Future[list[Outcome]]]
    outcomes: list[Outcome] = field(default_factory=list)

    def stop(self) -> None:
        """End all clients after their requests under way."""
        self.stop_file.touch()
        self.outcomes = sorted((one for part in self.parts for one in part.result()), key=lambda one: one.sent_s)


@contextmanager
def sending(
    folder: Path, processes: Sequence[Sequence[Senders]], model: str, keys: Mapping[str, str]
) -> Iterator[Sending]:
    """Send requests of groups until the block ends. Each item of `processes` is a process with its groups.

    `keys` has a key for each tenant. `folder` is an empty folder for the file that ends the clients.
    """
    stop_file = folder / "stop"
    stop_file.unlink(missing_ok=True)
    with ProcessPoolExecutor(len(processes), _PROCESSES) as pool:
        sent = Sending(
            stop_file,
            [pool.submit(_send, groups, model, dict(keys), stop_file, n) for n, groups in enumerate(processes)],
        )
        try:
            yield sent
        finally:
            sent.stop()


def _send(groups: Sequence[Senders], model: str, keys: dict[str, str], stop_file: Path, seed: int) -> list[Outcome]:
    return asyncio.run(_send_all(groups, model, keys, stop_file, np.random.default_rng(seed)))


async def _send_all(
    groups: Sequence[Senders], model: str, keys: dict[str, str], stop_file: Path, rng: np.random.Generator
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with AsyncExitStack() as stack:
        clients = {
            url: await stack.enter_async_context(AsyncClient(url, model=model, key=keys, timeout_s=TIMEOUT_S))
            for url in dict.fromkeys(url for group in groups for url in group.urls)
        }

        async def send(group: Senders, number: int) -> None:
            turns = cycle([*group.urls[number % len(group.urls) :], *group.urls[: number % len(group.urls)]])
            while not stop_file.exists():
                tenant = group.tenants[int(rng.integers(len(group.tenants)))]
                text = int(rng.integers(len(group.texts)))
                code, sent_s = ANSWERED, time.monotonic()
                try:
                    await clients[next(turns)].predict(tenant, group.texts[text])
                except HplmError as error:
                    code = error.code
                outcomes.append(Outcome(group.name, tenant, text, sent_s, time.monotonic(), code))
                pause_s = UNREACHED_S if code == UnreachableError.code else 0.0
                await asyncio.sleep(max(pause_s, sent_s + group.every_s - time.monotonic()))

        await asyncio.gather(*(send(group, number) for group in groups for number in range(group.count)))
    return outcomes
