"""The benchmark `hplm bench access-quotas`: how far racing clients get beyond quotas, and who is refused below."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from hplm.access.quotas import estimated_tokens, file_of
from hplm.errors import ConfigError
from hplm.quotas.limits import Limits
from hplm.quotas.quota_file import QuotaFile
from hplm.quotas.token_bucket import rate_of
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.store.layout import Store
from hplm_loadtest.benchmarks.access.keyed_repository import KNOWN_S, KeyedRepository, keyed_repository
from hplm_loadtest.benchmarks.access.quota_error import Admitted, Used, burst, used, wrongly_refused
from hplm_loadtest.benchmarks.access.senders import Outcome, Senders, sending
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.workloads.texts import text_settings, texts_of_kind

SCENARIOS = ["one server", "SIGTERM", "kill -9", "two servers"]
# The quotas.
REQUESTS, TOKENS, AT_ONCE = "requests/s", "tokens/s", "concurrent requests"
# The groups of clients that stay below a quota. Those that race for a quota have its name.
BELOW = {name: f"below {name}" for name in (REQUESTS, TOKENS, AT_ONCE)}
# The part of a rate that a client below its quota sends, and the seconds between requests of clients below a number at once.
BELOW_SHARE, BELOW_EVERY_S = 0.8, 0.1
# The error that is allowed, as a part of the quota; if that is less than a lease, a lease is.
ALLOWED = 0.01
TEXTS = 50
WARM_UP_S = 2.0
# Seconds between two looks at how many requests are under way, and until none may be after the clients have ended.
LOOK_EVERY_S, ENDED_S = 0.01, 1.0


@dataclass(frozen=True)
class QuotaLoad:
    """The load: seconds of each scenario, racing clients, processes of the look-up stage of each server, and the quotas."""

    seconds: float = 30.0
    clients: int = 64
    look_up_instances: int = 2
    requests_per_s: float = 20.0
    tokens_per_s: float = 400.0
    concurrent: int = 4

    @property
    def rates(self) -> Mapping[str, float]:
        """The quotas a second."""
        return {REQUESTS: self.requests_per_s, TOKENS: self.tokens_per_s}


@dataclass(frozen=True)
class _Traffic:
    """The tenant of each group, its key, the texts with their tokens, and how many tokens of a text are read."""

    tenants: Mapping[str, str]
    keys: Mapping[str, str]
    texts: Sequence[str]
    tokens: Sequence[int]
    most_tokens: int


def access_quotas(
    models: Path, scenarios: Sequence[str], load: QuotaLoad, text_kind: str, registry: str = ""
) -> Report:
    """Let clients race for the quotas of three tenants over HTTP and gRPC, while other clients stay below the quotas of theirs.

    `registry` is the URL of an empty database, by default a file. Raises ConfigError.
    """
    texts = texts_of_kind(text_kind, models)[:TEXTS]
    rows: list[dict[str, Any]] = []
    with keyed_repository(models, registry) as repository, progress_bars() as progress:
        traffic = _traffic(repository, texts, load)
        bar = progress.add_task("quotas", total=len(scenarios) * load.seconds)
        for scenario in scenarios:
            rows += _scenario(repository, scenario, traffic, load, partial(_wait, progress, bar))
    settings = {
        "clients": load.clients,
        "seconds": load.seconds,
        "look_up_instances": load.look_up_instances,
        "requests_per_s": load.requests_per_s,
        "tokens_per_s": load.tokens_per_s,
        "concurrent": load.concurrent,
        "registry": "PostgreSQL" if registry.startswith("postgres") else "SQLite",
        **text_settings(text_kind, texts, models),
        "protocol": "http and grpc",
    }
    return Report("access-quotas", settings, rows, _goals(rows))


def _goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    rates = [row for row in rows if "allowed_error" in row]
    at_once = [row for row in rows if "most_at_once" in row]
    below = [row for row in rows if "wrongly_refused" in row]
    over = max(row["error"] / row["allowed_error"] for row in rates)
    under = max(-row["error"] / row["allowed_error"] for row in rates)
    beyond = max(row["most_at_once"] - row["quota"] for row in at_once)
    allowed = "over the allowed error, 1 % or one lease"
    return [
        Goal("58-quota-over", f"worst excess of racing clients {allowed}", 1.0, over, "x", "lower"),
        Goal("58-quota-under", f"worst shortfall of racing clients {allowed}", 1.0, under, "x", "lower"),
        Goal("58-quota-at-once", "requests at the same time beyond the quota", 0, beyond, "requests", "lower"),
        Goal(
            "58-quota-left",
            "requests that still count after all have ended",
            0,
            sum(row["left"] for row in at_once),
            "requests",
            "lower",
        ),
        Goal(
            "58-quota-refused",
            "requests below a quota that were refused",
            0,
            sum(row["wrongly_refused"] for row in below),
            "requests",
            "lower",
        ),
    ]


def _traffic(repository: KeyedRepository, texts: Sequence[str], load: QuotaLoad) -> _Traffic:
    """Limit a tenant for each group, and count the tokens of the texts. Raises ConfigError if there are too few tenants."""
    names = single_text_tenants(repository.models)
    groups = [*BELOW, *BELOW.values()]
    if len(names) < len(groups):
        raise ConfigError(f"{repository.models} has {len(names)} tenants of single texts, and this needs {len(groups)}")
    tenants = dict(zip(groups, names, strict=False))
    limits = (
        Limits(requests_per_s=load.requests_per_s),
        Limits(tokens_per_s=load.tokens_per_s),
        Limits(concurrent=load.concurrent),
    )
    for group, limited in zip(groups, (*limits, *limits), strict=True):
        repository.limit(tenants[group], limited)
    base = read_repository(repository.models).base
    tokens = [len(text.ids) for text in base.load_text_encoder().encode(list(texts))]
    return _Traffic(tenants, repository.add_keys(list(tenants.values())), texts, tokens, base.config.max_tokens)


def _scenario(
    repository: KeyedRepository, scenario: str, traffic: _Traffic, load: QuotaLoad, wait: Callable[[float], None]
) -> list[dict[str, Any]]:
    count = 2 if scenario == "two servers" else 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hplm-quotas-")))
        servers = [stack.enter_context(repository.server(load.look_up_instances)) for _ in range(count)]
        for server in servers:
            server.start()
        http, grpc = ([getattr(server.ports, f"{name}_url") for server in servers] for name in ("http", "grpc"))
        # The first requests to a tenant read its files.
        first = [Senders("warm-up", [*http, *grpc], list(traffic.tenants.values()), traffic.texts, 4, 0.05)]
        with sending(folder, [first], repository.model, traffic.keys):
            time.sleep(WARM_UP_S)
        time.sleep(KNOWN_S)
        stopped_s: float | None = None
        groups = [*_racing(traffic, http, grpc, load.clients), _below(traffic, http, grpc, load)]
        at_once = stack.enter_context(closing(_AtOnce(repository.store, traffic.tenants[AT_ONCE])))
        with sending(folder, groups, repository.model, traffic.keys) as sent, at_once.watching():
            if scenario in ("SIGTERM", "kill -9"):
                wait(load.seconds / 2)
                stopped_s = time.monotonic()
                (servers[0].kill if scenario == "kill -9" else servers[0].stop)()
                servers[0].start()
                wait(load.seconds / 2)
            else:
                wait(load.seconds)
        time.sleep(ENDED_S)
        left = at_once.now()
    return _rows(scenario, sent.outcomes, traffic, load, stopped_s, at_once.most, left)


def _wait(progress: Progress, bar: Any, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(step_s := min(1.0, left_s))
        progress.update(bar, advance=step_s)


def _racing(traffic: _Traffic, http: Sequence[str], grpc: Sequence[str], clients: int) -> list[list[Senders]]:
    """Return two processes of clients that send to all racing tenants without pause: over HTTP and over gRPC."""
    return [
        [
            Senders(name, urls, [traffic.tenants[name]], traffic.texts, _share(clients, number, 6))
            for number, name in enumerate(BELOW, 3 * half)
        ]
        for half, urls in enumerate((http, grpc))
    ]


def _below(traffic: _Traffic, http: Sequence[str], grpc: Sequence[str], load: QuotaLoad) -> list[Senders]:
    """Return the clients that stay below their quotas."""
    # Servers and protocols take turns.
    urls = [*http, *reversed(grpc)]
    # One text, so that a steady pace is a steady number of tokens.
    text = traffic.texts[0]
    each = {REQUESTS: 1.0, TOKENS: float(_most_tokens(traffic, 0))}
    groups = [
        Senders(BELOW[name], urls, [traffic.tenants[BELOW[name]]], [text], 1, amount / (BELOW_SHARE * load.rates[name]))
        for name, amount in each.items()
    ]
    # Each server gets an even part of the requests at the same time, and a client stays with its server.
    name = BELOW[AT_ONCE]
    own = max(1, load.concurrent // len(http))
    groups += [
        Senders(name, [one], [traffic.tenants[name]], [text], _share(own, number, 2), BELOW_EVERY_S)
        for pair in zip(http, grpc, strict=True)
        for number, one in enumerate(pair)
    ]
    return groups


def _most_tokens(traffic: _Traffic, text: int) -> int:
    """Return what a text costs at most: its tokens, or the estimate by which it is admitted."""
    return max(traffic.tokens[text], estimated_tokens([traffic.texts[text].encode()], traffic.most_tokens))


def _share(count: int, number: int, of: int) -> int:
    return (count + number) // of


def _rows(
    scenario: str,
    outcomes: Sequence[Outcome],
    traffic: _Traffic,
    load: QuotaLoad,
    stopped_s: float | None,
    most: int,
    left: int,
) -> list[dict[str, Any]]:
    """Return a row for each group."""
    rows: list[dict[str, Any]] = []
    by_group = {name: [one for one in outcomes if one.group == name] for name in traffic.tenants}
    for name, per_s in load.rates.items():
        amounts: Sequence[float] = [1.0] * len(traffic.tokens) if name == REQUESTS else traffic.tokens
        group = by_group[name]
        requests = _decided(group, amounts)
        # A server that is down admits nothing, so the times before and after it count.
        parts = [requests]
        if stopped_s is not None:
            before = [one for one in requests if one[0].sent_s < stopped_s]
            parts = [before, requests[len(before) :]]
        found = Used(*map(sum, zip(*map(used, parts), strict=True)))
        lease, error = rate_of(per_s).capacity, found.error(per_s)
        quota = per_s * (found.most_s if error > 0 else found.least_s)
        admitted = [request for request, is_admitted in requests if is_admitted]
        rows.append(
            {
                "scenario": scenario,
                "racing_for": name,
                "quota": per_s,
                "admitted": found.units,
                "within_quota": quota,
                "error": error,
                "allowed_error": max(ALLOWED * quota, lease),
                "error_percent": 100 * error / quota if quota else 0.0,
                "error_leases": error / lease,
                "burst_leases": burst(admitted, per_s) / lease,
                **_counts(group),
            }
        )
    group = by_group[AT_ONCE]
    rows.append(
        {
            "scenario": scenario,
            "racing_at_once": AT_ONCE,
            "quota": load.concurrent,
            "most_at_once": most,
            "left": left,
            **_counts(group),
        }
    )
    wrong = {
        BELOW[name]: wrongly_refused(_decided(by_group[BELOW[name]], [amount]), rate_of(load.rates[name]))
        for name, amount in ((REQUESTS, 1.0), (TOKENS, float(_most_tokens(traffic, 0))))
    }
    name = BELOW[AT_ONCE]
    wrong[name] = sum(one.is_over_quota for one in by_group[name])
    rows += [
        {"scenario": scenario, "clients": name, "wrongly_refused": count, **_counts(by_group[name])}
        for name, count in wrong.items()
    ]
    return rows


def _decided(group: Sequence[Outcome], amounts: Sequence[float]) -> list[tuple[Admitted, bool]]:
    """Return the requests on which a quota has decided, with whether they were admitted; `amounts` are those of the texts."""
    return [
        (Admitted(one.sent_s, one.done_s, amounts[one.text]), one.is_answered)
        for one in group
        if one.is_answered or one.is_over_quota
    ]


def _counts(group: Sequence[Outcome]) -> dict[str, Any]:
    codes = Counter(one.code for one in group)
    return {
        "answered": codes.pop(ANSWERED, 0),
        "over_quota": sum(one.is_over_quota for one in group),
        "other": {code: count for code, count in codes.items() if code != "QUOTA"},
    }


class _AtOnce:
    """Counts the requests of a tenant that are under way on all servers over a store, as their files of quotas have them."""

    def __init__(self, store: Store, tenant: str) -> None:
        pattern = file_of(store, "*")
        self._folder, self._pattern = pattern.parent, pattern.name
        self._tenant = tenant
        self._files: dict[Path, QuotaFile] = {}
        self.most = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def now(self) -> int:
        """Return the requests under way now."""
        found = set(self._folder.glob(self._pattern))
        for path in found - self._files.keys():
            self._files[path] = QuotaFile(path)
        return sum(self._files[path].under_way(self._tenant, time.monotonic()) for path in found)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again until the block ends; `most` is then the highest count."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_EVERY_S):
                self.most = max(self.most, self.now())

        thread = threading.Thread(target=watch, name="hplm-at-once")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
