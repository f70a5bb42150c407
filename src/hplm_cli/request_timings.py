"""Times of whole requests to a served base, one at a time, through a real Triton server."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from hplm_builder.profiles.stage_timings import WORDS
from hplm_client import Client
from hplm_client.transport.access_keys import keys_from_environment
from hplm_client.transport.headers import headers_from_environment

from hplm.access.quotas import OFF_VARIABLE
from hplm.core.roles import ENCODE_BACKENDS, ServedBase, settings_path
from hplm.core.text import TextEncoder
from hplm.errors import ConfigError
from hplm.profiles.profile import Timing
from hplm.quotas.limits import Limits
from hplm.reporting.progress import Report
from hplm.runtime.memory import count_process_memory
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.triton.workarounds.dead_stubs import stubs_over

# Requests of each length that count, and requests before them that warm up the stages.
REQUESTS, WARM_UP = 20, 3
# Most requests a second that one client sends one at a time: a request takes a millisecond at least.
MOST_REQUESTS_PER_S = 1000


@dataclass(frozen=True)
class AskedTenant:
    """The tenant that is asked. `texts`: how many texts its requests have, 1 or 2."""

    name: str
    texts: int


@dataclass(frozen=True)
class RunningBase:
    """A server that serves a base. `load_s`: seconds until it was ready, None if it ran before."""

    url: str
    served: ServedBase
    load_s: float | None


@contextmanager
def own_server(served: ServedBase, threads: int) -> Iterator[RunningBase]:
    """Start a server over a copy of a base's models on free ports, and wait until it is ready. Raises StartError.

    Its encode stage computes with `threads` threads, which are its share beside the other bases of the repository.
    """
    with tempfile.TemporaryDirectory(prefix="hplm-profile-") as folder:
        copy = Path(folder) / "models"
        for role in served.roles:
            shutil.copytree(served.models / role.name, copy / role.name)
            if role.settings is not None:
                path = settings_path(copy, role)
                # The store's path is relative to the folder of the settings.
                values = {**json.loads(path.read_text()), "store": str(served.store_root)}
                if role.backend in ENCODE_BACKENDS:
                    values["num_threads"] = threads
                path.write_text(json.dumps(values, indent=2) + "\n")
        start = time.perf_counter()
        log = served.models.parent / "triton-profile.log"
        # Nobody else calls this server, and the limits of tenants would refuse the measuring.
        environment = {OFF_VARIABLE: "1"}
        with TritonServer(copy, free_ports(), log=log, tied=True, environment=environment) as server:
            server.wait_ready()
            load_s = time.perf_counter() - start
            yield RunningBase(server.ports.grpc_url, replace(served, models=copy), load_s)


def check_limits(limits: Limits, tenant: str, lengths: Sequence[int]) -> None:
    """Raise ConfigError if a tenant's limits in force could refuse `time_requests`, before minutes are spent on measuring."""
    most_tokens = MOST_REQUESTS_PER_S * max(lengths)
    needed = {"requests_per_s": MOST_REQUESTS_PER_S, "tokens_per_s": most_tokens}
    for name, most in needed.items():
        if (limit := vars(limits)[name]) is not None and limit < most:
            raise ConfigError(
                f"{name} of tenant {tenant} is limited to {limit:,g}, so the server would refuse the measuring: leave --url "
                "out, because a server of its own has no limits; or give the tenant higher limits until the profile is done "
                f"(`hplm tenant limit {tenant} --requests-per-second {MOST_REQUESTS_PER_S} --tokens-per-second {most_tokens}`)"
            )


def ask_once(base: RunningBase, tenant: AskedTenant) -> None:
    """Ask a running server one question, so that a wrong address or key is an error at once. Raises what the client raises."""
    with _client(base) as client:
        client.predict(tenant.name, WORDS[0], WORDS[0] if tenant.texts == 2 else None)


def time_requests(
    base: RunningBase, tenant: AskedTenant, encoder: TextEncoder, lengths: Sequence[int], report: Report
) -> tuple[Timing, ...]:
    """Return the median milliseconds of a request of one text of each length in tokens, one request at a time.

    Every text is new: random words. Lengths take turns, so that a busy machine slows all of them.
    """
    rng = np.random.default_rng(1)
    taken_ms: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    special = _special_tokens(encoder, tenant.texts)
    with _client(base) as client:
        for turn in range(WARM_UP + REQUESTS):
            for tokens, times in taken_ms.items():
                words = rng.choice(list(WORDS), max(tenant.texts, tokens - special)).tolist()
                cut = len(words) // 2 if tenant.texts == 2 else len(words)
                pair = " ".join(words[cut:]) if tenant.texts == 2 else None
                start = time.perf_counter()
                client.predict(tenant.name, " ".join(words[:cut]), pair)
                if turn >= WARM_UP:
                    times.append(1000 * (time.perf_counter() - start))
            report("requests", (turn + 1) / (WARM_UP + REQUESTS))
    return tuple(Timing(1, tokens, median(times)) for tokens, times in taken_ms.items())


def _client(base: RunningBase) -> Client:
    return Client(base.url, model=base.served.name, headers=headers_from_environment(), key=keys_from_environment())


def process_bytes(base: ServedBase) -> tuple[int, int]:
    """Return the bytes of the look-up and the encode processes of servers over a base's models on this machine.

    Shared pages count in part. 0 if no server runs here.
    """
    stubs = stubs_over(base.models)
    by_backend = dict.fromkeys(("plot", *ENCODE_BACKENDS), 0)
    for role in base.roles:
        if role.backend in by_backend:
            by_backend[role.backend] += sum(map(count_process_memory, stubs.get(role.name, ())))
    return by_backend["plot"], sum(by_backend[backend] for backend in ENCODE_BACKENDS)


def _special_tokens(encoder: TextEncoder, texts: int) -> int:
    """Return the special tokens of a text or a pair."""
    (encoded,) = encoder.encode([("a", "a") if texts == 2 else "a"])
    return len(encoded.ids) - texts
