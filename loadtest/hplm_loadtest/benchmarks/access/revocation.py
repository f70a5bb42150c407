"""The benchmark `hplm bench access-revocation`: how long servers under load still answer requests with a revoked key."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hplm_client import AsyncClient

from hplm.errors import ConfigError, ForbiddenError, HplmError, UnreachableError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.access.keyed_repository import KNOWN_S, keyed_repository
from hplm_loadtest.benchmarks.access.senders import TIMEOUT_S
from hplm_loadtest.benchmarks.served_repository import single_text_tenants
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.workloads.texts import text_settings, texts_of_kind

GOAL_S = 1.0
SERVERS = 2
LOOK_UP_INSTANCES = 2
# The most keys of a tenant; one is left at the end.
MOST_TRIALS = 99
TEXTS = 50
# Seconds that a client goes on with a key after its first refusal, because another process may still accept the key.
GO_ON_S = 1.2
# Seconds from a revocation to the next, so that all clients have gone on to the next key and got answers with it.
TRIAL_S = 3.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class _Asked(NamedTuple):
    """A request: the numbers of its server and key, when it was sent and done, in seconds of the monotonic clock, its code."""

    server: int
    key: int
    sent_s: float
    done_s: float
    code: str


class _Revocation(NamedTuple):
    """When a revocation began and when it had ended."""

    began_s: float
    ended_s: float


def access_revocation(models: Path, trials: int, clients: int, text_kind: str, registry: str = "") -> Report:
    """Revoke one key of a tenant after another, while clients use the key over HTTP and gRPC without pause on two servers.

    Measures the time from the end of the revocation to the start of the last request that a server answers. `registry` is the
    URL of an empty database, by default a file. Raises ConfigError.
    """
    if trials > MOST_TRIALS:
        raise ConfigError(f"--trials: a tenant has at most {MOST_TRIALS + 1} keys, so at most {MOST_TRIALS} trials")
    texts = texts_of_kind(text_kind, models)[:TEXTS]
    tenant = single_text_tenants(models)[0]
    with ExitStack() as stack:
        repository = stack.enter_context(keyed_repository(models, registry))
        keys = repository.new_keys([tenant] * (trials + 1))
        servers = [stack.enter_context(repository.server(LOOK_UP_INSTANCES)) for _ in range(SERVERS)]
        for server in servers:
            server.start()
        progress = stack.enter_context(progress_bars())
        bar = progress.add_task("revocations", total=trials)
        stop_file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hplm-revocation-"))) / "stop"
        pool = stack.enter_context(ProcessPoolExecutor(2, _PROCESSES))
        shown = [key.text() for key in keys]
        asking = [
            pool.submit(_ask_all, urls, max(1, clients // 4), repository.model, tenant, shown, texts, stop_file)
            for urls in ([server.ports.http_url for server in servers], [server.ports.grpc_url for server in servers])
        ]
        revoked: list[_Revocation] = []
        try:
            time.sleep(TRIAL_S + KNOWN_S)
            for key in keys[:-1]:
                began_s = time.monotonic()
                repository.revoke(key)
                revoked.append(_Revocation(began_s, time.monotonic()))
                time.sleep(TRIAL_S)
                progress.update(bar, advance=1)
        finally:
            stop_file.touch()
        asked = [one for part in asking for one in part.result()]
    rows = [_row(trial, one, [each for each in asked if each.key == trial]) for trial, one in enumerate(revoked)]
    late_s = [row["last_answer_s"] for row in rows]
    summary = {
        "trials": trials,
        "p50_s": median(late_s),
        "worst_s": max(late_s),
        "requests": len(asked),
        "answered": sum(one.code == ANSWERED for one in asked),
        "other": sum(one.code not in (ANSWERED, ForbiddenError.code) for one in asked),
    }
    untested = sum(row["servers"] < SERVERS for row in rows)
    settings = {
        "trials": trials,
        "clients": clients,
        "servers": SERVERS,
        "look_up_instances": LOOK_UP_INSTANCES,
        "registry": "PostgreSQL" if registry.startswith("postgres") else "SQLite",
        **text_settings(text_kind, texts, models),
        "protocol": "http and grpc",
    }
    text = "start of the last answered request after the revocation of its key, worst"
    goals = [
        Goal("58-revocation", text, GOAL_S, max(late_s), "s", "lower"),
        Goal(
            "58-revocation-early",
            "requests refused before their key was revoked",
            0,
            sum(row["refused_before"] for row in rows),
            "requests",
            "lower",
        ),
        Goal("58-revocation-tested", "trials in which not every server was asked", 0, untested, "trials", "lower"),
    ]
    return Report("access-revocation", settings, [summary, *rows], goals)


def _row(trial: int, revoked: _Revocation, asked: Sequence[_Asked]) -> dict[str, Any]:
    """Return what came of one revocation. A time is 0 if no request that began after the revocation was answered."""
    answered_s = [one.sent_s - revoked.ended_s for one in asked if one.code == ANSWERED]
    refused_s = [one.done_s for one in asked if one.code == ForbiddenError.code]
    return {
        "trial": trial + 1,
        "last_answer_s": max([0.0, *answered_s]),
        "refused_before": sum(done_s < revoked.began_s for done_s in refused_s),
        "answered_before": sum(sent_s < 0 for sent_s in answered_s),
        "answered_after": sum(sent_s >= 0 for sent_s in answered_s),
        "refused": len(refused_s),
        "servers": len({one.server for one in asked if one.code == ANSWERED and one.sent_s < revoked.began_s}),
    }


def _ask_all(
    urls: Sequence[str],
    count: int,
    model: str,
    tenant: str,
    keys: Sequence[str],
    texts: Sequence[str],
    stop_file: Path,
) -> list[_Asked]:
    """Send requests to each URL from `count` clients until the file is there."""
    asked: list[_Asked] = []

    async def ask(server: int, url: str) -> None:
        for number, key in enumerate(keys):
            async with AsyncClient(url, model=model, key=key, timeout_s=TIMEOUT_S) as client:
                refused_s = None
                while refused_s is None or time.monotonic() < refused_s + GO_ON_S:
                    if stop_file.exists():
                        return
                    code, sent_s = ANSWERED, time.monotonic()
                    try:
                        await client.predict(tenant, texts[len(asked) % len(texts)])
                    except ForbiddenError as error:
                        code = error.code
                        refused_s = refused_s or time.monotonic()
                    except UnreachableError as error:
                        code = error.code
                        await asyncio.sleep(0.05)
                    except HplmError as error:
                        code = error.code
                    asked.append(_Asked(server, number, sent_s, time.monotonic(), code))

    async def ask_everywhere() -> None:
        await asyncio.gather(*(ask(server, url) for server, url in enumerate(urls) for _ in range(count)))

    asyncio.run(ask_everywhere())
    return asked
