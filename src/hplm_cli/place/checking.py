"""Measures a plan on this machine: its nodes run on loopback behind a real proxy, and its workload is replayed."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path

import numpy as np
from hplm_builder.placement.apply_plan import Source, write_folders
from hplm_builder.placement.plan_build import bases_of_nodes, placement_of, stage_times_of
from hplm_builder.placement.planned_workload import planned_requests, sent_requests
from hplm_builder.placement.proxy_config import ProxiedNode, ProxyAddress, proxy_files
from hplm_builder.placement.proxy_process import find_haproxy, running_proxy
from hplm_builder.profiles.stage_timings import WORDS
from hplm_client.cli.display import console
from hplm_loadtest.placement.loopback import NodeServer, addresses, serve_plan
from hplm_loadtest.placement.replay import replay
from hplm_loadtest.scenarios.outcomes import LATE_S

from hplm.adapters.bank import TenantBank
from hplm.errors import ArtifactError, ConfigError, InternalError
from hplm.models import base_folder
from hplm.placement.live_simulation import simulate_live
from hplm.placement.outcomes import Outcomes
from hplm.placement.plan import CheckResult, Plan, PlannedNode
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.processor import processor_name
from hplm.triton.launcher.ports import free_ports

# Tenants of each base that ask in a replay, one after another, at most.
MOST_TENANTS = 200
# Different texts of a replay. Texts that come again are known to the look-up stage, as in real traffic, but rarely.
MOST_TEXTS = 5000
# Special tokens of a text, in front and behind.
SPECIAL_TOKENS = 2


@dataclass(frozen=True)
class Checked:
    """The predicted and the measured answers to the same requests, and the check's result for the plan."""

    predicted: Outcomes
    measured: Outcomes
    result: CheckResult


def check_plan(plan: Plan, source: Source, seconds: float) -> Checked:
    """Serve a plan on this machine, replay `seconds` of its workload, and compare with the prediction for these requests."""
    assumed = replace(plan.assumptions, duration_s=min(seconds, plan.assumptions.duration_s))
    requests = sent_requests(assumed)
    predicted = simulate_live(placement_of(plan), stage_times_of(plan), planned_requests(assumed))
    tenants = askable_tenants(source, list(requests.names))
    texts = random_texts(plan.assumptions.tokens, min(len(requests), MOST_TEXTS))
    with serving(plan, source) as (urls, where):
        replayed = replay(urls, {base: base for base in requests.names}, tenants, requests, texts)
    run, measured = replayed.run, replayed.outcomes
    if run.kinds["failed"]:
        raise InternalError(
            f"answers or refusals were expected from the nodes of the plan, got {dict(Counter(run.codes))}: nothing is noted"
        )
    if not run.kept_up:
        _note(
            f"the clients fell behind: {1 - run.sent_within(LATE_S):.1%} of the requests were sent more than 20 ms late"
        )
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = CheckResult(now, predicted.attainment, measured.attainment, len(requests), where)
    return Checked(predicted, measured, result)


@contextmanager
def serving(plan: Plan, source: Source) -> Iterator[tuple[Mapping[str, Sequence[str]], str]]:
    """Serve a plan on this machine. Yield the addresses of each base, and words for where it runs."""
    cores = sorted(os.sched_getaffinity(0))
    local, wanted = on_this_machine(plan, cores)
    where = f"{processor_name()}, {len(cores)} cores"
    if wanted > len(cores):
        where += f" for devices with {wanted} cores"
        _note(
            f"the plan's devices have {wanted} cores, and this machine has {len(cores)}: answers will be slower than planned"
        )
    elif wanted == len(cores):
        _note(
            "the plan's devices have all cores of this machine, and Triton, the look-up stages, the proxy and the clients need "
            "some too: under load answers will be slower than planned"
        )
    with tempfile.TemporaryDirectory(prefix="hplm-place-") as folder:
        applied, logs = Path(folder) / "applied", Path(folder) / "logs"
        write_folders(local, source, applied, {})
        with serve_plan(local, applied, log=logs) as servers:
            program = find_haproxy()
            if program is None:
                _note(
                    "HAProxy is not installed: requests go to the nodes directly, each to the node with the shortest queue"
                )
                yield addresses(local, servers), f"{where}, without a proxy"
                return
            ports = free_ports()
            listen = ProxyAddress("127.0.0.1", ports.http, ports.grpc)
            files = proxy_files(proxied_servers(local, servers), source.model_of_tenant(), local.tenants, listen)
            with running_proxy(program, Path(folder) / "proxy", files, listen):
                url = f"grpc://127.0.0.1:{ports.grpc}"
                yield {base: [url] for base in plan.assumptions.rates}, f"{where}, behind HAProxy"


def proxied_servers(plan: Plan, servers: Sequence[NodeServer]) -> list[ProxiedNode]:
    """Return the running nodes of a plan as the proxy reaches them."""
    numbers = {node.name: number for number, node in enumerate(plan.nodes, 1)}
    bases = bases_of_nodes(plan)
    return [
        ProxiedNode(
            server.name,
            numbers[server.name],
            "127.0.0.1",
            server.http_port,
            server.grpc_port,
            server.health_port,
            bases[server.name],
        )
        for server in servers
    ]


def on_this_machine(plan: Plan, cores: Sequence[int]) -> tuple[Plan, int]:
    """Return a plan whose devices use different cores of this machine, as far as there are enough, and the cores it wants."""
    used = {(group.node, device) for group in plan.groups for device in group.devices}
    wanted = 0
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        devices = []
        for number, device in enumerate(node.cores):
            first = wanted if (node.name, number) in used else 0
            devices.append(tuple(sorted({cores[(first + place) % len(cores)] for place in range(len(device))})))
            wanted += len(device) if (node.name, number) in used else 0
        nodes.append(replace(node, cores=tuple(devices)))
    return replace(plan, nodes=tuple(nodes)), wanted


def askable_tenants(source: Source, names: Sequence[str]) -> dict[str, list[str]]:
    """Return tenants of each base that take one text. Raises ConfigError for a base without such a tenant."""
    found: dict[str, list[str]] = {}
    for name in names:
        base = source.base(name).base
        fingerprint = base_folder.read(source.store.base(base), verify=False).fingerprint
        with closing(Catalog(source.store, base)) as catalog:
            bank = TenantBank(source.store, catalog, fingerprint)
            tenants: list[str] = []
            for tenant in sorted(catalog.served(), key=attrgetter("name")):
                if len(tenants) < MOST_TENANTS and _takes_one_text(bank, tenant):
                    tenants.append(tenant.name)
        if not tenants:
            raise ConfigError(f"base {name!r} has no tenant that takes one text, which a replay could ask")
        found[name] = tenants
    return found


def random_texts(tokens: int, count: int) -> list[str]:
    """Return texts of random words with a number of tokens, special tokens included. The same numbers give the same texts."""
    rng = np.random.default_rng(1)
    return [" ".join(rng.choice(list(WORDS), max(1, tokens - SPECIAL_TOKENS)).tolist()) for _ in range(count)]


def _note(text: str) -> None:
    console().print(text, markup=False)


def _takes_one_text(bank: TenantBank, tenant: ServedTenant) -> bool:
    try:
        return bank.card(tenant).texts == 1
    except ArtifactError:
        # The server leaves such a tenant out too.
        return False
